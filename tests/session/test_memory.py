"""Which memory a commit is written into: what it uses up, when nobody else looks at that."""

import asyncio
from collections.abc import Buffer
from dataclasses import replace
from functools import partial
from typing import Any, override

import numpy as np
import pytest
import torch
from tests.session.models import QUICK, Keeping, net, train_until

import gradientmail as gm
from gradientmail.backend.numpy import NumpyBackend
from gradientmail.backend.torch import TorchBackend
from gradientmail.buffers import HOST
from gradientmail.clock import inline
from gradientmail.collecting import Collector
from gradientmail.committing import Committer
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.records import Manifest, SnapshotRecord
from gradientmail.exchange.sealing import Payload, Sealing
from gradientmail.node import planned
from gradientmail.run import arrays_over, read_run
from gradientmail.verification import verify

BACKEND = NumpyBackend()


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
@pytest.mark.parametrize("quorum_size", [2, 3])
def test_theta_is_written_over_the_delta_that_was_merged(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    delta_dtype: str | None,
    commit_dtype: str | None,
    quorum_size: int,
) -> None:
    """Over this learner's own as it was sent, over a decoded one, or over their sum.

    If it has theta's form. More than two, if as many are expected, are summed where the own lies.
    """
    over, sums = list[str](), list[str]()
    blanks_of, sum_in = Committer._blanks, Collector._sum_in

    def spied(self: Committer, collector: Collector, state: Any) -> Any:
        own = self._exchange.deltas.get(collector.number)
        spent = {
            "own": own and own.buffer,
            "decoded": collector.decoded,
            "summed": collector.summed,
        }
        blanks = blanks_of(self, collector, state)
        written = blanks["theta"].buffer
        over.append(next((name for name, used in spent.items() if written is used), "fresh"))
        return blanks

    def spied_sum_in(self: Collector, first: Any) -> Any:
        own = self._exchange.deltas[self.number]
        totals = sum_in(self, first)
        sums.append("own" if self.summed is own.buffer else "fresh")
        assert (totals is first) == (sums[-1] == "own")
        assert (self.number in self._exchange.deltas) == (sums[-1] == "fresh")
        return totals

    monkeypatch.setattr(Committer, "_blanks", spied)
    monkeypatch.setattr(Collector, "_sum_in", spied_sum_in)
    algorithm = gm.DiLoCo(
        sync_every=4,
        fragments=2,
        quorum_size=quorum_size,
        delta_dtype=delta_dtype,
        commit_dtype=commit_dtype,
    )
    model, mailbox = net(dtype=dtype), Keeping()
    with gm.Session(model, algorithm=algorithm, mailbox=mailbox, callbacks=(), **QUICK) as session:
        train_until(session, model, 6)
    fp32, few = dtype is torch.float32, quorum_size == 2
    quantized = ("decoded" if few else "summed") if fp32 else "fresh"
    plain = "own" if few else quantized
    assert set(over[:6]) == {quantized if delta_dtype else plain}
    assert set(sums[:6]) == (set() if few else {"own" if fp32 and not delta_dtype else "fresh"})
    report = asyncio.run(verify(mailbox, backend=TorchBackend(), swept=False))
    assert report.holds, report
    assert report.recomputed >= 6


def test_sums_lie_in_the_own_delta_that_was_taken_in_not_in_a_later_one() -> None:
    """One that is published again replaces it; its store may still read the one that counts."""

    async def main() -> None:
        exchange = Exchange(Viewing(), offload=inline, take=HOST.take)
        algorithm = gm.DiLoCo(sync_every=2, fragments=1, in_flight=1)
        schema = BACKEND.bind({"w": np.zeros((200, 200), np.float32)}).schema
        fragment = planned(schema, algorithm)[0]

        async def stored(learner: str, value: float) -> Payload:
            buffer = fragment.delta.blank(HOST.take)
            arrays_over(BACKEND, buffer, fragment.delta)["w"][:] = value
            key_of = partial(layout.snapshot_blob_key, 0, learner)
            sealed = await exchange.seal(Sealing(buffer, fragment.delta), key_of)
            return await exchange.store(sealed)

        init = await stored("init", 0.0)
        manifest = Manifest(
            schema=schema,
            plan=(("w",),),
            algorithm=algorithm.to_json(),
            init=(replace(init.ref, key=layout.init_blob_key(0, init.ref.sha256, layout.RAW_EXT)),),
            created_by="me",
            averaged=(),
        )
        run = read_run(manifest)
        collector = Collector(
            run,
            exchange,
            number=0,
            expected=2,
            backend=BACKEND,
            offload=inline,
            announce=lambda event: None,
        )

        async def take(learner: str, payload: Payload) -> None:
            record = SnapshotRecord(
                learner=learner,
                round=0,
                local_step=2,
                steps=2,
                tokens=2,
                base_version=0,
                rounds_seen=-1,
                step_seconds=0.1,
                schema_digest=run.digest,
                final=False,
                payload=payload.ref,
            )
            await collector.take(learner, record.to_bytes())

        first = await stored("me", 1.0)
        assert not first.sole
        exchange.deltas[0] = first
        await take("me", first)
        await take("b", await stored("b", 2.0))
        again = await stored("me", 5.0)
        again.sole = True
        exchange.deltas[0] = again
        await take("c", await stored("c", 3.0))
        assert sorted(collector.accepted) == ["b", "c", "me"]
        for payload, value in ((first, 1.0), (again, 5.0)):
            arrays = arrays_over(BACKEND, payload.buffer, fragment.delta)
            assert np.array_equal(arrays["w"], np.full((200, 200), value, np.float32))
        assert collector.summed is not None
        assert collector.summed is not first.buffer
        assert collector.summed is not again.buffer

    asyncio.run(main())
