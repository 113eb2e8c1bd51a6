"""What every event is."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    level: ClassVar[int] = logging.INFO


def shown_bytes(count: int) -> str:
    """``512 bytes``, ``3.4 KiB``, ``2.0 MiB``, ``1.5 GiB``: so that no size reads as 0.0."""
    if count < 2**10:
        return f"{count} byte{'' if count == 1 else 's'}"
    power = min((count.bit_length() - 1) // 10, 3)
    return f"{count / 2 ** (10 * power):.1f} {' KMG'[power]}iB"


def shown_steps(count: int) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} step{'' if count == 1 else 's'}"


type Callback = Callable[[Event], object]
