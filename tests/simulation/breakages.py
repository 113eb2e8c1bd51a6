"""The protocol, broken on purpose in one place at a time.

Each breakage is a patch of the shipped code, a plan under which it matters, and the invariant that
must tell. ``test_breakages.py`` runs them all.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gradientmail import collecting, deltas, syncer, watch
from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.merge import Fold
from gradientmail.collecting import Collector
from gradientmail.committing import Committer
from gradientmail.courier import Courier
from gradientmail.election import Election
from gradientmail.errors import LearnerReplaced
from gradientmail.exchange import exchange as exchange_module
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.lease import Lease
from gradientmail.exchange.lease_book import LeaseBook
from gradientmail.exchange.records import RoundRecord
from gradientmail.exchange.sealing import Payload
from gradientmail.handoff import Outgoing
from gradientmail.holding import Held, Holding
from gradientmail.learner import Learner
from gradientmail.mailbox.base import Mailbox
from gradientmail.run import Fragment
from gradientmail.syncer import Syncer
from gradientmail.testing.plans import Fault, NodePlan, Plan
from gradientmail.testing.simulated import Connection
from gradientmail.watch import Watch

type Patch = Callable[[pytest.MonkeyPatch], None]

LINK = Connection(latency_seconds=0.2, jitter_seconds=0.3)
TWO = DiLoCo(sync_every=4, fragments=2, quorum_size=2)
FAST = DiLoCo(sync_every=4, fragments=2)


def plan(
    algorithm: DiLoCo = FAST, nodes: int = 2, *faults: Fault, seconds: float = 40.0, **how: Any
) -> Plan:
    """A short life of a few nodes."""
    names = tuple(NodePlan(f"n{number}", connection=LINK) for number in range(nodes))
    return replace(Plan(algorithm, names, faults, seconds=seconds), **how)


VANDALS = tuple(Fault(at, "vandal", 0) for at in (3.0, 5.0, 8.0, 12.0, 15.0, 18.0, 21.0, 24.0))


@dataclass(frozen=True)
class Breakage:
    """One thing done wrong."""

    name: str
    patch: Patch
    told_by: str
    """The invariant that must tell."""
    plan: Plan


def commits_over_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    async def commit(self: Exchange, record: RoundRecord) -> RoundRecord:
        await self.mailbox.delete([layout.round_key(record.round)])
        await self.mailbox.put_if_absent(layout.round_key(record.round), record.to_bytes())
        return record

    monkeypatch.setattr(Exchange, "commit", commit)


def sweeps_a_round_early(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = syncer.sweep_thoroughly

    async def early(exchange: Exchange, number: int, fragments: int) -> None:
        await whole(exchange, number + 1, fragments)

    monkeypatch.setattr(syncer, "sweep_thoroughly", early)


def sweeps_the_version_before(monkeypatch: pytest.MonkeyPatch) -> None:
    known = syncer.known_keys

    def more(number: int, *, expired: RoundRecord | None, **rest: Any) -> list[str]:
        keys = known(number, expired=expired, **rest)
        if expired is not None:
            keys += [layout.round_blob_key(number - 2, "0" * 64, ".safetensors")]
        return keys

    monkeypatch.setattr(syncer, "known_keys", more)
    monkeypatch.setattr(
        syncer.Syncer,
        "_sweep",
        _sweep_with_history(syncer.Syncer._sweep),
    )


def _sweep_with_history(whole: Any) -> Any:
    async def sweep(self: Syncer, closing: Any) -> None:
        number = closing.collector.number
        before = self._watch.progress.history.get(number - len(self._run.fragments))
        if before is not None:
            await self._exchange.delete([ref.key for ref in before.payloads])
        await whole(self, closing)

    return sweep


def sweeps_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    async def everything(exchange: Exchange, number: int, fragments: int) -> None:
        del number, fragments
        await exchange.delete(await exchange.keys(layout.SNAPSHOTS))

    monkeypatch.setattr(syncer, "sweep_thoroughly", everything)


def never_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Syncer, closing: Any) -> None:
        """Leave it all."""

    async def not_thoroughly(exchange: Exchange, number: int, fragments: int) -> None:
        """Leave it all."""

    monkeypatch.setattr(Syncer, "_sweep", nothing)
    monkeypatch.setattr(syncer, "sweep_thoroughly", not_thoroughly)


def never_sweeps_thoroughly(monkeypatch: pytest.MonkeyPatch) -> None:
    async def not_thoroughly(exchange: Exchange, number: int, fragments: int) -> None:
        """Leave what a crash left."""

    monkeypatch.setattr(syncer, "sweep_thoroughly", not_thoroughly)


def _accepts(reason: str) -> Patch:
    whole = collecting.judge

    def judge(record: Any, **how: Any) -> tuple[str, str] | None:
        verdict = whole(record, **how)
        return None if verdict is not None and verdict[0] == reason else verdict

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collecting, "judge", judge)

    return patch


def counts_zero_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    _accepts("zero_steps")(monkeypatch)
    whole = collecting.contribution_weight

    def weight(tokens: int, steps: int) -> float:
        return whole(tokens, steps) or 1.0

    monkeypatch.setattr(collecting, "contribution_weight", weight)


def counts_late_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Committer.make

    async def make(self: Committer, closing: Any, *rest: Any, **named: Any) -> Any:
        collector = closing.collector
        for number, learner in await self._exchange.snapshots():
            if number == collector.number and learner not in collector.accepted:
                raw = await self._exchange.snapshot(number, learner)
                if raw is not None:
                    collector.accepted[learner] = collecting.SnapshotRecord.from_bytes(raw)
        return await whole(self, closing, *rest, **named)

    monkeypatch.setattr(Committer, "make", make)


def skips_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(stored: memoryview, ref: Any, payload_layout: Any, *rest: Any) -> Payload:
        return Payload(ref, stored, payload_layout.check(stored))

    def checked(*_: object) -> None:
        """Believe it."""

    monkeypatch.setattr(exchange_module, "_open", opened)
    monkeypatch.setattr(exchange_module, "_check", checked)


def merges_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    class Credulous(Fold):
        def add(self, arrays: Any, weight: float, measured: Any = None) -> bool:
            super().add(arrays, weight, measured)
            return True

    monkeypatch.setattr(collecting, "Fold", Credulous)


def applies_a_delta_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Collector._fold_in

    async def fold_in(self: Collector, record: Any) -> Any:
        verdict = await whole(self, record)
        again = verdict is None and record.learner == "n1"
        return await whole(self, record) if again else verdict

    monkeypatch.setattr(Collector, "_fold_in", fold_in)


def folds_its_own_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Collector._fold_in

    async def fold_in(self: Collector, record: Any) -> Any:
        own = self._exchange.deltas.get(self.number)
        verdict = await whole(self, record)
        again = verdict is None and own is not None and own.ref == record.payload
        return await whole(self, record) if again else verdict

    monkeypatch.setattr(Collector, "_fold_in", fold_in)


def drops_momentum_on_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Holding._read

    async def read(self: Holding, *what: Any) -> Held:
        held = await whole(self, *what)
        return Held(held.version, held.theta, None)

    monkeypatch.setattr(Holding, "_read", read)


def keeps_its_state_while_others_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Holding.read

    async def read(self: Holding, number: int) -> bool:
        fragment = self._run.schedule.fragment(number)
        old = self._held.get(fragment)
        read_it = await whole(self, number)
        if old is not None and old.outer is not None:
            self._held[fragment] = old
        return read_it

    def clear(self: Holding) -> None:
        """Keep it."""

    monkeypatch.setattr(Holding, "read", read)
    monkeypatch.setattr(Holding, "clear", clear)


def adopts_without_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(record: RoundRecord) -> tuple[str, ...]:
        del record
        return ()

    monkeypatch.setattr(syncer, "_payload_keys", keys)


def trusts_stale_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    def live(self: LeaseBook, now: float) -> frozenset[str]:
        del now
        return self.listed()

    monkeypatch.setattr(LeaseBook, "live", live)


def trusts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def live(self: LeaseBook, now: float) -> frozenset[str]:
        del self, now
        return frozenset()

    monkeypatch.setattr(LeaseBook, "live", live)


def reuses_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    async def renew(self: Lease) -> bool:
        return await self._put(self.beat)

    monkeypatch.setattr(Lease, "renew", renew)


def keeps_old_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    async def remove(self: Lease, numbers: Iterable[int]) -> None:
        """Leave them."""

    monkeypatch.setattr(Lease, "_remove", remove)


def sweeps_live_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(timeout: float) -> float:
        del timeout
        return 0.0

    monkeypatch.setattr(watch, "kept_seconds", at_once)


def sweeps_leases_without_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sweep(mailbox: Mailbox, beats: Sequence[str]) -> None:
        await mailbox.delete(beats)

    monkeypatch.setattr(syncer, "sweep_beats", sweep)


def never_sweeps_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(self: Watch) -> list[str]:
        del self
        return []

    monkeypatch.setattr(Watch, "silent_beats", nobody)


def writes_the_record_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def store(self: Exchange, sealed: Any) -> Payload:
        payload = self.hold(sealed.ref, sealed.buffer, sealed.layout)
        data = bytes(sealed.stored)

        async def later() -> None:
            await asyncio.sleep(1.0)
            await self.mailbox.put_if_absent(sealed.ref.key, data)

        task = asyncio.ensure_future(later())
        _running.add(task)
        task.add_done_callback(_running.discard)
        return payload

    monkeypatch.setattr(Exchange, "store", store)


_running: set[asyncio.Task[None]] = set()


def claims_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Exchange.commit

    async def commit(self: Exchange, record: RoundRecord) -> RoundRecord:
        await self.claim(record.round + 1, 1, record.participants[0].learner)
        return await whole(self, record)

    monkeypatch.setattr(Exchange, "commit", commit)


class Forgetful(str):
    """An id that its owner does not recognize."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def forgets_its_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Election.__init__

    def init(self: Election, *what: Any, learner: str, **how: Any) -> None:
        whole(self, *what, learner=Forgetful(learner), **how)

    monkeypatch.setattr(Election, "__init__", init)


