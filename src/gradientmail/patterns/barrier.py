"""A barrier: nodes wait until so many of them have come to one point.

Arrivals are objects under ``barriers/{name}/``, one a learner id, and are never removed: a name
serves once in a run, coming again counts once, and who comes late passes at once.
"""

import math
import threading
from dataclasses import dataclass, field

from gradientmail.arguments import MOST_SECONDS, check_mailbox, count_of, seconds_of
from gradientmail.blocking import Store
from gradientmail.clock import Clock
from gradientmail.exchange import layout
from gradientmail.mailbox.base import Mailbox

GRACE_SECONDS = 1.0
"""After a timeout a call that the store has not answered gets so long, the first one above all."""


@dataclass(slots=True)
class Meeting:
    """One node's wait at one barrier, and what it has seen so far."""

    mailbox: Mailbox
    clock: Clock
    name: str
    learner: str
    parties: int
    poll_interval: float
    present: bool = False
    """Whether this node's arrival is known to be in the mailbox."""
    arrived: frozenset[str] = field(default_factory=frozenset)
    """The ids listed last."""

    async def complete(self, seconds: float) -> bool:
        """Arrive, and look until all parties have; False when they had not after ``seconds``."""
        ends = self.clock.now() + seconds
        # Whatever it answers, this learner's arrival is there then: an earlier try's, or an
        # earlier process's, or that of a wait before.
        await self.mailbox.put_if_absent(layout.arrival_key(self.name, self.learner), b"")
        self.present = True
        while True:
            await self._look()
            remaining = ends - self.clock.now()
            if len(self.arrived) >= self.parties or remaining <= 0:
                return len(self.arrived) >= self.parties
            await self.clock.sleep(min(self.poll_interval, remaining))

    async def _look(self) -> None:
        keys = await self.mailbox.list(layout.arrivals_prefix(self.name))
        parsed = (layout.parse_arrival_key(key) for key in keys)
        self.arrived = frozenset(found[1] for found in parsed if found is not None)


class Barrier:
    """Waits for other nodes over a mailbox. Any number of waits, of any thread, may be under way.

    Args:
        mailbox: where the run is.
        learner_id: this node's, 1 to 64 of ``a-z``, ``0-9``, ``-``; of each id one counts.
        poll_interval: seconds between listings while waiting.

    """

    def __init__(self, *, mailbox: Mailbox, learner_id: str, poll_interval: float = 1.0) -> None:
        """Check the arguments; nothing is read or written."""
        check_mailbox(mailbox)
        self._mailbox = mailbox
        self._learner = layout.check_learner_id(learner_id)
        self._poll_interval = seconds_of("poll_interval", poll_interval)

    def wait(self, name: str, *, parties: int, timeout: float | None = None) -> frozenset[str]:
        """Arrive at the barrier ``name`` and wait until ``parties`` learners or more have.

        Returns the ids of all that have. A store that cannot be reached is asked again until it
        answers. The mailbox is looked at once at least, however short the ``timeout``.

        Raises:
            TimeoutError: fewer had arrived after ``timeout`` seconds; says how many and who. This
                node's arrival stays, so that a later wait or another node counts it.
            ValueError: the name is empty, or holds ``/`` or control characters; ``parties`` is
                below 1, or ``timeout`` below 0.

        """
        layout.arrival_key(name, self._learner)
        wanted = count_of("parties", parties)
        seconds = math.inf if timeout is None else _not_negative(timeout)
        store = Store(self._mailbox, f"gradientmail-barrier-{self._learner}")
        meeting = Meeting(
            store.mailbox, store.clock, name, self._learner, wanted, self._poll_interval
        )
        ends = store.clock.now() + seconds
        try:
            whole = None if seconds > threading.TIMEOUT_MAX / 2 else seconds + GRACE_SECONDS
            if store.call(meeting.complete(seconds), whole):
                return meeting.arrived
        except TimeoutError:
            if store.clock.now() < ends:  # it is the store's own
                raise
        finally:
            store.stop()
        raise TimeoutError(_missing(meeting, seconds, store))


def _not_negative(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds or None, not {timeout!r}")
    if not timeout >= 0:
        raise ValueError(f"timeout must be 0 seconds or more, or None, not {timeout!r}")
    return math.inf if timeout > MOST_SECONDS else float(timeout)


def _missing(meeting: Meeting, seconds: float, store: Store) -> str:
    who = f" ({', '.join(sorted(meeting.arrived))})" if meeting.arrived else ""
    failure = "" if store.last_failure is None else f"; the store last said: {store.last_failure}"
    own = (
        "This node's arrival stays, and waiting again goes on from it"
        if meeting.present
        else f"This node's arrival may not have been written{failure}"
    )
    return (
        f"barrier {meeting.name!r}: {len(meeting.arrived)} of {meeting.parties} learners had "
        f"arrived{who} after {seconds:g} s. {own}"
    )
