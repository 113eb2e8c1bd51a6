"""An event loop whose time is a number that jumps to the next timer when nothing else is to do.

Nothing sleeps and nothing waits for the machine, so the same program takes the same steps at
the same times, whatever else the machine does. There is one thread and no I/O: both are refused.
"""

import asyncio
import math
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, Never, override

from gradientmail.errors import GradientMailError

SPIN_LIMIT = 100_000
"""Steps of the loop at one moment after which it is taken not to end."""


class VirtualTimeError(GradientMailError):
    """The program under virtual time cannot go on, or does what needs real time."""


class Deadlock(VirtualTimeError):
    """Every task waits for another one: nothing is ready and no timer is set."""


class TimeLimitReached(VirtualTimeError):
    """The program had not ended after the seconds that it was given."""


type _Timer = asyncio.TimerHandle | asyncio.Future[None]
"""What rings: a call that is made then, or a future that is completed."""


class _Instant(selectors.BaseSelector):
    """The loop's selector: where a real one would block, it moves the time on to the next timer.

    The timers are kept here and not by the loop: they are most of what a simulated world is made
    of, and many are for one moment. Those ring in the order in which they were set.
    """

    def __init__(self, limit_seconds: float) -> None:
        self.now = 0.0
        self._limit_seconds = limit_seconds
        self._spins = 0
        self._moments: list[float] = []
        """A heap of the keys of ``_timers``."""
        self._timers: dict[float, list[_Timer]] = {}
        self._registered: dict[Any, selectors.SelectorKey] = {}

    def add(self, when: float, timer: _Timer) -> None:
        """Ring ``timer`` at ``when``, unless it is cancelled."""
        timers = self._timers.get(when)
        if timers is None:
            self._timers[when] = [timer]
            heappush(self._moments, when)
        else:
            timers.append(timer)

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began = self.now
        if timeout is None:
            self._move_on()
        self._spins = self._spins + 1 if self.now == began else 0
        if self._spins > SPIN_LIMIT:
            self._spins = 0  # so that the tasks can still be cancelled
            raise VirtualTimeError(f"the program spins at {self.now:g} virtual seconds")
        if self._moments and self._moments[0] <= self.now:
            # One moment only, and not what its timers set for it again: they may do so for ever.
            for timer in self._timers.pop(heappop(self._moments)):
                _ring(timer)
        return []

    def _move_on(self) -> None:
        """To the next timer."""
        while self._moments and all(map(_is_over, self._timers[self._moments[0]])):
            del self._timers[heappop(self._moments)]
        when = self._moments[0] if self._moments else math.inf
        if when == math.inf:
            raise Deadlock(
                f"nothing is ready and no timer is set at {self.now:g} virtual seconds: every task "
                f"waits for another one, or for a thread or a socket, which virtual time has not"
            )
        if when > self._limit_seconds:
            raise TimeLimitReached(f"not ended after {self._limit_seconds:g} virtual seconds")
        self.now = max(self.now, when)

    @override
    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Keep what the loop registers for itself, the first; there is no other I/O."""
        if self._registered:
            raise VirtualTimeError("virtual time has no sockets and no pipes")
        key = selectors.SelectorKey(fileobj, fileobj, events, data)
        self._registered[fileobj] = key
        return key

    @override
    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._registered.pop(fileobj)

    @override
    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._registered


def _is_over(timer: _Timer) -> bool:
    return timer.cancelled() or (isinstance(timer, asyncio.Future) and timer.done())


def _ring(timer: _Timer) -> None:
    if _is_over(timer):
        return
    if isinstance(timer, asyncio.Future):
        timer.set_result(None)
    else:
        timer._run()  # what the call raises goes to the loop's exception handler


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual seconds, which begin at 0."""

    def __init__(self, *, limit_seconds: float = math.inf) -> None:
        """Raise ``TimeLimitReached`` in the program when it would pass ``limit_seconds``."""
        self._instant = _Instant(limit_seconds)
        self._thread = threading.get_ident()
        super().__init__(self._instant)

    @override
    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._instant.now

    @override
    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As any event loop; of calls for one moment, the first that was asked for comes first."""
        if self.is_closed():
            raise RuntimeError("the event loop is closed")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._instant.add(when, timer)
        return timer

    def passing(self, seconds: float) -> asyncio.Future[None]:
        """Done in ``seconds``: what ``asyncio.sleep`` waits for, for sleeps by the million."""
        waiting = self.create_future()
        self._instant.add(self._instant.now + seconds, waiting)
        return waiting

    @override
    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        """As ``call_soon`` from the loop's own thread; others cannot be part of virtual time."""
        if threading.get_ident() != self._thread:
            raise VirtualTimeError("another thread called into virtual time, which has only one")
        return self.call_soon(*args, **kwargs)

    @override
    def run_in_executor(self, executor: object, func: object, *args: object) -> Never:
        """Refused: what runs in a thread ends at no virtual time."""
        raise VirtualTimeError(
            "threads cannot run under virtual time; pass gradientmail.clock.inline as offload"
        )


