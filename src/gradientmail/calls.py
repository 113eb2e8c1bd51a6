"""Calls that wait for a thread, the daemon threads that run them, and what became of a call.

``concurrent.futures`` joins its threads when the interpreter exits, so that one call that hangs in
a store would keep the process. Daemons do not: an abandoned call dies with it.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial


class PendingCall[T]:
    """Some work, and the future of what it gives."""

    __slots__ = ("_work", "future")

    def __init__(self, work: "partial[T]") -> None:
        """Begin nothing yet."""
        self._work: partial[T] | None = work
        self.future: Future[T] = Future()

    def run(self) -> None:
        """Do the work, unless the future was cancelled meanwhile. Once."""
        work, self._work = self._work, None
        if work is None or not self.future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            future = self.future
            # The error has this frame. It must lead neither to what was passed nor back to itself:
            # large buffers would wait for the garbage collector.
            del work, self
            future.set_exception(error)
            del future
        else:
            # Before anybody hears of the end: what was passed is not looked at any more.
            del work
            self.future.set_result(result)


async def uncancelled[T](work: Awaitable[T]) -> T:
    """What ``work`` gives; what would end a task or the loop in silence becomes a ``RuntimeError``.

    That is a ``CancelledError`` that nobody asked this task for, and any other error that is no
    ``Exception``. Ctrl-C passes where it is one, which is on the main thread.
    """
    try:
        return await work
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        if _is_meant(error):
            raise
        raise RuntimeError(
            f"a call of the mailbox or a callback ended in {error!r}, which nobody of this node "
            "asked for; let it raise MailboxUnavailable if it may be repeated"
        ) from None


def _is_meant(error: BaseException) -> bool:
    """Whether a cancellation was asked for, or Ctrl-C pressed."""
    if isinstance(error, asyncio.CancelledError):
        # Looked up here: the error's traceback has the frame of who caught it, and the task has
        # the error. With a name there both, and all buffers between, would hold each other.
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt) and is_main_thread()


def is_main_thread() -> bool:
    """Whether Ctrl-C may be raised here."""
    return threading.current_thread() is threading.main_thread()


def start_daemon(work: Callable[[], None], name: str, *, others: int) -> threading.Thread | None:
    """Start a daemon thread; None where that cannot be, as when the interpreter exits.

    Then the ``others`` serve the calls, and without any ``RuntimeError`` is raised.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        if not others:
            raise
        return None
    return thread
