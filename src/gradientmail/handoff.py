"""The only state that the training thread and the loop share.

The training thread posts snapshots and takes arrivals; the loop does the reverse. A field has one
writer, or what both do to it is one step that the interpreter does not cut: the loop adds to
``repairs`` and ``blanks``, the training thread takes out; both take from ``arrivals``, the loop
what is superseded. ``news`` is raised by the loop after what it announces is in place and
lowered by the training thread before it looks, so that news may be looked at twice and is never
missed. No lock is taken.
"""

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gradientmail.backend.base import Array
from gradientmail.events import Event
from gradientmail.exchange.records import RoundRecord
from gradientmail.exchange.sealing import Payload


@dataclass(frozen=True, slots=True)
class Blank:
    """A payload buffer for one fragment's parameters, warm, with arrays over it."""

    buffer: memoryview
    arrays: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Version:
    """One committed version of a fragment as this node holds it; on the host, never written."""

    number: int
    """0 for the initial parameters."""
    payload: Payload
    arrays: Mapping[str, Array]
    """Host arrays over ``payload``."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A snapshot on its way out: the parameters' copy and the learner's counts at that moment."""

    round: int
    fragment: int
    local_step: int
    steps: int
    tokens: int
    rounds_seen: int
    step_seconds: float
    final: bool
    anchor: Version
    blank: Blank
    ready: Callable[[], None]
    """Returns, on any thread, when the copy in ``blank`` is complete."""
    started: float
    """``time.perf_counter`` at the copy."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A commit on its way in: a record, its version, and the arrays staged for the model."""

    record: RoundRecord
    version: Version | None
    """None when its parameters cannot be read: the round is over, and the fragment as it was."""
    staged: Mapping[str, Array]


@dataclass(slots=True)
class Handoff:
    """Queues and flags between the two threads of a node."""

    wake: Callable[[], None]
    """Tells the loop that ``outbox``, ``events`` or ``waits_for`` changed."""

    outbox: deque[Outgoing] = field(default_factory=deque)
    events: deque[Event] = field(default_factory=deque)
    step_seconds: float = 0.0
    """The learner's average time from step to step, told now and then."""
    publishing: int = -1
    """The round whose snapshot the learner copies, or has copied last."""
    waits_for: int | None = None
    """The round that the learner publishes next; None while it needs a commit before."""
    due_seconds: float = 0.0
    """In how many seconds it would, when it was last told; others' snapshots make that earlier."""

    news: bool = False
    arrivals: deque[Arrival] = field(default_factory=deque)
    blanks: dict[int, Blank] = field(default_factory=dict)
    """A prepared buffer by fragment. The loop adds, the learner pops."""
    others: tuple[int, int] = (-1, 0)
    """A round and how many other learners' snapshots are in it."""
    live: int = 1
    """Live learners, this one included."""
    repairs: deque[tuple[int, tuple[str, ...]]] = field(default_factory=deque)
    """Rounds to be published again, each with the tensors that were not finite in it."""
    failure: BaseException | None = None
    """Why this node cannot go on; ``step`` raises it."""
    tell_here: Callable[[Event], None] | None = None
    """Calls the callbacks on the thread that it is called on."""
    takeover_seconds: float = 0.0

    _bell: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    """Rung for a learner that waits. A lock could stay held after Ctrl-C, and the loop hang."""

    def let_go(self) -> None:
        """Drop what would hold memory, when both sides have ended."""
        for queued in (self.outbox, self.arrivals, self.blanks):
            queued.clear()

    # The loop's side

    def tell(self) -> None:
        """Raise the flag and wake a waiting learner."""
        self.news = True
        if self._bell.empty():
            self._bell.put(None)

    def fail(self, error: BaseException) -> None:
        """Let the next ``step``, or the one that waits, raise ``error``."""
        if self.failure is None:
            self.failure = error
        self.tell()

    # The learner's side

    def wait(self, seconds: float) -> bool:
        """Sleep until the flag is raised, at most ``seconds``, or shorter; whether it is."""
        if not self.news:
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=seconds)
        return self.news

    def post(self, outgoing: Outgoing) -> None:
        """Send a snapshot."""
        self.outbox.append(outgoing)
        self.wake()

    def announce(self, event: Event) -> None:
        """Send an event to the callbacks, which run on the loop's thread."""
        self.events.append(event)
        self.wake()

    def announce_in_step(self, event: Event) -> None:
        """Call the callbacks before ``step`` returns: what they do must come before the next."""
        (self.announce if self.tell_here is None else self.tell_here)(event)
