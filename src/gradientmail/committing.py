"""One commit: the outer step written where the payloads lie, then payloads, then the record."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from gradientmail.algorithm.outer import FragmentState, Transition
from gradientmail.algorithm.outer_parts import OuterParts, Part
from gradientmail.backend.base import Array, Backend
from gradientmail.clock import Flag, Offload
from gradientmail.collecting import Collector
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.records import Estimates, RoundRecord, Update
from gradientmail.exchange.sealing import Payload, Sealing
from gradientmail.holding import Held
from gradientmail.run import Run, arrays_over, payload_arrays

MOST_REJECTED = 10_000
"""Learners that a record lists as rejected: of more garbage nobody could read it."""


@dataclass(frozen=True, slots=True)
class Closing:
    """A round whose contributions are complete."""

    collector: Collector
    claim: int
    quorum_seconds: float
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Made:
    """A commit whose payloads are stored."""

    record: RoundRecord
    """To be created."""
    held: Held
    """What is held of the fragment if the record counts."""
    overflowed: tuple[str, ...]
    """The parameters that the step drove out of their dtype's range, and that were held there."""


@dataclass(frozen=True, slots=True)
class _Step:
    """An outer step under way."""

    sealings: Mapping[str, Sealing]
    """By payload: where it is written, and how far it is hashed."""
    written: Mapping[str, dict[str, int]]
    """By payload, up to which element each of its tensors is written."""
    parts: OuterParts
    cosine: float | None


