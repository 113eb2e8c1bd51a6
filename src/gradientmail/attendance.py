"""Who is in the rounds: learners that live and are in none, and deltas that say nothing new.

Bookkeeping over records, as every node reads them: no request of its own, no clock.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradientmail.event import Event
from gradientmail.events import DeltasParallel, LearnerMissing, RoundWaits, SnapshotPublished
from gradientmail.exchange.records import RoundRecord, SnapshotRecord

MISSED = 3
"""Rounds in a row without a live learner after which it is told; then twice as many, and so on."""

ALIKE = 3
"""Rounds in a row with parallel deltas after which that is told; then twice as many, and so on."""

PARALLEL = 0.99
"""A mean cosine over this says that the learners have done the same."""

ALONE = 8
"""Rounds of a run, from its first one on, after which it is told that nobody else was in them."""

FEW_POLLS = 5
"""Of fewer polls than these in a round, each is a good part of it."""

_REJECTED = {
    "zero_steps": "its parameters are not finite, and its own log names them",
    "schema": "it trains another model than the run's",
    "stale": "they start from old versions: it takes commits over too late, or cannot read them",
    "missing": "their payloads are not in the mailbox",
    "corrupt": "their payloads arrive damaged, or hold values that are not finite",
}


@dataclass(slots=True)
class _Streak:
    """Rounds in a row of which something is so: how many, and the last ones with what they show."""

    count: int = 0
    last: deque[tuple[int, Any]] = field(default_factory=lambda: deque(maxlen=max(MISSED, ALIKE)))

    def add(self, number: int, shown: object) -> None:
        self.count += 1
        self.last.append((number, shown))

    def is_due(self, first: int) -> bool:
        """Whether the count is ``first``, or that doubled any number of times."""
        turns, rest = divmod(self.count, first)
        return rest == 0 and turns > 0 and turns & (turns - 1) == 0


class Movement:
    """Whether this learner's deltas ever differ: those of a model that nobody trains do not.

    A fragment's are compared with its own one before, so that frozen ones beside others are no
    sign of anything.
    """

    def __init__(self, fragments: int) -> None:
        """Nothing was published yet."""
        self._fragments = fragments
        self._last: dict[int, str] = {}
        self._streak = _Streak()

    def stands_still(
        self, fragment: int, record: SnapshotRecord, squares: Mapping[str, float] | None
    ) -> int:
        """How many in a row are as before, if that is to be told now, else 0.

        ``squares`` are sums of squares by tensor, if known: a delta that is not zero is none.
        """
        sha256, moved = record.payload.sha256, any((squares or {}).values())
        same = self._last.get(fragment) == sha256 and record.steps > 0 and not moved
        self._last[fragment] = sha256
        if not same:
            self._streak = _Streak()
            return 0
        self._streak.add(record.round, sha256)
        return self._streak.count if self._streak.is_due(max(self._fragments, ALIKE)) else 0


def published(
    record: SnapshotRecord, fragment: int, nbytes: int, seconds: float
) -> SnapshotPublished:
    """The event for a snapshot of which ``nbytes`` were uploaded within ``seconds``."""
    return SnapshotPublished(
        round=record.round,
        fragment=fragment,
        steps=record.steps,
        tokens=record.tokens,
        nbytes=nbytes,
        seconds=seconds,
        final=record.final,
    )


class Attendance:
    """What the records seen so far say of who takes part. Used on the loop's thread."""

    def __init__(self) -> None:
        """Nothing is known of the rounds before."""
        self._missed: dict[str, _Streak] = {}
        """By live learner: the rounds in a row without it, and why it was rejected if it was."""
        self._alike = _Streak()
        """The rounds in a row whose deltas were parallel, with their cosines."""
        self._alone = 0
        """The run's rounds without another learner; -1 when there is, or may have been one."""
        self.may_be_alone = False
        """Whether that is to be told, if nobody has a lease."""
        self.suspects: set[str] = set()
        """The learners of whom something is to be told."""

    def observe(self, record: RoundRecord, live: Collection[str]) -> None:
        """Take in the next record, and who was live."""
        missing = set(live).difference(part.learner for part in record.participants)
        reasons = dict(record.rejected)
        for learner in self._missed.keys() - missing:
            del self._missed[learner]
        for learner in missing:
            streak = self._missed.setdefault(learner, _Streak())
            streak.add(record.round, reasons.get(learner))
            if streak.is_due(MISSED):
                self.suspects.add(learner)
        self.suspects &= missing
        if record.cosine is not None and len(record.participants) > 1:
            if record.cosine <= PARALLEL:
                self._alike = _Streak()
            else:
                self._alike.add(record.round, record.cosine)

    def parallel(self, record: RoundRecord) -> DeltasParallel | None:
        """The event that ``record``, the last one observed, makes due, if it does."""
        last = self._alike.last
        if not last or last[-1][0] != record.round or not self._alike.is_due(ALIKE):
            return None
        rounds, cosines = zip(*last, strict=True)
        return DeltasParallel(rounds=rounds, cosine=min(cosines))

    def notice_alone(self, record: RoundRecord, live: Collection[str], own: str) -> None:
        """Count the next record, if nobody but ``own`` has come."""
        company = {*live, *(part.learner for part in record.participants)} - {own}
        still = record.round == self._alone and not company
        self._alone = self._alone + 1 if still else -1
        self.may_be_alone = self._alone == ALONE or (self.may_be_alone and still)

    def is_alone(self, live: Collection[str], own: str) -> bool:
        """Whether it is to be told that nobody came, now that leases were listed; once."""
        told, self.may_be_alone = self.may_be_alone and not set(live) - {own}, False
        return told

    def missing(
        self, live: Collection[str], own: str, explain: Callable[[], str]
    ) -> list[LearnerMissing]:
        """The events on the suspects that are ``live`` still; ``explain`` says why ``own`` is."""
        told, self.suspects = sorted(self.suspects & set(live)), set()
        return [self._event(who, explain if who == own else lambda: _SILENT) for who in told]

    def _event(self, learner: str, explain: Callable[[], str]) -> LearnerMissing:
        streak = self._missed[learner]
        rejected = tuple(dict.fromkeys(why for _, why in streak.last if why is not None))
        if rejected:
            text = _REJECTED.get(rejected[-1], "the reason is not known to this version")
            why = f"its snapshots were rejected ({', '.join(rejected)}): {text}"
        else:
            why = explain()
        return LearnerMissing(
            learner=learner,
            rounds=tuple(number for number, _ in streak.last),
            missed=streak.count,
            rejected=rejected,
            why=why,
        )