class VirtualClock:
    """A ``Clock`` on the running loop's time, for a node whose clock may run at another rate."""

    def __init__(self, rate: float = 1.0) -> None:
        """``rate`` seconds pass on this clock in one of the loop's."""
        if not 0 < rate < math.inf:
            raise ValueError(f"a clock's rate must be positive and finite, got {rate!r}")
        self.rate = rate
        self._paused = False
        self._over: list[_ClockTimer] = []

    def now(self) -> float:
        """Seconds on this clock; 0 when the loop was made."""
        return asyncio.get_running_loop().time() * self.rate

    def pause(self) -> None:
        """Let no sleep end until ``resume``, as for a process that is stopped; time goes on."""
        self._paused = True

    def resume(self) -> None:
        """Let all sleeps end that are over."""
        self._paused = False
        for timer in self._over:
            asyncio.get_running_loop().call_soon(timer.ring)
        self._over.clear()

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds`` on this clock."""
        waiting = asyncio.get_running_loop().create_future()
        cancel = self.call_later(seconds, lambda: waiting.done() or waiting.set_result(None))
        try:
            await waiting
        finally:
            cancel()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Callable[[], None]:
        """Call ``callback`` in ``seconds`` on this clock; returns what cancels that."""
        timer = _ClockTimer(self, callback)
        timer.handle = asyncio.get_running_loop().call_later(seconds / self.rate, timer.ring)
        return timer.cancel


class _ClockTimer:
    """One timer of a clock that may be stopped when it rings."""

    __slots__ = ("_callback", "_clock", "handle")

    handle: asyncio.TimerHandle

    def __init__(self, clock: VirtualClock, callback: Callable[[], object]) -> None:
        self._clock = clock
        self._callback: Callable[[], object] | None = callback

    def ring(self) -> None:
        if self._clock._paused:
            self._clock._over.append(self)
        elif self._callback is not None:
            callback, self._callback = self._callback, None
            del self.handle  # which holds this in turn: worlds run without the garbage collector
            callback()

    def cancel(self) -> None:
        if self._callback is not None:  # most have rung
            self._callback = None
            self.handle.cancel()


def passing(seconds: float) -> Awaitable[None]:
    """What is over in ``seconds`` of the running loop's time, or when others had their turn."""
    loop = asyncio.get_running_loop()
    if seconds > 0 and isinstance(loop, VirtualTimeLoop):
        return loop.passing(seconds)
    return asyncio.sleep(seconds)


def run_virtual[T](
    main: Callable[[], Coroutine[Any, Any, T]], *, limit_seconds: float = math.inf
) -> T:
    """Run ``main()`` to its end under virtual time; what it returns or raises.

    Raises ``Deadlock`` when nothing can ever happen any more, ``TimeLimitReached`` when the end
    is not reached within ``limit_seconds`` (virtual ones), and ``VirtualTimeError`` when the
    program spins without letting time pass, or uses threads or sockets.
    """

    def make_loop() -> VirtualTimeLoop:
        return VirtualTimeLoop(limit_seconds=limit_seconds)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(main())


def at_once[T](work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    work.close()
    raise RuntimeError(f"{work.__qualname__} waits for something")
