"""What every event is."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    level: ClassVar[int] = logging.INFO


type Callback = Callable[[Event], object]