_SILENT = (
    "nothing of it was there when they closed. It may have died, which its lease will show, be "
    "joining still, be slower than the rounds, look into the mailbox too rarely (its "
    "poll_interval), or not call session.step; its own log says more"
)


def explain_silence(
    *,
    round_seconds: float,
    step_seconds: float,
    poll_interval: float,
    late: bool,
    idle: bool,
) -> str:
    """Why nothing of this very node is in the rounds, from what it knows of itself.

    ``late``: a snapshot of it found its round closed. ``idle``: no step came in a whole round.
    """
    pace = f"a round takes {round_seconds:.2g} s"
    sooner = ", lower poll_interval" if poll_interval * FEW_POLLS > round_seconds else ""
    if late and poll_interval <= round_seconds:  # else it could not have known of the round
        return (
            f"its deltas are in the mailbox only when the rounds have closed ({pace}); make "
            f"uploads smaller (delta_dtype, compression) or rounds rarer (sync_every){sooner}, or "
            "raise quorum_size"
        )
    if idle and not step_seconds:
        return "session.step was never called here; call it after every optimizer step"
    if idle:
        return (
            f"session.step was not called during the last one ({pace}, a step here "
            f"{step_seconds:.2g} s); if this node trains, make rounds rarer (sync_every) or raise "
            "quorum_size; if not, close its session"
        )
    if poll_interval * 2 > round_seconds:
        return (
            f"it looks into the mailbox every {poll_interval:g} s while {pace}, and so hears of a "
            "round when it has closed; lower poll_interval, or make rounds rarer (sync_every)"
        )
    return (
        f"they close before its delta is due ({pace}, a step here {step_seconds:.2g} s); raise "
        f"quorum_size, so that rounds wait for it{sooner}, or raise in_flight or sync_every"
    )


class Waiting:
    """Tells that a round waits for learners, each time after twice as long as the last time."""

    def __init__(self) -> None:
        """Nobody has reported yet."""
        self._since: float | None = None
        self._next = 0.0

    def overdue(self, now: float, patience: float) -> float | None:
        """The seconds since somebody reported first, when they are to be told now."""
        if self._since is None:
            self._since, self._next = now, now + patience
        if now < self._next:
            return None
        waited = now - self._since
        self._next = now + waited
        return waited


def round_waits(
    number: int,
    seconds: float,
    *,
    accepted: Collection[str],
    rejected: Mapping[str, str],
    live: Collection[str],
    quorum_size: int,
) -> Event:
    """The event for a round that has waited so long."""
    return RoundWaits(
        round=number,
        seconds=seconds,
        accepted=tuple(sorted(accepted)),
        rejected=tuple(sorted(rejected)),
        missing=tuple(sorted(set(live) - set(accepted) - rejected.keys())),
        quorum_size=quorum_size,
    )
