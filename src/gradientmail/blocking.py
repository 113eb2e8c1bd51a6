"""A mailbox's asynchronous operations, called from ordinary code with a thread of its own."""

from random import Random

from gradientmail.clock import MonotonicClock
from gradientmail.errors import MailboxUnavailable
from gradientmail.events import StoreUnavailable, log_events
from gradientmail.loop_thread import LoopThread
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.retrying import RetryingMailbox

STOP_SECONDS = 0.8
"""What a store gets to end its calls when nobody waits for them any more."""


class Store:
    """A mailbox that repeats what fails for now, and the thread that drives it."""

    def __init__(self, mailbox: Mailbox, name: str) -> None:
        """``name`` is the thread's. ``stop`` ends it."""
        self.clock = MonotonicClock()
        self.mailbox = RetryingMailbox(
            mailbox, clock=self.clock, random=Random(), on_unavailable=self._on_unavailable
        )
        self.last_failure: MailboxUnavailable | None = None
        """Of the call that is being repeated, or was last."""
        self._thread = LoopThread(name)
        self.call = self._thread.call
        self.submit = self._thread.submit
        self.hash = self._thread.hash

    def stop(self) -> None:
        """Cancel what is under way and end the thread."""
        self._thread.stop(STOP_SECONDS)

    def _on_unavailable(self, operation: str, error: MailboxUnavailable, delay: float) -> None:
        self.last_failure = error
        log_events(
            StoreUnavailable(
                operation=operation,
                error=str(error),
                retry_seconds=delay,
                answered=self.mailbox.answered,
            )
        )
