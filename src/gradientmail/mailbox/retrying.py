"""Waits for a store that is away."""

from collections.abc import Awaitable, Callable
from random import Random

from gradientmail.calls import uncancelled
from gradientmail.clock import Clock
from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox

FIRST_DELAY_SECONDS = 0.5
LAST_DELAY_SECONDS = 30.0

type OnUnavailable = Callable[[str, MailboxUnavailable, float], None]
"""Called once a failed try with the operation, the error and the seconds until the next try."""


class RetryingMailbox(WrappedMailbox):
    """Repeats what raised ``MailboxUnavailable``, for as long as it does.

    The delay before a try starts at 0.5 s with every call and doubles up to 30 s; of each the
    wait is a part drawn uniformly from its upper half, so that nodes which failed together do
    not come back together. Anything else that is raised propagates at once, cancellation too; but
    one that only the store means is a ``RuntimeError``, and ends no task in silence.

    A failed try may have taken effect. So False from ``put_if_absent`` may mean that an earlier
    try of this very call created the object: a caller that must know compares what is there.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        *,
        clock: Clock,
        random: Random,
        on_unavailable: OnUnavailable | None = None,
    ) -> None:
        """Wrap ``mailbox``; wait on ``clock``, draw the jitter from ``random``."""
        super().__init__(mailbox)
        self._clock = clock
        self._random = random
        self._on_unavailable = on_unavailable
        self.answered = False
        """Whether the store has answered anything yet, be it a refusal."""

    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """Act until the store answers."""
        delay = FIRST_DELAY_SECONDS
        while True:
            try:
                answer = await uncancelled(act())
            except MailboxUnavailable as error:
                pause = delay * self._random.uniform(0.5, 1.0)
                if self._on_unavailable is not None:
                    self._on_unavailable(call.operation, error, pause)
            except Exception:
                self.answered = True
                raise
            else:
                self.answered = True
                return answer
            await self._clock.sleep(pause)
            delay = min(2 * delay, LAST_DELAY_SECONDS)
