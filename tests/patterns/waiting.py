"""Threads that a test starts, and what it may look for after them."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import gradientmail as gm


def started[T](work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a daemon thread; its outcome."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until(true: Callable[[], object]) -> None:
    """Wait for it, a minute and a half at most."""
    ends = time.monotonic() + 90
    while not true():
        assert time.monotonic() < ends, "it does not come true"
        time.sleep(0.005)


def keys(box: gm.Mailbox, prefix: str = "") -> list[str]:
    """What is in the store."""
    return list(asyncio.run(box.list(prefix)))


def threads() -> list[threading.Thread]:
    """Those of patterns that run."""
    return [t for t in threading.enumerate() if t.name.startswith("gradientmail-")]


@contextmanager
def no_threads_left() -> Iterator[None]:
    """Fail if a pattern's thread outlives the body, but for a moment."""
    yield
    until(lambda: not threads())
