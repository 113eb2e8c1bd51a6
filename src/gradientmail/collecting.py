"""One round's contributions: judged, fetched, checked and folded in as they appear."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from gradientmail.algorithm.merge import Fold, Measured, contribution_weight
from gradientmail.algorithm.precision import decode_tensors
from gradientmail.backend.base import Array, Backend
from gradientmail.clock import Offload
from gradientmail.errors import PayloadCorrupt, ProtocolError
from gradientmail.events import Event, SnapshotRejected
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.records import Participant, SnapshotRecord, expect_key
from gradientmail.exchange.sealing import Payload
from gradientmail.run import Fragment, Run, arrays_over, payload_arrays

LONGEST_STEP = 86_400.0
"""Seconds. One record that says more would have every later round wait as long for stragglers."""


def judge(record: SnapshotRecord, *, digest: str, base_version: int) -> tuple[str, str] | None:
    """Why a snapshot cannot be merged, as its record alone shows: reason and detail, or None."""
    if record.steps <= 0 or record.tokens <= 0:
        return "zero_steps", (
            f"it counts {record.steps} steps and {record.tokens} samples, as one does whose "
            "parameters were not finite"
        )
    if record.schema_digest != digest:
        return "schema", "it was made from a model with another schema"
    if record.base_version != base_version:
        return (
            "stale",
            f"it starts from version {record.base_version}, the fragment is at {base_version}",
        )
    return None


class Collector:
    """The contributions to one round. Used on the loop's thread; one call at a time leaves it."""

    def __init__(
        self,
        run: Run,
        exchange: Exchange,
        *,
        number: int,
        backend: Backend,
        offload: Offload,
        announce: Callable[[Event], None],
    ) -> None:
        """An empty collection for round ``number``."""
        self.number = number
        self.fragment: Fragment = run.fragments[run.schedule.fragment(number)]
        self.base_version = run.schedule.version(number) - 1
        self.accepted: dict[str, SnapshotRecord] = {}
        self.rejected: dict[str, str] = {}
        self.payload_keys: set[str] = set()
        """Where the deltas of all those lie, as far as their records can be read."""
        self._judged: dict[str, bytes] = {}
        """Their records. Who was rejected may publish another one while the round is open."""
        self._run = run
        self._exchange = exchange
        self._backend = backend
        self._offload = offload
        self._announce = announce
        self.fold = self._empty_fold()
        self.decoded: memoryview | None = None
        """Where the last contribution was decoded; its merge may be written over it."""
        self.summed: memoryview | None = None
        """Where more than two are summed; their merge may be written over it, too."""
        self._own: tuple[Payload, Mapping[str, Array]] | None = None
        """This node's own delta and its arrays, while the fold has them."""
        self._first_decoded: tuple[memoryview, Mapping[str, Array]] | None = None
        """Where the first contribution was decoded, if it was, and its arrays."""

    def _empty_fold(self) -> Fold:
        return Fold(
            self._run.algorithm.merge,
            self.fragment.specs,
            self._backend,
            self._exchange.take,
            averaged=self._run.averaged,
        )

    @property
    def reported(self) -> set[str]:
        """Every learner whose snapshot was judged."""
        return self.accepted.keys() | self.rejected.keys()

    @property
    def all_final(self) -> bool:
        """Whether every contribution is a learner's last."""
        return bool(self.accepted) and all(record.final for record in self.accepted.values())

    def participants(self) -> tuple[Participant, ...]:
        """The accepted contributions, sorted by learner."""
        return tuple(
            Participant(
                learner=learner,
                local_step=record.local_step,
                steps=record.steps,
                tokens=record.tokens,
                weight=contribution_weight(record.tokens, record.steps),
            )
            for learner, record in sorted(self.accepted.items())
        )

    def step_seconds(self) -> float | None:
        """Mean time of a step over the contributions that know it, and that can be true."""
        told = (record.step_seconds for record in self.accepted.values())
        known = [seconds for seconds in told if seconds and seconds <= LONGEST_STEP]
        return sum(seconds / len(known) for seconds in known) if known else None

    def new(self, found: Mapping[str, bytes]) -> list[str]:
        """The learners in ``found`` whose records were not judged yet; this node's own first.

        Its own delta is in memory already, and may leave it once folded in.
        """
        own = self._exchange.deltas.get(self.number)
        mine = None if own is None else own.ref.blob.learner
        fresh = (
            learner
            for learner, raw in found.items()
            if learner not in self.accepted and self._judged.get(learner) != raw
        )
        return sorted(fresh, key=lambda learner: (learner != mine, learner))

    async def settle(self) -> bool:
        """Nothing more comes. Two that were summed for a third that was rejected come once more.

        So that equal contributions give equal bytes. False if another node has committed the round
        and swept them; ``PayloadCorrupt`` if one is gone otherwise.
        """
        if self.fold.sums_too_few:
            accepted = self._begin_anew()
            for learner, record in accepted.items():
                verdict = await self._fold_in(record)
                if verdict is not None and await self._is_over():
                    self._begin_anew()
                    return False
                if verdict is not None:
                    raise PayloadCorrupt(verdict[1])
                self.accepted[learner] = record
        return True

    def _begin_anew(self) -> dict[str, SnapshotRecord]:
        """Accept nobody yet; who was accepted."""
        accepted, self.accepted = self.accepted, dict[str, SnapshotRecord]()
        for learner in accepted:
            self._judged.pop(learner, None)
        self.fold = self._empty_fold()
        self.decoded = self.summed = self._own = self._first_decoded = None
        return accepted

    def release(self) -> None:
        """Let go of the contributions themselves, which are merged; the records stay."""
        self._exchange.deltas.pop(self.number, None)
        self.decoded = self.summed = self._own = self._first_decoded = None
        del self.fold

    async def take(self, learner: str, raw: bytes) -> None:
        """Judge one snapshot and fold it in, or reject it."""
        self._judged[learner] = raw
        try:
            record = SnapshotRecord.from_bytes(raw)
            expect_key(record, layout.snapshot_key(self.number, learner))
        except ProtocolError as error:
            self._reject(learner, "corrupt", str(error))
            return
        self.payload_keys.add(record.payload.key)
        verdict = judge(record, digest=self._run.digest, base_version=self.base_version)
        if verdict is None:
            verdict = await self._fold_in(record)
        if verdict is not None and verdict[0] == "missing" and await self._is_over():
            return  # another node has committed the round, and swept
        if verdict is not None:
            self._reject(learner, *verdict)
        else:
            self.rejected.pop(learner, None)
            self.accepted[learner] = record

    async def _is_over(self) -> bool:
        """Whether the round has a record."""
        try:
            return await self._exchange.round(self.number) is not None
        except ProtocolError:
            return False

    async def _fold_in(self, record: SnapshotRecord) -> tuple[str, str] | None:
        if self.fold.holds_contributions and not self.fold.keeps_next:
            # Frees them before another is fetched.
            await self._offload(self.fold.sum_up, self._sum_in)
            self._let_own_go()
        measure = partial(self._offload, self._measure)
        try:
            found = await self._exchange.examine(record.payload, self.fragment.delta, measure)
        except PayloadCorrupt as error:
            return "corrupt", str(error)
        if found is None:
            return "missing", f"{record.payload.key} does not exist"
        payload, (arrays, measured) = found
        add = partial(
            self.fold.add, arrays, contribution_weight(record.tokens, record.steps), measured
        )
        if not (add() if self.fold.keeps_next else await self._offload(add)):
            return "corrupt", f"{record.payload.key} holds values that are not finite"
        if self._exchange.deltas.get(self.number) is payload:
            self._own = payload, arrays
        if self.decoded is not None and self.fold.count == 1:
            self._first_decoded = self.decoded, arrays
        if not self.fold.holds_contributions:
            self._let_own_go()
        return None

    def _let_own_go(self) -> None:
        """This node's own delta is needed no more, once it is summed; a later one is another."""
        own, self._own = self._own, None
        if own is not None and self._exchange.deltas.get(self.number) is own[0]:
            self._exchange.deltas.pop(self.number)

    def _sum_in(self, first: Mapping[str, Array]) -> Mapping[str, Array]:
        """Where to sum; if theta has that form, where theta will be written. Off the loop.

        That is where the first contribution lies, if it was decoded, or is this node's own and
        stored.
        """
        exchange, fp32 = self._exchange, self.fragment.fp32
        if self._first_decoded is not None and self._first_decoded[1] is first:
            self.summed = self._first_decoded[0]
            return first
        own, arrays = self._own or (None, None)
        if own is not None and arrays is first and own.sole and own.slots == fp32.slots:
            if exchange.deltas.get(self.number) is own:  # else there is a later one
                exchange.deltas.pop(self.number, None)
            exchange.forget(own)
            self.summed = own.buffer
            return first
        self.summed = fp32.blank(exchange.take)
        return arrays_over(self._backend, self.summed, fp32)

    def _measure(self, payload: Payload) -> tuple[Mapping[str, Array], Measured]:
        arrays = self._arrays(payload)
        return arrays, self.fold.measure(arrays, payload.squares)

    def _arrays(self, payload: Payload) -> Mapping[str, Array]:
        """The contribution as the arithmetic takes it, in one buffer if it has to be decoded."""
        arrays, fp32 = payload_arrays(self._backend, payload), self.fragment.fp32
        if not self.fragment.is_quantized:
            return arrays
        if self.decoded is None or self.fold.holds_contributions:
            self.decoded = fp32.blank(self._exchange.take)
        out = arrays_over(self._backend, self.decoded, fp32)
        dtype = self._run.algorithm.delta_dtype
        return decode_tensors(
            self._backend, arrays, dtype, self.fragment.specs, lambda spec: out[spec.name]
        )

    def _reject(self, learner: str, reason: str, detail: str) -> None:
        self.rejected[learner] = reason
        self._announce(
            SnapshotRejected(round=self.number, learner=learner, reason=reason, detail=detail)
        )


async def take_new(collector: Collector, found: dict[str, bytes]) -> bool:
    """Take in what the watch has found and the collector has not judged; whether there was any."""
    fresh = collector.new(found)
    for learner in fresh:
        await collector.take(learner, found[learner])
        await asyncio.sleep(0)
    return bool(fresh)
