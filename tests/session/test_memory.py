"""Which memory a commit is written into: what it uses up, when nobody else looks at that."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Buffer, Callable
from functools import partial
from pathlib import Path
from typing import Any, override

import numpy as np
import pytest
import torch
from tests.session.models import QUICK, Keeping, net, train_until

import gradientmail as gm
from gradientmail.algorithm.precision import encode_tensors
from gradientmail.backend.numpy import NumpyBackend
from gradientmail.backend.torch import TorchBackend
from gradientmail.buffers import HOST, BufferPool
from gradientmail.clock import inline
from gradientmail.collecting import Collector
from gradientmail.committing import Committer
from gradientmail.errors import PayloadCorrupt
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.records import Manifest, Ref, SnapshotRecord
from gradientmail.exchange.sealing import Payload, Sealing
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.node import planned
from gradientmail.run import arrays_over, read_run
from gradientmail.verification import verify

BACKEND = NumpyBackend()
SHAPE = (400, 400)
"""Of F4, too, memory is lent by the pool."""


class Viewing(gm.MemoryMailbox):
    """Keeps the views that it was given, as a slow upload does."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[Buffer] = []

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        self.views.append(data)
        return await super().put_if_absent(key, bytes(data))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("delta_dtype", "commit_dtype"), [(None, None), ("F4", None), ("F8_E4M3", "F4")]
)
def test_theta_is_written_over_the_delta_that_was_merged(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    delta_dtype: str | None,
    commit_dtype: str | None,
) -> None:
    """Over this learner's own as it was sent, or over a decoded one, if that has theta's form."""
    over = list[str]()
    blanks_of = Committer._blanks

    def spied(self: Committer, collector: Collector, state: Any) -> Any:
        own = self._exchange.deltas.get(collector.number)
        spent = {"own": own and own.buffer, "decoded": collector.decoded}
        assert collector.summed is None
        blanks = blanks_of(self, collector, state)
        written = blanks["theta"].buffer
        over.append(next((name for name, used in spent.items() if written is used), "fresh"))
        return blanks

    monkeypatch.setattr(Committer, "_blanks", spied)
    algorithm = gm.DiLoCo(
        sync_every=4, fragments=2, delta_dtype=delta_dtype, commit_dtype=commit_dtype
    )
    model, mailbox = net(dtype=dtype), Keeping()
    with gm.Session(model, algorithm=algorithm, mailbox=mailbox, callbacks=(), **QUICK) as session:
        train_until(session, model, 6)
    quantized = "decoded" if dtype is torch.float32 else "fresh"
    assert set(over[:6]) == {quantized if delta_dtype else "own"}
    report = asyncio.run(verify(mailbox, backend=TorchBackend(), swept=False))
    assert report.holds, report
    assert report.recomputed >= 6


class Round:
    """Round 0 of a run of one tensor ``w``, whose closer is the learner ``me``."""

    def __init__(
        self,
        delta_dtype: str | None = None,
        *,
        merge: gm.Rda | gm.WeightedMean | None = None,
        mailbox: gm.Mailbox | None = None,
        take: Callable[[int], memoryview] = HOST.take,
    ) -> None:
        self.exchange = Exchange(mailbox or Viewing(), offload=inline, take=take)
        algorithm = gm.DiLoCo(
            sync_every=2,
            fragments=1,
            in_flight=1,
            delta_dtype=delta_dtype,
            merge=merge or gm.WeightedMean(),
        )
        schema = BACKEND.bind({"w": np.zeros(SHAPE, np.float32)}).schema
        self.fragment = planned(schema, algorithm)[0]
        key = layout.init_blob_key(0, "0" * 64, layout.RAW_EXT)
        self.run = read_run(
            Manifest(
                schema=schema,
                plan=(("w",),),
                algorithm=algorithm.to_json(),
                init=(Ref(key, "0" * 64, 1),),
                created_by="me",
                averaged=(),
            )
        )
        self.collector = Collector(
            self.run,
            self.exchange,
            number=0,
            backend=BACKEND,
            offload=inline,
            announce=lambda event: None,
        )

    async def stored(self, learner: str, value: float) -> Payload:
        """A delta of equal values, in the store."""
        layout_of, buffer = self.fragment.delta, self.fragment.delta.blank(HOST.take)
        arrays = arrays_over(BACKEND, buffer, layout_of)
        values = {"w": np.full(SHAPE, value, np.float32)}
        dtype = self.run.algorithm.delta_dtype
        encode_tensors(BACKEND, values, self.fragment.specs, dtype, arrays)
        key_of = partial(layout.snapshot_blob_key, 0, learner)
        sealed = await self.exchange.seal(Sealing(buffer, layout_of), key_of)
        return await self.exchange.store(sealed)

    async def take(self, learner: str, payload: Payload, *, accepted: bool = True) -> None:
        """Have the collector take it in."""
        record = SnapshotRecord(
            learner=learner,
            round=0,
            local_step=2,
            steps=2,
            tokens=2,
            base_version=0,
            rounds_seen=-1,
            step_seconds=0.1,
            schema_digest=self.run.digest,
            final=False,
            payload=payload.ref,
        )
        await self.collector.take(learner, record.to_bytes())
        assert (learner in self.collector.accepted) == accepted

    def merged(self) -> float:
        """The value that all elements of the merge have."""
        out = np.zeros(SHAPE, np.float32)
        BACKEND.combine(self.collector.fold.finish().deltas["w"], out)
        assert (out == out[0, 0]).all()
        return float(out[0, 0])


