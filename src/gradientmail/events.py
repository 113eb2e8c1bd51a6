"""What happens in a session, one frozen dataclass an event.

A callback is called with every event in order: on the session's background thread, for the
last ones (``GaveUp``, ``Closed``, what was still to be told) on the closing one, and for
``ParametersNotFinite`` inside ``step``, so that optimizer state can be reset before the next one.
It should return soon; what it raises is logged and hurts nobody. ``str(event)`` is a plain
sentence, which is what ``log_events`` logs. Seconds are on this node's monotonic clock.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gradientmail.calls import is_main_thread
from gradientmail.event import Callback, Event, shown_bytes, shown_steps
from gradientmail.health import (  # noqa: F401 - users find all events in this module
    DeltasParallel,
    LearnerMissing,
    MomentumLost,
    NothingShared,
    ParametersNotFinite,
    ParametersOutOfRange,
    ParametersStandStill,
    RoundWaits,
    StateRestored,
    StoreUnavailable,
    TaskFailed,
    TrainsAlone,
)

logger = logging.getLogger("gradientmail")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCreated(Event):
    """This node created the run from its model's parameters."""

    fragments: int
    parameters: int
    """Exchanged scalars in the whole model."""
    asked: int = 0
    """Fragments asked for, if there are fewer: a model of few tensors has no more than those."""
    mailbox: str = ""
    """The store, if it can say what it is."""

    def __str__(self) -> str:
        asked = f" ({self.asked} were asked for: no tensor is cut)" if self.asked else ""
        return (
            f"created the run{_where(self.mailbox)}: {self.parameters:,} parameters in "
            f"{self.fragments} fragments{asked}"
        )


