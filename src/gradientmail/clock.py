"""The clock that the loop half of a node runs on, and how work leaves the loop.

Both are arguments everywhere below ``session``, so that many nodes can run in one thread under
virtual time, the same from the same seed.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock of one node. Its zero means nothing; it is never compared across nodes."""

    def now(self) -> float:
        """Seconds since an arbitrary moment, never decreasing."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds`` on this clock."""
        ...


class MonotonicClock:
    """The machine's own monotonic clock."""

    def now(self) -> float:
        """Seconds of ``time.monotonic``."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)


class Offload(Protocol):
    """Runs a function away from the event loop and returns its result.

    In production a small pool of daemon threads; under virtual time the call itself.
    """

    async def __call__[**P, T](
        self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return ``work(*args, **kwargs)`` or raise what it raised."""
        ...


class Inline:
    """Offloads nothing: runs the work where the loop runs."""

    async def __call__[**P, T](
        self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return ``work(*args, **kwargs)``."""
        return work(*args, **kwargs)


inline = Inline()


async def wait_or_sleep(clock: Clock, seconds: float, *events: asyncio.Event) -> bool:
    """Wait until one of ``events`` is set, at most ``seconds`` on ``clock``; whether one is set."""
    if any(event.is_set() for event in events):
        return True
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    waits.append(asyncio.ensure_future(clock.sleep(seconds)))  # type: ignore[arg-type]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return any(event.is_set() for event in events)
