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
def test_theta_is_written_over_the_delta_that_was_merged(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    delta_dtype: str | None,
    commit_dtype: str | None,
) -> None:
    """Over this learner's own as it was sent, or over a decoded one, if it has theta's form."""
    over: list[str] = []
    blanks_of = Committer._blanks

    def spied(self: Committer, collector: Collector, state: Any) -> Any:
        own = self._exchange.deltas.get(collector.number)
        spent = {"own": own and own.buffer, "decoded": collector.decoded}
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
    expected = quantized if delta_dtype else "own"
    assert set(over[:6]) == {expected}
    report = asyncio.run(verify(mailbox, backend=TorchBackend(), swept=False))
    assert report.holds, report
    assert report.recomputed >= 6
