"""What the subcommands share: how each looks to argparse, exit statuses, tables."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from gradientmail.exchange import layout
from gradientmail.mailbox.urls import path_of

type Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - no other

FINE = 0
"""Exit status: all is well."""
FAULTY = 1
"""Exit status: what was looked at is not."""
MISUSED = 2
"""Exit status: the command line cannot be understood, as argparse has it."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
UNREAD = 141
"""Exit status when whoever read the output has gone (``| head``), as shells have it."""

UNREACHED = "check the address, that the store is up, and what its own log says"
"""What to do when a store does not answer, or only that it cannot now."""


class Command(Protocol):
    """What the module of a subcommand has."""

    def add_to(self, subcommands: Subcommands, /) -> None:
        """Add a parser with arguments and, as the default ``run``, ``run(arguments) -> int``."""
        ...


def other_runs(url: str) -> str:
    """Where runs are near a folder that may have been taken for one of them; empty for no other.

    Right below it, or that of which it is a part.
    """
    with suppress(ValueError, OSError):
        name = path_of(url)
        if name is None:
            return ""
        folder = Path(name)
        below = sorted(str(found.parent) for found in folder.glob(f"*/{layout.MANIFEST}"))
        if below:
            more = ", …" if below[5:] else ""
            return f"runs are right below it: {', '.join(below[:5])}{more}"
        if not (folder / layout.MANIFEST).exists():
            for outer in folder.absolute().parents[:3]:
                if (outer / layout.MANIFEST).exists():
                    return f"it is a part of the run in {outer}"
    return ""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with their columns padded to one width, the last column as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=True))]).rstrip()
        for row in rows
    )
    return "\n".join(lines)
