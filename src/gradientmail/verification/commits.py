"""One commit after the other: its payloads, the deltas it lists, the arithmetic between them."""

from collections.abc import Callable
from dataclasses import dataclass

from gradientmail.algorithm.merge import Fold
from gradientmail.backend.base import Backend
from gradientmail.collecting import judge
from gradientmail.errors import PayloadCorrupt
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.payload import PayloadLayout
from gradientmail.exchange.records import Participant, Ref, RoundRecord, SnapshotRecord
from gradientmail.exchange.sealing import Payload
from gradientmail.run import Fragment, Run
from gradientmail.verification.arithmetic import Arithmetic, State, cosine_fault
from gradientmail.verification.reading import read_snapshot
from gradientmail.verification.report import Violation

type Tell = Callable[[Violation], None]


@dataclass(slots=True)
class Counts:
    """What has been looked at."""

    payloads: int = 0
    recomputed: int = 0
    consistent: int = 0


@dataclass(frozen=True, slots=True)
class Merged:
    """The contributions to a commit, folded in."""

    fold: Fold
    final: bool
    """Whether all of them are a learner's last."""


class Commits:
    """Reads versions of fragments and checks each against the one before."""

    def __init__(self, run: Run, exchange: Exchange, backend: Backend | None, tell: Tell) -> None:
        """Without a ``backend`` no number is looked at. ``tell`` is called with each violation."""
        self._run = run
        self._exchange = exchange
        self._arithmetic = None if backend is None else Arithmetic(run, backend)
        self._tell = tell
        self.counts = Counts()

    async def initial(self, fragment: Fragment) -> State | None:
        """Θ⁰ of a fragment; None, told, when it is not there."""
        ref = self._run.manifest.init[fragment.index]
        theta = await self.payload(ref, fragment.theta, "manifest")
        return None if theta is None else State(0, theta, None)

    async def payload(
        self, ref: Ref, payload_layout: PayloadLayout, invariant: str
    ) -> Payload | None:
        """A payload that must be there."""
        self.counts.payloads += 1
        try:
            payload = await self._exchange.fetch(ref, payload_layout)
        except PayloadCorrupt as error:
            self._tell(Violation(invariant, ref.key, str(error)))
            return None
        if payload is None:
            self._tell(Violation(invariant, ref.key, "it does not exist"))
        return payload

    async def check(
        self, record: RoundRecord, old: State | None, *, complete: bool
    ) -> State | None:
        """Check a commit against the version before (None when that is not known any more).

        Returns the version that it made, None when that cannot be read. With ``complete`` every
        delta that it lists must be there; else they may have been swept.
        """
        fragment = self._run.fragments[self._run.schedule.fragment(record.round)]
        theta = await self.payload(record.theta, fragment.theta, "payloads")
        outer = await self.payload(record.outer, fragment.outer, "payloads")
        update = None
        if record.update is not None and fragment.update is not None:
            update = await self.payload(record.update.payload, fragment.update, "payloads")
        merged = await self._merge(record, fragment, complete=complete)
        if theta is None or outer is None:
            return None
        new = State(record.version, theta, outer)
        if self._arithmetic is not None:
            self._compute(self._arithmetic, record, fragment, old, new, update, merged)
        return new

    async def _merge(
        self, record: RoundRecord, fragment: Fragment, *, complete: bool
    ) -> Merged | None:
        """All that the commit lists, one after the other; None when a part of it is gone."""
        arithmetic, fold, final = self._arithmetic, None, True
        if arithmetic is not None:
            fold = arithmetic.fold(fragment)
        for one in record.participants:
            found = await self._contribution(record, fragment, one, complete=complete)
            if found is None:
                return None
            snapshot, delta = found
            final = final and snapshot.final
            if arithmetic is None or fold is None:
                continue
            if not arithmetic.add(fold, fragment, snapshot, delta):
                text = f"the delta of {one.learner} counts nothing or is not finite"
                self._tell(Violation("commits", record.key, text))
                return None
        return Merged(fold, final=final) if fold is not None and record.participants else None

    async def _contribution(
        self, record: RoundRecord, fragment: Fragment, one: Participant, *, complete: bool
    ) -> tuple[SnapshotRecord, Payload] | None:
        key = f"{record.key} ({one.learner})"
        snapshot = await read_snapshot(self._exchange, record.round, one.learner)
        same = snapshot is not None and (snapshot.local_step, snapshot.steps, snapshot.tokens) == (
            one.local_step,
            one.steps,
            one.tokens,
        )
        if snapshot is None or not same:  # swept, or another one of a later process came late
            if complete:
                self._tell(Violation("snapshots", key, "the snapshot that it lists is not there"))
            return None
        verdict = judge(snapshot, digest=self._run.digest, base_version=record.version - 1)
        if verdict is not None:
            self._tell(Violation("bases", key, f"{verdict[0]}: {verdict[1]}"))
        if complete:
            delta = await self.payload(snapshot.payload, fragment.delta, "snapshots")
        else:
            delta = await self._swept(snapshot.payload, fragment.delta)
        return None if delta is None else (snapshot, delta)

    async def _swept(self, ref: Ref, payload_layout: PayloadLayout) -> Payload | None:
        """A payload that may be gone, or damaged: its round is over."""
        try:
            payload = await self._exchange.fetch(ref, payload_layout)
        except PayloadCorrupt:
            return None
        self.counts.payloads += payload is not None
        return payload

    def _compute(
        self,
        arithmetic: Arithmetic,
        record: RoundRecord,
        fragment: Fragment,
        old: State | None,
        new: State,
        update: Payload | None,
        merged: Merged | None,
    ) -> None:
        faults: list[tuple[str, str]] = []
        if record.update is None or update is not None:
            digest = "" if record.update is None else record.update.theta_digest
            faults += [
                ("theta", text)
                for text in arithmetic.theta_faults(fragment, old, new, update, digest)
            ]
        if merged is not None and (fault := cosine_fault(record.cosine, merged.fold)):
            faults.append(("participants", fault))
        if old is not None and merged is not None:
            self.counts.recomputed += 1
            steps = arithmetic.step_faults(fragment, old, new, merged.fold, final=merged.final)
            faults += [("commits", text) for text in steps]
        elif old is not None:
            self.counts.consistent += 1
        if old is not None:  # by itself, too: the outer step that was computed again may be wrong
            traces = arithmetic.trace_faults(fragment, old, new)
            faults += [("commits", text) for text in traces]
        for invariant, text in faults:
            self._tell(Violation(invariant, record.key, text))