class Committer:
    """Makes commits ready: all but the record's creation. Used on the loop's thread."""

    def __init__(self, run: Run, exchange: Exchange, *, backend: Backend, offload: Offload) -> None:
        """``backend`` does the merging, on the host."""
        self._run = run
        self._exchange = exchange
        self._backend = backend
        self._offload = offload

    async def make(
        self, closing: Closing, state: Held, estimates: Estimates, *, merged: Flag
    ) -> Made:
        """The outer step, hashed as it goes on, and its payloads stored.

        What is complete is hashed while the rest is written, and the outer state, the largest, is
        uploaded while theta and the update are made of it. ``merged`` is set when all is written;
        the contributions are let go before that.
        """
        number = closing.collector.number
        step = await self._offload(self._prepare, closing.collector, state)
        del state
        await self._take(step, step.parts.moves)
        closing.collector.release()
        payloads = await self._finish(number, step, merged)
        update = None
        if "update" in payloads:
            digest = await self._exchange.plain_sha256(payloads["theta"])
            update = Update(payloads["update"].ref, digest)
        record = self._record(closing, step.cosine, payloads, update, estimates)
        held = Held(record.version, payloads["theta"], payloads["outer"])
        return Made(record, held, tuple(sorted(step.parts.beyond)))

    async def _finish(self, number: int, step: _Step, merged: Flag) -> dict[str, Payload]:
        """Store what is complete, while the rest is written, and then that."""
        # The largest first: its transfer ends last.
        names = sorted(step.sealings, key=lambda name: -step.sealings[name].layout.nbytes)
        rest = {name for part in step.parts.follows for name in part.written}

        async def send(name: str) -> tuple[str, Payload]:
            return name, await self._send(number, step.sealings[name])

        async def follow() -> list[tuple[str, Payload]]:
            await self._take(step, step.parts.follows)
            merged.set()
            return await all_ended(send(name) for name in names if name in rest)

        first = all_ended(send(name) for name in names if name not in rest)
        stored, more = await all_ended((first, follow()))
        return dict((*stored, *more))

    async def _take(self, step: _Step, parts: deque[Part]) -> None:
        """Take parts of the step, and hash meanwhile what the ones before have finished."""
        payloads = dict.fromkeys(name for part in parts for name in part.written)
        while parts:
            part = parts.popleft()
            hashing = asyncio.gather(
                *(
                    self._exchange.hash_written(step.sealings[name], step.written[name])
                    for name in payloads
                )
            )
            try:
                step.parts.beyond.update(await self._offload(part.write))
            finally:
                await hashing
            for name, counts in part.written.items():
                step.written[name].update(counts)

    def _prepare(self, collector: Collector, state: Held) -> _Step:
        """Where the outer step is written, which is where the payloads lie. Off the loop."""
        backend, fragment = self._backend, collector.fragment
        merged = collector.fold.finish()
        sealings = self._blanks(collector, state)
        out: dict[str, Mapping[str, Array]] = {
            name: arrays_over(backend, one.buffer, one.layout) for name, one in sealings.items()
        }
        change = Transition(
            self._arrays(state),
            merged.deltas,
            FragmentState(out["theta"], out["outer"]),
            out.get("update", {}),
            collector.all_final,
        )
        run, take = self._run, self._exchange.take
        parts = OuterParts(run.algorithm, run.averaged, backend, fragment.specs, change, take)
        return _Step(sealings, {name: {} for name in sealings}, parts, merged.cosine)

    def _blanks(self, collector: Collector, state: Held) -> dict[str, Sealing]:
        """Where the commit is written: over what it uses up, if nobody else looks at that.

        The step goes element by element and has read what it writes over. Should the commit fail,
        the round is made again from what the mailbox has.
        """
        fragment, take = collector.fragment, self._exchange.take
        layouts = {"theta": fragment.theta, "outer": fragment.outer, "update": fragment.update}
        # A final step writes into the momentum what it still has to take off the master.
        over = {} if collector.all_final else self._used_up(collector, state)
        return {
            name: Sealing(over[name] if name in over else one.blank(take), one)
            for name, one in layouts.items()
            if one is not None
        }

    def _used_up(self, collector: Collector, state: Held) -> dict[str, memoryview]:
        """Buffers that the step reads last, of the form that it writes, and nobody else's."""
        fragment, exchange = collector.fragment, self._exchange
        over: dict[str, memoryview] = {}
        for name, old, new in (
            ("outer", state.outer, fragment.outer),
            ("theta", exchange.deltas.get(collector.number), fragment.theta),
        ):
            if old is not None and old.sole and old.slots == new.slots:
                exchange.forget(old)
                over[name] = old.buffer
        merged = collector.summed or collector.decoded
        if merged is not None and fragment.is_fp32:
            over["theta"] = merged
        return over

    def _arrays(self, state: Held) -> FragmentState:
        outer = {} if state.outer is None else payload_arrays(self._backend, state.outer)
        return FragmentState(payload_arrays(self._backend, state.theta), outer)

    async def _send(self, number: int, sealing: Sealing) -> Payload:
        """Hash the rest of a payload, and store it."""
        key_of = partial(layout.round_blob_key, number)
        return await self._exchange.store(await self._exchange.seal(sealing, key_of))

    def _record(
        self,
        closing: Closing,
        cosine: float | None,
        payloads: Mapping[str, Payload],
        update: Update | None,
        estimates: Estimates,
    ) -> RoundRecord:
        collector, schedule = closing.collector, self._run.schedule
        number = collector.number
        return RoundRecord(
            round=number,
            step=schedule.due_step(number),
            fragment=schedule.fragment(number),
            version=schedule.version(number),
            participants=collector.participants(),
            rejected=tuple(sorted(collector.rejected.items())[:MOST_REJECTED]),
            cosine=cosine,
            theta=payloads["theta"].ref,
            outer=payloads["outer"].ref,
            update=update,
            quorum_seconds=closing.quorum_seconds,
            grace_seconds=closing.grace_seconds,
            estimates=estimates,
        )


async def all_ended[T](uploads: Iterable[Awaitable[T]]) -> list[T]:
    """What several uploads give, when all have ended; the first failure is raised then."""
    results = await asyncio.gather(*uploads, return_exceptions=True)
    failure = next((result for result in results if isinstance(result, BaseException)), None)
    try:
        if failure is not None:
            raise failure
        return [result for result in results if not isinstance(result, BaseException)]
    finally:
        del results, failure  # an error has this frame, and would hold itself and the payloads