@pytest.mark.parametrize("own_at", [0, 1, 2])
@pytest.mark.parametrize("sole", [True, False])
@pytest.mark.parametrize("delta_dtype", [None, "F4", "BF16"])
def test_more_than_two_are_summed_where_the_first_one_lies(
    own_at: int, delta_dtype: str | None, *, sole: bool
) -> None:
    """In this node's own delta, if that is stored and of the form; in one that was decoded."""

    async def main() -> None:
        one, learners = Round(delta_dtype), ["a", "b", "c", "d"]
        learners[own_at] = "me"
        collector, first = one.collector, None
        own = await one.stored("me", 2.0)
        own.sole = sole
        one.exchange.deltas[0] = own
        for index, learner in enumerate(learners):
            mine = learner == "me"
            await one.take(learner, own if mine else await one.stored(learner, 2.0 + 2.0 * index))
            first = first or collector.decoded
            assert (collector.summed is not None) == (index >= 2)
            # Two are kept; what is summed is free.
            assert collector.fold.holds_contributions == (index < 2)
            assert (0 in one.exchange.deltas) == (index < max(own_at, 2))
        expected = first if delta_dtype == "F4" else None
        if delta_dtype is None and sole and own_at == 0:
            expected = own.buffer
        assert (collector.summed is expected) == (expected is not None)
        assert (collector.summed is own.buffer) == (expected is own.buffer)
        total = sum(2.0 if who == "me" else 2.0 + 2.0 * i for i, who in enumerate(learners))
        assert one.merged() == total / 4

    asyncio.run(main())


def test_sums_lie_in_the_own_delta_that_was_taken_in_not_in_a_later_one() -> None:
    """One that is published again replaces it; its store may still read the one that counts."""

    async def main() -> None:
        one = Round()
        first = await one.stored("me", 1.0)
        assert not first.sole
        one.exchange.deltas[0] = first
        await one.take("me", first)
        await one.take("b", await one.stored("b", 2.0))
        again = await one.stored("me", 5.0)
        again.sole = True
        one.exchange.deltas[0] = again
        await one.take("c", await one.stored("c", 3.0))
        for payload, value in ((first, 1.0), (again, 5.0)):
            arrays = arrays_over(BACKEND, payload.buffer, one.fragment.delta)
            assert np.array_equal(arrays["w"], np.full(SHAPE, value, np.float32))
        assert one.collector.summed is not None
        assert one.collector.summed is not first.buffer
        assert one.collector.summed is not again.buffer
        assert one.merged() == 2.0

    asyncio.run(main())


@pytest.mark.parametrize("committed", [True, False])
def test_what_was_swept_with_its_round_is_not_called_missing(
    monkeypatch: pytest.MonkeyPatch, *, committed: bool
) -> None:
    """Another node has committed the round meanwhile: nothing is damaged or lost."""

    async def main() -> None:
        one = Round()
        payload = await one.stored("b", 1.0)

        async def round_of(number: int) -> object:
            return object() if committed and number == 0 else None

        monkeypatch.setattr(one.exchange, "round", round_of)
        await one.exchange.delete((payload.ref.key,))
        one.exchange.forget(payload)
        await one.take("b", payload, accepted=False)
        assert one.collector.rejected == ({} if committed else {"b": "missing"})
        assert one.collector.accepted == {}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("delta_dtype", "why"), [(None, "missing"), (None, "corrupt"), ("F4", "missing")]
)
def test_a_third_that_comes_to_nothing_changes_nothing(delta_dtype: str | None, why: str) -> None:
    """Two contributions give the same whether another one was rejected or not."""

    async def main() -> None:
        found: list[tuple[Any, float | None]] = []
        for third in (False, True):
            one = Round(delta_dtype)
            one.exchange.deltas[0] = own = await one.stored("me", 3.0)
            own.sole = True
            await one.take("me", own)
            await one.take("b", await one.stored("b", -1.5))
            if third:
                payload = await one.stored("c", 2.0 if why == "missing" else np.nan)
                if why == "missing":
                    await one.exchange.delete((payload.ref.key,))
                    one.exchange.forget(payload)
                await one.take("c", payload, accepted=False)
                assert one.collector.rejected == {"c": why}
                assert one.collector.fold.sums_too_few
            assert await one.collector.settle()
            assert one.collector.fold.holds_contributions
            merged = one.collector.fold.merged()
            out = np.zeros(SHAPE, np.float32)
            BACKEND.combine(merged.deltas["w"], out)
            found.append((out.tobytes(), merged.cosine))
        assert found[0] == found[1]
        assert found[0][1] == -1.0

    asyncio.run(main())


