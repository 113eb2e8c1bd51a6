"""One commit: the outer step written where the payloads lie, then payloads, then the record."""

import asyncio
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gradientmail.algorithm.outer import FragmentState, outer_steps
from gradientmail.algorithm.precision import outer_specs, theta_specs, update_specs
from gradientmail.backend.base import Array, Backend
from gradientmail.clock import Offload
from gradientmail.collecting import Collector
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange, Payload, Sealing, all_stored
from gradientmail.exchange.records import Estimates, RoundRecord, Update
from gradientmail.holding import Held
from gradientmail.run import Run, arrays_over, payload_arrays
from gradientmail.schema import TensorSpec

PART = 2**22
"""Elements in an outer step's part: long beside a change of threads, short beside a fragment."""


@dataclass(frozen=True, slots=True)
class Closing:
    """A round whose contributions are complete."""

    collector: Collector
    claim: int
    quorum_seconds: float
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Blanks:
    """What a commit is written into, by payload, and what is told of it."""

    sealings: Mapping[str, Sealing]
    cosine: float | None
    overflowed: tuple[str, ...]
    """The parameters that the step drove out of their dtype's range, and that were held there."""


@dataclass(frozen=True, slots=True)
class _Step:
    """An outer step over some of a fragment's tensors at a time."""

    sealings: Mapping[str, Sealing]
    cosine: float | None
    parts: Sequence[tuple[Callable[[Sequence[TensorSpec]], tuple[str, ...]], list[TensorSpec]]]
    """Tensors, and what takes the step over them; it names those that ran out of range."""


class Committer:
    """Makes commits ready: all but the record's creation. Used on the loop's thread."""

    def __init__(self, run: Run, exchange: Exchange, *, backend: Backend, offload: Offload) -> None:
        """``backend`` does the merging, on the host."""
        self._run = run
        self._exchange = exchange
        self._backend = backend
        self._offload = offload

    async def merge(self, collector: Collector, state: Held) -> Blanks:
        """The outer step, hashed as it goes on; afterwards the contributions are let go."""
        step = await self._offload(self._prepare, collector, state)
        written = {name: set[str]() for name in step.sealings}
        overflowed: list[str] = []
        for take_step, specs in step.parts:
            _, beyond = await asyncio.gather(
                self._hash_written(step.sealings, written), self._offload(take_step, specs)
            )
            overflowed += beyond
            more = self._written_by(specs)
            written = {name: names | more[name] for name, names in written.items()}
        collector.release()
        return Blanks(step.sealings, step.cosine, tuple(sorted(overflowed)))

    async def upload(
        self, closing: Closing, blanks: Blanks, estimates: Estimates
    ) -> tuple[RoundRecord, Held]:
        """Store what ``merge`` made; the record to create, and what is held if it counts."""
        payloads = await self._upload(closing.collector.number, blanks.sealings)
        update = None
        if "update" in payloads:
            digest = await self._exchange.plain_sha256(payloads["theta"])
            update = Update(payloads["update"].ref, digest)
        record = self._record(closing, blanks.cosine, payloads, update, estimates)
        return record, Held(record.version, payloads["theta"], payloads["outer"])

    def _prepare(self, collector: Collector, state: Held) -> _Step:
        """Where the outer step is written, which is where the payloads lie. Off the loop."""
        backend, fragment, algorithm = self._backend, collector.fragment, self._run.algorithm
        merged = collector.fold.merged()
        sealings = self._blanks(collector, state)
        out: dict[str, Mapping[str, Array]] = {
            name: arrays_over(backend, one.buffer, one.layout) for name, one in sealings.items()
        }
        old = self._arrays(state)
        parts = [
            (
                partial(
                    step,
                    backend,
                    old=old,
                    deltas=merged.deltas,
                    new=FragmentState(out["theta"], out["outer"]),
                    update=out.get("update", {}),
                    final=collector.all_final,
                    take=self._exchange.take,
                ),
                part,
            )
            for step, specs in outer_steps(algorithm, fragment.specs, self._run.averaged)
            for part in _parts(specs)
        ]
        return _Step(sealings, merged.cosine, parts)

    async def _hash_written(
        self, sealings: Mapping[str, Sealing], written: Mapping[str, Container[str]]
    ) -> None:
        """Hash what the step has finished, while it works on what comes next."""
        hashing = self._exchange.hash_written
        await asyncio.gather(*(hashing(one, written[name]) for name, one in sealings.items()))

    def _written_by(self, specs: Sequence[TensorSpec]) -> dict[str, set[str]]:
        """The tensors of each payload that a step over these parameters writes, and no others.

        A parameter may have the name that another one's scales would have, were there any.
        """
        dtype = self._run.algorithm.commit_dtype
        payloads = {
            "theta": theta_specs(specs),
            "outer": outer_specs(specs, commit_dtype=dtype),
            "update": update_specs(specs, dtype),
        }
        return {name: {spec.name for spec in found} for name, found in payloads.items()}

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
        if collector.decoded is not None and fragment.decodes_like_theta:
            over["theta"] = collector.decoded
        return over

    def _arrays(self, state: Held) -> FragmentState:
        outer = {} if state.outer is None else payload_arrays(self._backend, state.outer)
        return FragmentState(payload_arrays(self._backend, state.theta), outer)

    async def _upload(self, number: int, sealings: Mapping[str, Sealing]) -> dict[str, Payload]:
        """Hash the rest and store theta, outer and update, all at once."""

        def key_of(digest: str, extension: str) -> str:
            return layout.round_blob_key(number, digest, extension)

        async def send(name: str) -> Payload:
            return await self._exchange.store(await self._exchange.seal(sealings[name], key_of))

        # The largest first: its transfer ends last.
        names = sorted(sealings, key=lambda name: -sealings[name].layout.nbytes)
        return dict(zip(names, await all_stored(map(send, names)), strict=True))

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
            rejected=tuple(sorted(collector.rejected.items())),
            cosine=cosine,
            theta=payloads["theta"].ref,
            outer=payloads["outer"].ref,
            update=update,
            quorum_seconds=closing.quorum_seconds,
            grace_seconds=closing.grace_seconds,
            estimates=estimates,
        )


def _parts(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """The tensors in order, some at a time: a step that is long enough to hash meanwhile."""
    part: list[TensorSpec] = []
    count = 0
    for spec in specs:
        part.append(spec)
        count += spec.count
        if count >= PART:
            yield part
            part = []
            count = 0
    if part:
        yield part
