"""One commit: the outer step written where the payloads lie, then payloads, then the record."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from gradientmail.algorithm.outer import FragmentState, outer_steps
from gradientmail.backend.base import Array, Backend
from gradientmail.clock import Offload
from gradientmail.collecting import Collector
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange, Payload
from gradientmail.exchange.payload import PayloadLayout
from gradientmail.exchange.records import Estimates, RoundRecord, Update
from gradientmail.holding import Held
from gradientmail.run import Run, arrays_over, payload_arrays


@dataclass(frozen=True, slots=True)
class Closing:
    """A round whose contributions are complete."""

    collector: Collector
    claim: int
    quorum_seconds: float
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Blanks:
    """The buffers that a commit is written into, by payload, and the contributions' cosine."""

    buffers: Mapping[str, tuple[PayloadLayout, memoryview]]
    cosine: float | None
    overflowed: tuple[str, ...]
    """The parameters that the step drove out of their dtype's range, and that were held there."""


class Committer:
    """Makes commits ready: all but the record's creation. Used on the loop's thread."""

    def __init__(self, run: Run, exchange: Exchange, *, backend: Backend, offload: Offload) -> None:
        """``backend`` does the merging, on the host."""
        self._run = run
        self._exchange = exchange
        self._backend = backend
        self._offload = offload

    async def merge(self, collector: Collector, state: Held) -> Blanks:
        """The outer step; afterwards the contributions are let go."""
        blanks = await self._offload(self._merge, collector, state)
        collector.release()
        return blanks

    async def upload(
        self, closing: Closing, blanks: Blanks, estimates: Estimates
    ) -> tuple[RoundRecord, Held]:
        """Store what ``merge`` made; the record to create, and what is held if it counts."""
        payloads = await self._upload(closing.collector.number, blanks.buffers)
        update = None
        if "update" in payloads:
            digest = await self._exchange.plain_sha256(payloads["theta"])
            update = Update(payloads["update"].ref, digest)
        record = self._record(closing, blanks.cosine, payloads, update, estimates)
        return record, Held(record.version, payloads["theta"], payloads["outer"])

    def _merge(self, collector: Collector, state: Held) -> Blanks:
        """The outer step, written where the payloads lie. Off the loop."""
        backend, fragment, algorithm = self._backend, collector.fragment, self._run.algorithm
        merged = collector.fold.merged()
        blank = self._blanks(collector, state)
        out: dict[str, Mapping[str, Array]] = {
            name: arrays_over(backend, buffer, one) for name, (one, buffer) in blank.items()
        }
        overflowed: list[str] = []
        for step, specs in outer_steps(algorithm, fragment.specs, self._run.averaged):
            overflowed += step(
                backend,
                specs,
                self._arrays(state),
                merged.deltas,
                new=FragmentState(out["theta"], out["outer"]),
                update=out.get("update", {}),
                final=collector.all_final,
                take=self._exchange.take,
            )
        return Blanks(blank, merged.cosine, tuple(sorted(overflowed)))

    def _blanks(
        self, collector: Collector, state: Held
    ) -> dict[str, tuple[PayloadLayout, memoryview]]:
        """Where the commit is written: over what it uses up, if nobody else looks at that.

        The step goes element by element and has read what it writes over. Should the commit fail,
        the round is made again from what the mailbox has.
        """
        fragment, take = collector.fragment, self._exchange.take
        layouts = {"theta": fragment.theta, "outer": fragment.outer, "update": fragment.update}
        # A final step writes into the momentum what it still has to take off the master.
        over = {} if collector.all_final else self._used_up(collector, state)
        return {
            name: (one, over[name] if name in over else one.blank(take))
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

    async def _upload(
        self, number: int, buffers: Mapping[str, tuple[PayloadLayout, memoryview]]
    ) -> dict[str, Payload]:
        """Hash and store theta, outer and update, all at once."""

        def key_of(digest: str, extension: str) -> str:
            return layout.round_blob_key(number, digest, extension)

        async def send(name: str) -> Payload:
            payload_layout, buffer = buffers[name]
            sealed = await self._exchange.seal(buffer, payload_layout, key_of)
            return await self._exchange.store(sealed)

        # The largest first: its transfer ends last.
        names = sorted(buffers, key=lambda name: -buffers[name][0].nbytes)
        sent = await asyncio.gather(*map(send, names), return_exceptions=True)
        payloads: dict[str, Payload] = {}
        for name, result in zip(names, sent, strict=True):
            if isinstance(result, BaseException):
                raise result
            payloads[name] = result
        return payloads

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
