"""Runs threads one system call at a time, in an order drawn from a seed, and kills some of them.

``SteppedOs`` stands in for the module ``os`` in the modules under test. Before each call that
can be seen by another process it waits for its thread's turn, so that exactly one thread runs at
any time and a call is atomic, as it is in the kernel.
"""

import os
import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

STEPS = (
    "link",
    "lstat",
    "mkdir",
    "open",
    "rename",
    "rmdir",
    "scandir",
    "listdir",
    "stat",
    "unlink",
)
UNSTEPPED = ("fsync", "fdatasync", "posix_fadvise")


class Killed(BaseException):
    """Raised in a killed thread by every call from then on, so that nothing is tidied up."""


class Scheduler:
    """Lets one of its threads take a step at a time."""

    def __init__(self, random: Random, *, kill_probability: float = 0.0) -> None:
        self._random = random
        self._kill_probability = kill_probability
        self._turns: dict[int, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._killed: set[int] = set()
        self.trace: list[str] = []

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run ``works`` interleaved; of each what it returned or raised (``Killed`` if it was)."""
        outcomes: list[Any] = [None] * len(works)
        alive = list(range(len(works)))

        def body(number: int) -> None:
            self._turns[threading.get_ident()].acquire()
            try:
                outcomes[number] = works[number]()
            except BaseException as error:
                outcomes[number] = error
            alive.remove(number)
            self._back.release()

        threads = [threading.Thread(target=body, args=(number,)) for number in alive]
        for thread in threads:
            self._start(thread)
        while alive:
            thread = threads[self._random.choice(alive)]
            ident = thread.ident
            assert ident is not None
            if self._random.random() < self._kill_probability:
                self._killed.add(ident)
            self._turns[ident].release()
            self._back.acquire()
        for thread in threads:
            thread.join()
        return outcomes

    def _start(self, thread: threading.Thread) -> None:
        """Start a thread whose semaphore exists before its body looks for it."""
        turns, ready = self._turns, threading.Event()
        run = thread.run

        def registered() -> None:
            turns[threading.get_ident()] = threading.Semaphore(0)
            ready.set()
            run()

        thread.run = registered  # type: ignore[method-assign]
        thread.start()
        ready.wait()

    def step(self, what: str) -> None:
        """End this thread's turn and wait for the next; threads of others go on at once."""
        ident = threading.get_ident()
        if ident not in self._turns:
            return
        if ident not in self._killed:
            self._back.release()
            self._turns[ident].acquire()
        if ident in self._killed:
            raise Killed
        self.trace.append(f"{ident % 1000} {what}")


def _nothing(*_arguments: Any) -> None:
    pass


class SteppedOs:
    """The module ``os`` with a turn before every call that others can see."""

    def __init__(
        self, step: Callable[[str], None], protected: str, *, names: Sequence[str] = STEPS
    ) -> None:
        """A rename onto ``protected`` that would replace it is an ``AssertionError``."""
        self._step = step
        self._names = names
        self._protected = protected
        self.path = SteppedPath(step)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name in UNSTEPPED and name not in self._names:
            return _nothing
        if name not in self._names or not callable(real):
            return real

        def stepped(*arguments: Any, **options: Any) -> Any:
            self._step(f"{name} {arguments}")
            if name == "rename" and arguments[1] == self._protected:
                replaces = os.path.lexists(arguments[0]) and os.path.lexists(self._protected)
                assert not replaces, "an object would be replaced"
            return real(*arguments, **options)

        return stepped


class SteppedPath:
    """The module ``os.path`` likewise."""

    def __init__(self, step: Callable[[str], None]) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:
        real = getattr(os.path, name)
        if name not in ("lexists", "isdir"):
            return real

        def stepped(path: str) -> bool:
            self._step(f"{name} {path}")
            return real(path)

        return stepped
