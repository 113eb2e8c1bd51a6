"""Events that tell how well a run trains: what goes wrong without stopping it.

Users find them in ``gradientmail.events``.
"""

import logging
from dataclasses import dataclass
from typing import ClassVar

from gradientmail.event import Event, shown_steps


def _shown(names: tuple[str, ...]) -> str:
    """``1 tensor (w)``, or ``7 tensors (a, b, c, d, e, …)``."""
    listed = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'} ({listed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersNotFinite(Event):
    """Local parameters or their deltas were not finite; the committed ones are back."""

    level: ClassVar[int] = logging.ERROR
    tensors: tuple[str, ...]
    round: int
    beyond: tuple[str, ...] = ()
    """Those that are finite now: their delta was not, at the precision that the run's have."""

    def __str__(self) -> str:
        sick = tuple(name for name in self.tensors if name not in self.beyond)
        parts = [f"not finite: {_shown(sick)}"] if sick else []
        if self.beyond:
            delta = f"the delta of {_shown(self.beyond)} was not finite"
            parts.append(f"{delta}, or beyond the range of delta_dtype")
        return (
            f"round {self.round}: {'; '.join(parts)}; no delta was published, and "
            "the last committed values are back; optimizer state may hold NaN too and need a reset"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersOutOfRange(Event):
    """This node's outer step went beyond the largest finite values, and was held there."""

    level: ClassVar[int] = logging.ERROR
    round: int
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"round {self.round}: the outer step goes beyond the range of {_shown(self.tensors)}; "
            "the largest finite values are there instead. Some learner diverges, or the learning "
            "rates are too high"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumLost(Event):
    """The outer state of a fragment could not be read; its next round starts without momentum."""

    level: ClassVar[int] = logging.ERROR
    round: int
    """The round that is closed without it."""
    fragment: int
    error: str

    def __str__(self) -> str:
        return (
            f"round {self.round}: the outer state of fragment {self.fragment} cannot be read "
            f"({self.error}); its momentum starts again at zero, and the parameters go on"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltasParallel(Event):
    """The learners have moved in almost the same direction, round after round."""

    level: ClassVar[int] = logging.WARNING
    rounds: tuple[int, ...]
    """The last ones of which that is so."""
    cosine: float
    """The least mean cosine between their deltas in those rounds."""

    def __str__(self) -> str:
        return (
            f"rounds {self.rounds[0]} to {self.rounds[-1]}: the learners' deltas are parallel "
            f"(cosine {self.cosine:.3f} or more), so that several learn no more than one; probably "
            "all of them train on the same data in the same order: give each its own shard, or a "
            "seed of its own"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersStandStill(Event):
    """This learner counts steps, and its deltas are those of the rounds before, byte for byte."""

    level: ClassVar[int] = logging.WARNING
    learner: str
    rounds: int
    """How many such deltas there were in a row."""

    def __str__(self) -> str:
        return (
            f"the last {self.rounds} deltas of {self.learner} were the same as those before them: "
            "its parameters do not change from step to step, and it adds nothing to the run. Does "
            "the optimizer train the very model that the session was given?"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMissing(Event):
    """A learner that lives was in none of the last rounds."""

    level: ClassVar[int] = logging.WARNING
    learner: str
    rounds: tuple[int, ...]
    """The rounds in a row that were committed without it, the oldest ones left out."""
    missed: int
    """How many there were in a row."""
    rejected: tuple[str, ...]
    """Why its snapshots were rejected in those rounds, each reason once; empty when none was."""
    why: str
    """What is probably the cause, and what to do."""

    def __str__(self) -> str:
        return (
            f"{self.learner} holds its lease and was in none of the last {self.missed} rounds "
            f"(up to round {self.rounds[-1]}): {self.why}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainsAlone(Event):
    """No other learner was in a run's first rounds, or has been seen since."""

    level: ClassVar[int] = logging.WARNING
    learner: str
    rounds: int
    """How many."""
    mailbox: str = ""
    """The store, if it can say what it is."""

    def __str__(self) -> str:
        here = f": here it is {self.mailbox}" if self.mailbox else ""
        return (
            f"{self.learner} has been alone in all {self.rounds} rounds of the run. Whoever should "
            f"take part needs the same mailbox address{here}; any other address makes a run of its "
            "own"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundWaits(Event):
    """A round that this node closes is held up by learners that live and send nothing usable."""

    level: ClassVar[int] = logging.WARNING
    round: int
    seconds: float
    """How long it has been open."""
    accepted: tuple[str, ...]
    rejected: tuple[str, ...]
    missing: tuple[str, ...]
    """Who lives and has sent nothing."""
    quorum_size: int

    def __str__(self) -> str:
        def listed(learners: tuple[str, ...]) -> str:
            return ", ".join(learners) or "nobody"

        missing = (
            f"; nothing yet from {listed(self.missing)}. Who has died is given up when its lease "
            "runs out; who lives must call session.step, or leave the run"
        )
        return (
            f"round {self.round} has waited {self.seconds:.0f} s: accepted "
            f"{listed(self.accepted)}, of {self.quorum_size} needed; rejected "
            f"{listed(self.rejected)}{missing if self.missing else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingShared(Event):
    """A session ends of which some fragments are in no round: what these learned is dropped."""

    level: ClassVar[int] = logging.WARNING
    learner: str
    steps: int
    """How often ``step`` was called."""
    every: int
    """Steps after which a round is due."""
    fragments: int
    """How many have nothing of this session in any round."""
    of: int
    """How many there are."""

    def __str__(self) -> str:
        if not self.steps:
            return (
                f"{self.learner} never called session.step, and its model was changed: that is "
                "dropped, and the model holds the run's parameters. Call it after every optimizer "
                "step"
            )
        some = "" if self.fragments == self.of else f"in {self.fragments} of {self.of} fragments "
        return (
            f"{some}no round has anything of the {shown_steps(self.steps)} of {self.learner}: that "
            "is dropped, and the model holds the run's parameters there. Rounds take a fragment "
            f"each, are due every {self.every} steps and take some tenths of a second; train "
            "longer, or pass flush_on_close=True to DiLoCo"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRestored(Event):
    """``load_state_dict`` has put local progress of an earlier process back into the model."""

    local_step: int
    kept: tuple[int, ...]
    """The fragments whose local steps go on."""
    moved: tuple[int, ...]
    """The fragments that the run has committed since, and that hold the newest commit."""
    steps_replaced: int
    """Local steps on those, at most, that no commit holds."""

    def __str__(self) -> str:
        moved = (
            f"; the run went on in {len(self.moved)}, replacing {self.steps_replaced} local steps"
            if self.moved
            else ""
        )
        return (
            f"goes on at local step {self.local_step}, with the local parameters of "
            f"{len(self.kept)} fragments{moved}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUnavailable(Event):
    """A mailbox call failed for now and will be repeated."""

    level: ClassVar[int] = logging.WARNING
    operation: str
    error: str
    retry_seconds: float
    answered: bool = True
    """False while the mailbox has not answered this process at all: its address may be wrong."""

    def __str__(self) -> str:
        if not self.answered:
            return (
                "no usable answer from the mailbox yet: check its address, or wait; it is asked "
                f"again in {self.retry_seconds:.1f} s, and Ctrl-C stops. {self.error}"
            )
        return f"mailbox {self.operation} failed, again in {self.retry_seconds:.1f} s: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailed(Event):
    """A background task failed for a reason that repeating may mend."""

    level: ClassVar[int] = logging.ERROR
    task: str
    """``poll``, ``publish``, ``fetch``, ``close round``, ``sweep`` or ``lease``."""
    error: str
    round: int | None = None
    repeated: bool = True
    """False for the last words of a node that leaves."""
    times: int = 1
    """How often in a row; of the same error only the first, second, fourth, … is told."""

    def __str__(self) -> str:
        if not self.repeated and self.task == "lease":
            return f"leaves without deleting its lease, which runs out by itself: {self.error}"
        if not self.repeated:
            return f"leaves with the newest commits that it knew, there may be more: {self.error}"
        where = "" if self.round is None else f"round {self.round}: "
        times = f" {self.times} times in a row" if self.times > 1 else ""
        return f"{where}{self.task} failed{times} and is tried again: {self.error}"
