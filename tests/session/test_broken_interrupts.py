"""Ctrl-C in the middle of ``step``, caught, as a notebook does: the session trains on."""

import threading
import time
from typing import Any

import pytest
import torch
from tests.session.models import QUICK, net, train_step

import gradientmail as gm


@pytest.mark.parametrize("where", ["apply", "capture"])
def test_a_step_that_was_interrupted_can_be_followed_by_others(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arrival that was lost would be waited for in all steps that follow."""
    model = net()
    algorithm = gm.DiLoCo(sync_every=2, fragments=1, in_flight=1, overlap_steps=0)
    session = gm.Session(
        model, algorithm=algorithm, mailbox=gm.MemoryMailbox(), callbacks=[], **QUICK
    )
    whole, left = getattr(session._parameters, where), [3]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        done = whole(*args, **kwargs)
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(session._parameters, where, interrupted)
    interrupts: list[int] = []

    def train() -> None:
        optimizer, ends = torch.optim.SGD(model.parameters(), lr=0.05), time.monotonic() + 80
        while session.rounds_seen < 6 and time.monotonic() < ends:
            train_step(model, optimizer, session.rounds_seen + 2)
            try:
                session.step(samples=1)
            except KeyboardInterrupt:
                interrupts.append(session.rounds_seen)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(90)
    assert len(interrupts) == 3
    assert session.rounds_seen >= 6
    session.close()
