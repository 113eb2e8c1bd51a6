"""A thread with an event loop, and threads for blocking work, that never keep a process alive."""

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, override

from gradientmail.calls import PendingCall, start_daemon

logger = logging.getLogger("gradientmail")

HASHES = 2 if (os.cpu_count() or 1) > 2 else 1
"""Hashes at a time. Of two cores, a second one would only take one from the training."""

LAST_CALLS_SECONDS = 0.2
"""How long whoever stops waits for calls under way; one that hangs in a store ends later."""


class DaemonExecutor(ThreadPoolExecutor):
    """Runs calls on up to ``max_workers`` daemon threads, started as they are needed.

    A ``ThreadPoolExecutor`` because an event loop takes no other as its default executor.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        """Start no thread yet."""
        super().__init__(max_workers=max_workers)
        self._calls: queue.SimpleQueue[PendingCall[Any] | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._started: list[threading.Thread] = []
        self._limit = max_workers
        self._name = name

    @override
    def submit[**P, T](self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn(*args, **kwargs)`` on one of the threads."""
        call = PendingCall(partial(fn, *args, **kwargs))
        self._calls.put(call)
        with self._lock:
            started = len(self._started)
            if not self._free.acquire(blocking=False) and started < self._limit:
                thread = start_daemon(self._work, f"{self._name}-{started + 1}", others=started)
                self._started += [] if thread is None else [thread]
        return call.future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when their calls have; they are not waited for."""
        for _ in self._started:
            self._calls.put(None)

    def join(self, ends: float) -> None:
        """Wait for the threads, until ``ends`` by ``time.monotonic`` at most."""
        for thread in self._started:
            thread.join(max(ends - time.monotonic(), 0.0))

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            call.run()
            del call  # and with it what it gave
            self._free.release()


class LoopThread:
    """A running event loop on a daemon thread."""

    def __init__(self, name: str) -> None:
        """Start the thread; the loop runs when this returns."""
        self.loop = asyncio.new_event_loop()
        self._blocking = DaemonExecutor(16, f"{name}-store")
        # One thread for tensors: two that run many short operations fight for the interpreter's
        # lock, and take longer than one after the other. A hash is one long call without the lock.
        self._tensors = DaemonExecutor(1, f"{name}-tensors")
        self._hashes = DaemonExecutor(HASHES, f"{name}-hashes")
        self.loop.set_default_executor(self._blocking)
        self._process = os.getpid()
        self._made_on = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._run_until_stopped():
                pass
        finally:
            self.loop.close()

    def _run_until_stopped(self) -> bool:
        """False when ``SystemExit`` or its like came out of a task, whose awaiter has it, too."""
        try:
            self.loop.run_forever()
        except BaseException as error:
            logger.error("on the background thread a task ended in %r; it goes on", error)
            return False
        return True

    async def offload[**P, T](
        self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``work`` on the thread for tensor work, on behalf of the loop."""
        return await asyncio.wrap_future(self._tensors.submit(work, *args, **kwargs))

    async def hash[**P, T](self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` on a thread for hashing and compressing, on behalf of the loop."""
        return await asyncio.wrap_future(self._hashes.submit(work, *args, **kwargs))

    def submit[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin ``work`` on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call[T](self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run ``work`` on the loop and wait for its result; cancelled when the wait ends early."""
        future = self.submit(work)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise
        finally:
            del future  # an error has this frame, and would hold itself

    def is_here(self) -> bool:
        """Whether the thread is this process's; in a child made by fork it is not.

        Not by the thread's ``is_alive``: after Ctrl-C in it Python 3.12 says no for ever.
        """
        return self._process == os.getpid()

    def was_made_here(self) -> bool:
        """Whether this is the thread that made it: the one that trains."""
        return threading.get_ident() == self._made_on

    def check_waitable(self) -> None:
        """Raise ``RuntimeError`` where waiting for the loop would never end."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a session cannot be closed from a callback, which runs on its background thread; "
                "set a flag there and close it from the thread that trains"
            )
        if not self.is_here():
            raise RuntimeError(
                "the session's background thread is not running here: a child made by fork cannot "
                "use or close its parent's session; make a new one with another learner_id"
            )

    def notify(self, callback: Callable[[], object]) -> None:
        """Have the loop call ``callback`` soon; nothing when it has ended."""
        try:
            self.loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: there is nobody to tell
            return

    def stop(self, patience: float) -> None:
        """Cancel what runs, end the loop; wait for its thread at most ``patience`` seconds."""
        self.notify(self._cancel_all)
        self._thread.join(patience)
        executors = (self._tensors, self._hashes, self._blocking)
        for executor in executors:
            executor.shutdown()
        ends = time.monotonic() + LAST_CALLS_SECONDS
        for executor in executors:
            executor.join(ends)

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self.loop)

        async def end() -> None:
            pending = tasks
            for _ in range(10):  # a store may swallow a cancellation, and its caller would go on
                for task in pending:
                    task.cancel()
                if pending:
                    _, pending = await asyncio.wait(pending, timeout=0.1)
            self.loop.stop()

        self._ending = self.loop.create_task(end())
