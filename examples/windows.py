"""Text that every machine has, for the small examples: the Python standard library's source."""

import sysconfig
from pathlib import Path
from random import Random

CONTEXT = 8
"""Bytes that a model sees before the one that it predicts."""


def read_text() -> bytes:
    """The modules of the standard library, one after another; some megabytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(path.read_bytes() for path in files)


def draw(text: bytes, size: int, random: Random) -> list[list[int]]:
    """``size`` windows of ``text``, of ``CONTEXT + 1`` bytes each."""
    starts = [random.randrange(len(text) - CONTEXT) for _ in range(size)]
    return [list(text[start : start + CONTEXT + 1]) for start in starts]