def never_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(self: Election, *what: object, fresh: bool) -> None:
        del self, what, fresh

    monkeypatch.setattr(Election, "_reason", reason)


def counts_steps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Learner._align

    def align(self: Learner, arrival: Any) -> None:
        steps, tokens = list(self._base_steps), list(self._base_tokens)
        whole(self, arrival)
        self._base_steps, self._base_tokens = steps, tokens

    monkeypatch.setattr(Learner, "_align", align)


def measures_from_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Learner._align

    def align(self: Learner, arrival: Any) -> None:
        whole(self, arrival)
        for name, row in self.versions[arrival.record.fragment].arrays.items():
            row[0] += 1.0
            del name

    monkeypatch.setattr(Learner, "_align", align)


def publishes_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind:
        @staticmethod
        def isfinite(value: float) -> bool:
            del value
            return True

    monkeypatch.setattr(deltas, "math", Blind)


def makes_the_delta_of_a_snapshot_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written over the copy of the parameters, so that the second one is these."""
    whole = Courier._make_delta

    def make(self: Courier, fragment: Fragment, outgoing: Outgoing) -> deltas.Delta:
        whole(self, fragment, outgoing)
        return whole(self, fragment, outgoing)

    monkeypatch.setattr(Courier, "_make_delta", make)


def stays_where_it_is_when_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(self: Learner) -> None:
        """Keep the local parameters."""

    monkeypatch.setattr(Learner, "settle", settle)


def blocks_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Lease.acquire

    async def acquire(self: Lease) -> None:
        if await self._mailbox.list(layout.beats_prefix(self._learner)):
            raise LearnerReplaced("somebody has this id")
        await whole(self)

    monkeypatch.setattr(Lease, "acquire", acquire)


def weighs_by_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def weight(tokens: int, steps: int) -> float:
        del steps
        return float(tokens)

    monkeypatch.setattr(collecting, "contribution_weight", weight)


def _commits(change: Callable[[RoundRecord], RoundRecord]) -> Patch:
    whole = Exchange.commit

    async def commit(self: Exchange, record: RoundRecord) -> RoundRecord:
        return await whole(self, change(record))

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Exchange, "commit", commit)

    return patch


def names_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exchange_module.sha256_hex

    def hashed(data: memoryview) -> str:
        return whole(memoryview(bytes(data) + b"salt"))

    monkeypatch.setattr(exchange_module, "sha256_hex", hashed)


def at(seconds: float, kind: Any, node: int, lasting: float = 10.0, **how: Any) -> Fault:
    """A fault, shorter to write."""
    return Fault(seconds, kind, node, lasting, **how)


LATE = Plan(
    FAST,
    tuple(
        NodePlan(f"n{n}", step_seconds=1.0 + 0.13 * n, connection=Connection(0.4, 0.8))
        for n in range(4)
    ),
    seconds=80.0,
)
SOLO = replace(plan(FAST, 1, at(11.0, "crash", 0, 1.0), seconds=20.0), nodes=(NodePlan("n0"),))
RACE = plan(
    FAST,
    3,
    *(at(10.0 + 30 * n, "pause", n % 3, 25.0) for n in range(4)),
    seconds=140.0,
)
TURNS = plan(FAST, 2, *(at(10.0 + 35 * n, "pause", n % 2, 25.0) for n in range(5)), seconds=180.0)
TAKEOVER = plan(FAST, 2, at(13.3, "crash", 0, 5.0), at(30.0, "crash", 1, 5.0), seconds=60.0)
LONG = Plan(
    FAST,
    (NodePlan("n0", step_seconds=60.0), NodePlan("n1", step_seconds=60.0)),
    (Fault(400.0, "crash", 1, again=False),),
    seconds=6600.0,
    poll_interval=10.0,
    lease_every=60.0,
    lease_timeout=120.0,
)
GONE = plan(replace(TWO, quorum_size=3), 3, at(12.0, "crash", 2, 1.0, again=False), seconds=200.0)

BREAKAGES = [
    Breakage("commits without put-if-absent", commits_over_a_record, "told", RACE),
    Breakage("sweeps one round too early", sweeps_a_round_early, "deletes", TAKEOVER),
    Breakage("sweeps the version before", sweeps_the_version_before, "deletes", plan()),
    Breakage("sweeps by too wide a prefix", sweeps_too_wide, "deletes", plan(TWO, seconds=60.0)),
    Breakage("never sweeps", never_sweeps, "leftovers", plan()),
    Breakage("never sweeps thoroughly", never_sweeps_thoroughly, "tidy", TAKEOVER),
    Breakage("skips the base version", _accepts("stale"), "bases", plan(TWO, 2, *VANDALS)),
    Breakage("skips the schema", _accepts("schema"), "bases", plan(TWO, 2, *VANDALS)),
    Breakage("skips the zero-step check", counts_zero_steps, "bases", plan(TWO, 2, *VANDALS)),
    Breakage("counts a late snapshot", counts_late_snapshots, "commits", LATE),
    Breakage("skips the hash", skips_the_hash, "snapshots", plan(TWO, 2, *VANDALS)),
    Breakage("merges NaN", merges_what_is_not_finite, "commits", plan(TWO, 2, *VANDALS)),
    Breakage("applies a delta twice", applies_a_delta_twice, "commits", plan(TWO)),
    Breakage("folds its own delta twice", folds_its_own_twice, "commits", plan(TWO)),
    Breakage("drops momentum on takeover", drops_momentum_on_takeover, "commits", TAKEOVER),
    Breakage("keeps state from before", keeps_its_state_while_others_commit, "commits", TURNS),
    Breakage("adopts without comparing", adopts_without_comparing, "told", RACE),
    Breakage("trusts a stale lease for ever", trusts_stale_leases, "progress", GONE),
    Breakage("trusts nobody", trusts_nobody, "lives", plan()),
    Breakage("reuses a beat", reuses_a_beat, "lives", plan()),
    Breakage("keeps old beats", keeps_old_beats, "leases", plan()),
    Breakage("sweeps a live lease", sweeps_live_leases, "deletes", plan()),
    Breakage("sweeps a lease without a note", sweeps_leases_without_a_note, "deletes", LONG),
    Breakage("never sweeps leases", never_sweeps_leases, "leases", LONG),
    Breakage("writes records before payloads", writes_the_record_first, "order", plan()),
    Breakage("claims before it commits", claims_before_the_commit, "order", plan()),
    Breakage("forgets its claim", forgets_its_claim, "progress", SOLO),
    Breakage("never takes over", never_takes_over, "progress", TAKEOVER),
    Breakage("counts steps again", counts_steps_again, "counts", plan()),
    Breakage("makes a delta again", makes_the_delta_of_a_snapshot_again, "deltas", plan()),
    Breakage("moves its anchor", measures_from_its_own_parameters, "anchors", plan()),
    Breakage("leaves unsettled", stays_where_it_is_when_it_leaves, "convergence", plan()),
    Breakage("blocks restarts", blocks_restarts, "nodes", SOLO),
    Breakage("weighs by tokens alone", weighs_by_tokens_alone, "participants", plan()),
    Breakage(
        "skips a version",
        _commits(lambda record: replace(record, version=record.version + 1)),
        "versions",
        plan(),
    ),
    Breakage("commits a round again", commits_over_a_record, "records", RACE),
    Breakage("names another hash", names_another_hash, "payloads", plan()),
    Breakage("publishes NaN", publishes_nan, "snapshots", plan(TWO, 2, at(12.5, "not_finite", 1))),
]
