"""The clock that the loop half of a node runs on, and how work leaves the loop.

Both are arguments everywhere below ``session``, so that many nodes can run in one thread under
virtual time, the same from the same seed.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock of one node. Its zero means nothing; it is never compared across nodes."""

    def now(self) -> float:
        """Seconds since an arbitrary moment, never decreasing."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds`` on this clock."""
        ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` on the running loop in ``seconds``; returns what cancels that."""
        ...


class MonotonicClock:
    """The machine's own monotonic clock."""

    def now(self) -> float:
        """Seconds of ``time.monotonic``."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        """As the running event loop does it."""
        return asyncio.get_running_loop().call_later(seconds, callback).cancel


class Offload(Protocol):
    """Runs a function away from the event loop and returns its result.

    In production one daemon thread for all; under virtual time the call itself.
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


class Flag:
    """Wakes whoever waits when it is set. Used on the loop's thread.

    An ``asyncio.Event`` of which several can be waited for without a task for each.
    """

    __slots__ = ("_set", "_waiting")

    def __init__(self) -> None:
        self._set = False
        self._waiting: dict[asyncio.Future[None], None] = {}  # in a fixed order, unlike a set

    def is_set(self) -> bool:
        """Whether ``set`` has been called, and ``clear`` not after it."""
        return self._set

    def set(self) -> None:
        """Wake all who wait, now and until ``clear``."""
        self._set = True
        for waiting in self._waiting:
            _wake(waiting)
        self._waiting.clear()

    def clear(self) -> None:
        """Let those wait who ask from now on."""
        self._set = False

    async def wait(self) -> None:
        """Return when it is set."""
        await wait_any(self)

    def add(self, waiting: asyncio.Future[None]) -> None:
        """Complete ``waiting`` when it is set."""
        self._waiting[waiting] = None

    def remove(self, waiting: asyncio.Future[None]) -> None:
        """No more."""
        self._waiting.pop(waiting, None)


class Signal:
    """Wakes everyone who waits, again and again."""

    def __init__(self) -> None:
        self._flag = Flag()

    def set(self) -> None:
        """Wake those who hold the current ``next``."""
        flag, self._flag = self._flag, Flag()
        flag.set()

    @property
    def next(self) -> Flag:
        """A flag that the next ``set`` sets. Take it before looking at what may change."""
        return self._flag


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


async def wait_any(*flags: Flag) -> None:
    """Return when one of ``flags`` is set."""
    if not any(flag.is_set() for flag in flags):
        await _wait(asyncio.get_running_loop().create_future(), flags)


async def wait_or_sleep(clock: Clock, seconds: float, *flags: Flag) -> bool:
    """Wait until one of ``flags`` is set, at most ``seconds`` on ``clock``; whether one is set."""
    if not any(flag.is_set() for flag in flags):
        waiting = asyncio.get_running_loop().create_future()
        cancel = clock.call_later(seconds, partial(_wake, waiting))
        try:
            await _wait(waiting, flags)
        finally:
            cancel()
    return any(flag.is_set() for flag in flags)


async def _wait(waiting: asyncio.Future[None], flags: tuple[Flag, ...]) -> None:
    for flag in flags:
        flag.add(waiting)
    try:
        await waiting
    finally:
        for flag in flags:
            flag.remove(waiting)
