"""Daemon threads for blocking requests, with a way past for the short ones."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from gradientmail.calls import PendingCall, start_daemon

IDLE_SECONDS = 10.0
"""A thread without a call for so long ends: mailboxes come and go, and nobody closes them."""


class Lanes:
    """Up to ``width`` threads, started as they are needed. Safe from any thread and event loop.

    Calls are *short* (a record, a listing) or *bulk* (a part of a payload, which may take as long
    as the network likes). A quarter of the threads never take bulk, so that a lease is renewed and
    a record created while payloads fill the line; short calls also go first on the others.

    The threads are daemons: a call that hangs does not keep the process alive.
    """

    def __init__(self, width: int, name: str) -> None:
        """Start no thread yet."""
        self.bulk_width = max(width - max(width // 4, 1), 1)
        """How many bulk calls run at the same time."""
        self._width = width
        self._name = name
        self._changed = threading.Condition()
        self._short: deque[PendingCall[Any]] = deque()
        self._bulk: deque[PendingCall[Any]] = deque()
        self._bulk_running = 0
        self._threads = 0
        self._idle = 0

    async def run[T](self, work: Callable[..., T], /, *args: Any, bulk: bool = False) -> T:
        """``work(*args)`` on one of the threads. Cancelled before it began, it never runs."""
        return await asyncio.wrap_future(self.submit(work, *args, bulk=bulk))

    def submit[T](self, work: Callable[..., T], /, *args: Any, bulk: bool = False) -> Future[T]:
        """Have ``work(*args)`` run on one of the threads."""
        call = PendingCall(partial(work, *args))
        with self._changed:
            (self._bulk if bulk else self._short).append(call)
            if self._idle < len(self._short) + len(self._bulk) and self._threads < self._width:
                name = f"{self._name}-{self._threads + 1}"
                self._threads += start_daemon(self._work, name, others=self._threads) is not None
            self._changed.notify()
        return call.future

    def _work(self) -> None:
        while (found := self._next()) is not None:
            call, bulk = found
            del found
            call.run()
            del call  # and with it what it gave
            if bulk:
                with self._changed:
                    self._bulk_running -= 1
                    self._changed.notify()

    def _next(self) -> tuple[PendingCall[Any], bool] | None:
        """Wait for a call that this thread may run, and whether it is bulk; None when it ends."""
        with self._changed:
            self._idle += 1
            told = True
            try:
                while True:
                    if self._short:
                        return self._short.popleft(), False
                    if self._bulk and self._bulk_running < self.bulk_width:
                        self._bulk_running += 1
                        return self._bulk.popleft(), True
                    if not told:  # nor did a call come while it was about to end
                        self._threads -= 1
                        return None
                    told = self._changed.wait(IDLE_SECONDS)
            finally:
                self._idle -= 1