@pytest.mark.parametrize("committed", [True, False])
def test_a_contribution_that_went_meanwhile(
    monkeypatch: pytest.MonkeyPatch, *, committed: bool
) -> None:
    """Fails the round, which is tried again, unless another node has committed it."""

    async def main() -> None:
        one = Round()
        payloads = [await one.stored(learner, 1.0) for learner in ("a", "b", "c")]
        for learner, payload in zip("ab", payloads, strict=False):
            await one.take(learner, payload)
        await one.exchange.delete([payload.ref.key for payload in payloads[1:]])
        for payload in payloads:
            one.exchange.forget(payload)
        await one.take("c", payloads[2], accepted=False)

        async def round_of(number: int) -> object:
            return object() if committed and number == 0 else None

        monkeypatch.setattr(one.exchange, "round", round_of)
        if committed:
            assert not await one.collector.settle()
            assert one.collector.accepted == {}
            assert one.collector.fold.count == 0
        else:
            with pytest.raises(PayloadCorrupt, match="does not exist"):
                await one.collector.settle()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["with", "exception", "close"])
def test_a_session_that_has_ended_holds_no_buffer_though_its_name_lives(
    how: str, tmp_path: Path
) -> None:
    """The name of a session outlives its ``with`` block, in a script for as long as that runs."""
    pool = BufferPool()
    model = torch.nn.Sequential(torch.nn.Linear(4, 90_000), torch.nn.Linear(90_000, 1))

    class Pooled(TorchBackend):
        def pool(self) -> BufferPool:
            return pool

    def backend(_: object) -> TorchBackend:
        return Pooled()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gradientmail.session.backend_for", backend)
        session = gm.Session(
            model,
            algorithm=gm.DiLoCo(sync_every=4, fragments=2),
            mailbox=gm.FilesystemMailbox(tmp_path),
            callbacks=(),
            **QUICK,
        )
    while session.rounds_seen < 4:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.001)
        session.step(samples=1)
        time.sleep(0.002)
    assert pool._lent > 2 * 5 * 4 * 90_000  # the parameters and the outer state
    if how == "exception":
        session.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        gc.collect()  # calls that are cancelled end in cycles with their errors
    elif how == "with":
        session.__exit__(None, None, None)
    else:
        session.close()
    seen = session.rounds_seen
    pool.trim()
    assert (pool._lent, pool._idle()) == (0, 0)
    assert session.rounds_seen == seen >= 4


class Lending(WrappedMailbox):
    """Gives each object in memory of a pool, as a store does that reads from a disk or a socket."""

    def __init__(self, pool: BufferPool) -> None:
        super().__init__(gm.MemoryMailbox())
        self.pool = pool

    @override
    async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
        data = await act()
        if call.operation != "get" or data is None:
            return data
        buffer = self.pool.take(len(data))
        buffer[:] = data
        return buffer.toreadonly()


@pytest.mark.parametrize("merge", [gm.Rda(), gm.WeightedMean()], ids=["rda", "mean"])
@pytest.mark.parametrize("delta_dtype", [None, "F4", "BF16"])
def test_the_memory_of_a_round_does_not_grow_with_its_contributions(
    delta_dtype: str | None, merge: gm.Rda | gm.WeightedMean
) -> None:
    """Nor with cycles that wait for the garbage collector: it does not come."""

    async def peak(contributions: int) -> int:
        pool, values = BufferPool(), [2.0 + number % 3 for number in range(contributions)]
        one = Round(delta_dtype, merge=merge, mailbox=Lending(pool), take=pool.take)
        for number, value in enumerate(values):
            payload = await one.stored(f"n{number}", value)
            one.exchange.forget(payload)  # another node has stored it
            await one.take(f"n{number}", payload)
        assert await one.collector.settle()
        assert one.merged() == pytest.approx(sum(values) / contributions)
        return pool._most

    gc.disable()
    try:
        peaks = [asyncio.run(peak(contributions)) for contributions in (3, 8, 32)]
    finally:
        gc.enable()
    print(f"bytes lent at most: {peaks}")
    assert peaks[0] >= 2 * 400 * 400 // 2  # fetched or decoded, those that are kept or summed
    assert len(set(peaks)) == 1
