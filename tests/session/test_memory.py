"""Which memory a commit is written into: what it uses up, when nobody else looks at that."""

import asyncio
from typing import Any

import pytest
import torch
from tests.session.models import QUICK, Keeping, net, train_until

import gradientmail as gm
from gradientmail.backend.torch import TorchBackend
from gradientmail.collecting import Collector
from gradientmail.committing import Committer
from gradientmail.verification import verify


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
