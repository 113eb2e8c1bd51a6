"""A model with fewer tensors than fragments, or none that has bytes: the rounds go on."""

import time

import pytest
import torch
from tests.session.models import QUICK, Events

import gradientmail as gm
from gradientmail import events


class Plain(torch.nn.Module):
    """Some parameters of these shapes."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", torch.nn.Parameter(torch.ones(shape)))


@pytest.mark.parametrize(
    ("shapes", "in_flight"),
    [(((),), 2), (((3,),), 3), (((2,), (3,)), 3), (((0, 3), (0,), (0,)), 2)],
    ids=["one scalar", "one tensor", "two tensors", "no bytes at all"],
)
def test_no_fragment_is_in_flight_twice(
    shapes: tuple[tuple[int, ...], ...], in_flight: int
) -> None:
    """The second snapshot would be stale, and a round that nobody else is in stay open for good."""
    heard, model = Events(), Plain(*shapes)
    algorithm = gm.DiLoCo(sync_every=4, fragments=4, in_flight=in_flight)
    session = gm.Session(
        model, algorithm=algorithm, mailbox=gm.MemoryMailbox(), callbacks=[heard], **QUICK
    )
    with session:
        ends = time.monotonic() + 90
        while session.rounds_seen < 5 and time.monotonic() < ends:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1)
            session.step(samples=1)
            time.sleep(0.001)
        assert session.rounds_seen >= 5
    assert heard.of(events.SnapshotRejected) == []
    assert heard.of(events.GaveUp) == []