def _where(mailbox: str) -> str:
    return f" in {mailbox}" if mailbox else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Event):
    """This node holds a lease and its model the newest committed parameters."""

    learner: str
    rounds_seen: int
    """Newest committed round in the model, −1 in a fresh run."""
    mailbox: str = ""
    """The store, if it can say what it is."""

    def __str__(self) -> str:
        when = f"at round {self.rounds_seen}" if self.rounds_seen >= 0 else "before the first round"
        run = f" the run{_where(self.mailbox)}" if self.mailbox else ""
        return f"{self.learner} joined{run} {when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuffersStayLocal(Event):
    """The model has floating-point buffers, such as batch norm's, that are not exchanged."""

    level: ClassVar[int] = logging.WARNING
    buffers: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.buffers[:3]) + (", …" if len(self.buffers) > 3 else "")
        return (
            f"{len(self.buffers)} floating-point buffers stay this node's own ({shown}); if "
            'training changes them, as it does batch norm\'s, give every node buffers="average"'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPublished(Event):
    """This learner's delta for one round is in the mailbox."""

    round: int
    fragment: int
    steps: int
    tokens: int
    nbytes: int
    """Bytes uploaded."""
    seconds: float
    """From the copy of the parameters to the record in the mailbox."""
    final: bool

    def __str__(self) -> str:
        final = "final " if self.final else ""
        what = f"published {final}delta of {shown_steps(self.steps)}"
        if not self.steps:
            what = "told the others that this learner contributes nothing"
        size = shown_bytes(self.nbytes)
        return f"round {self.round}: {what} ({size} in {self.seconds:.2f} s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClaimed(Event):
    """This node will close the round."""

    level: ClassVar[int] = logging.DEBUG
    round: int
    claim: int
    """1 for the first claim on the round, more when a claimant before was given up."""

    def __str__(self) -> str:
        return f"round {self.round}: this node closes it (claim {self.claim})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TookOver(Event):
    """This node takes a round over from a node that left, died or fell silent."""

    round: int
    previous: str | None
    """The last claimant's learner id, when there was a claim."""
    reason: str
    """``lease`` (gone or stale) or ``silence`` (no record within the takeover timeout)."""
    after_seconds: float

    def __str__(self) -> str:
        who = self.previous or "its closer"
        why = "whose lease is gone" if self.reason == "lease" else "whose record has not come"
        return f"round {self.round}: takes over from {who}, {why}, after {self.after_seconds:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRejected(Event):
    """A learner's snapshot will not be merged into the round."""

    level: ClassVar[int] = logging.WARNING
    round: int
    learner: str
    reason: str
    """``zero_steps``, ``schema``, ``stale``, ``missing`` or ``corrupt``."""
    detail: str

    def __str__(self) -> str:
        whose = f"round {self.round}: {self.learner}'s snapshot"
        return f"{whose} is rejected ({self.reason}): {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One learner's part in a round."""

    learner: str
    steps: int
    tokens: int
    weight: float
    """``tokens² / steps``; only ratios within the round matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCommitted(Event):
    """This node closed a round: its record is in the mailbox."""

    round: int
    fragment: int
    version: int
    contributions: tuple[Contribution, ...]
    rejected: tuple[tuple[str, str], ...]
    """Learner and reason."""
    cosine: float | None
    """Mean cosine between pairs of deltas; None with fewer than two."""
    quorum_seconds: float
    grace_seconds: float
    sync_seconds: float
    """From the close to the durable record."""

    def __str__(self) -> str:
        total = sum(part.weight for part in self.contributions) or 1.0
        parts = ", ".join(f"{p.learner} {p.weight / total:.0%}" for p in self.contributions)
        cosine = "" if self.cosine is None else f", cosine {self.cosine:.3f}"
        return (
            f"round {self.round}: committed version {self.version} of fragment {self.fragment} "
            f"from {parts}{cosine} (quorum {self.quorum_seconds:.2f} s, grace "
            f"{self.grace_seconds:.2f} s, merge and commit {self.sync_seconds:.2f} s)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSuperseded(Event):
    """Another node committed the round that this node was closing; its record is followed."""

    round: int

    def __str__(self) -> str:
        return f"round {self.round}: another node committed it first; following that record"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSeen(Event):
    """A commit by any node, as this node learned of it."""

    round: int
    fragment: int
    version: int
    learners: tuple[str, ...]
    """Whose deltas are in it."""
    rejected: tuple[tuple[str, str], ...]
    cosine: float | None

    level: ClassVar[int] = logging.DEBUG

    def __str__(self) -> str:
        return f"round {self.round}: committed with {', '.join(self.learners)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned(Event):
    """A committed fragment was written into the model."""

    round: int
    fragment: int
    version: int
    steps_replaced: int
    """Local steps on this fragment that the commit does not hold and that were overwritten."""
    waited_seconds: float
    """How long ``step`` had been waiting for it (``overlap_steps``)."""

    level: ClassVar[int] = logging.DEBUG

    def __str__(self) -> str:
        return (
            f"round {self.round}: aligned with version {self.version} of fragment "
            f"{self.fragment}, replacing {self.steps_replaced} local steps"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed(Event):
    """A beat was written: the other nodes know that this learner lives."""

    beat: int
    live: tuple[str, ...]
    """The learners that this node takes for live."""

    level: ClassVar[int] = logging.DEBUG

    def __str__(self) -> str:
        return f"lease renewed (beat {self.beat}); live learners: {', '.join(self.live)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerAppeared(Event):
    """A learner was seen live for the first time, or again."""

    learner: str

    def __str__(self) -> str:
        return f"{self.learner} is in the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLeft(Event):
    """A learner left the run: its lease was deleted."""

    learner: str

    def __str__(self) -> str:
        return f"{self.learner} left the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLost(Event):
    """A learner went silent: its lease is stale."""

    level: ClassVar[int] = logging.WARNING
    learner: str

    def __str__(self) -> str:
        return f"{self.learner} has not renewed its lease"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(Event):
    """A newer process joined with this learner's id; this one publishes nothing more."""

    level: ClassVar[int] = logging.ERROR
    learner: str

    def __str__(self) -> str:
        return f"another session joined as {self.learner}; this one publishes nothing more"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingWaits(Event):
    """Closing has waited for some seconds for this learner's last rounds to be committed."""

    level: ClassVar[int] = logging.WARNING
    rounds: tuple[int, ...]
    at_most_seconds: float
    """It leaves without them when nothing is committed for so long."""

    def __str__(self) -> str:
        rounds = ", ".join(map(str, self.rounds))
        return (
            f"closing waits for round {rounds} to be committed, and leaves when no commit comes "
            f"for {self.at_most_seconds:.0f} s; Ctrl-C leaves now"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp(Event):
    """Closing stopped waiting: this learner's last rounds did not commit."""

    level: ClassVar[int] = logging.WARNING
    rounds: tuple[int, ...]
    waited_seconds: float

    def __str__(self) -> str:
        rounds = ", ".join(map(str, self.rounds))
        return (
            f"nothing was committed for {self.waited_seconds:.0f} s; leaves without round {rounds}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverClosed(Event):
    """The program ends, and nobody has closed the session, which leaves now."""

    level: ClassVar[int] = logging.WARNING
    learner: str

    def __str__(self) -> str:
        return (
            f"the program ends and nobody has closed the session of {self.learner}: its model was "
            "not set to the newest commit, and the steps since its last snapshot are in no round. "
            "Put `with` around the training loop, or call close()"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Event):
    """The session has ended; its threads are gone and its lease is released."""

    learner: str
    rounds_seen: int
    clean: bool
    """False when the ``with`` body raised or the interpreter exited without ``close``."""

    def __str__(self) -> str:
        how = "left the run" if self.clean else "left the run without waiting"
        if self.rounds_seen >= 0:
            return f"{self.learner} {how} at round {self.rounds_seen}"
        untrained = "the run still has its first parameters"
        return f"{self.learner} {how}, before any round was committed: {untrained}"


def log_events(event: Event) -> None:
    """Log the event as a sentence to the logger ``gradientmail``, at its class's level."""
    logger.log(event.level, "%s", event)


def checked(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """``callbacks`` as a tuple; ``TypeError`` naming what cannot be called."""
    try:
        found = tuple(callbacks)
    except TypeError:
        raise TypeError(f"callbacks must be an iterable of functions, not {callbacks!r}") from None
    for callback in found:
        if not callable(callback):
            raise TypeError(f"callbacks must be functions of one event; {callback!r} is none")
    return found


class Announcer:
    """Calls the callbacks; one that raises is logged and the others go on."""

    def __init__(self, callbacks: tuple[Callback, ...]) -> None:
        self._callbacks = callbacks

    def __call__(self, event: Event) -> None:
        """Hand ``event`` to every callback, in order."""
        for callback in self._callbacks:
            try:
                callback(event)
            except BaseException as error:  # on the loop's thread it would end that, and no more
                if isinstance(error, KeyboardInterrupt) and is_main_thread():
                    raise
                logger.exception("the callback %r failed on %r", callback, event)
