"""A learner that goes on without a commit that it cannot read: what it holds and counts."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import override

import numpy as np
import pytest

import gradientmail as gm
from gradientmail.mailbox.wrapped import Call, WrappedMailbox


class Spoiled(WrappedMailbox):
    """The parameters of one round arrive damaged."""

    def __init__(self, inner: gm.Mailbox, number: int) -> None:
        super().__init__(inner)
        self.prefix = f"blobs/rounds/{number:010d}/"

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        answer = await act()
        if call.operation == "get" and call.key.startswith(self.prefix) and answer is not None:
            return bytes(answer)[:-1] + b"\x7f"  # type: ignore[call-overload,return-value]
        return answer


@contextmanager
def two(
    number: int, algorithm: gm.DiLoCo
) -> Iterator[tuple[gm.Session, gm.Session, dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Sessions that a and b train in; b cannot read round ``number``."""
    box = gm.MemoryMailbox()
    models = [{"w": np.zeros(100, np.float32)} for _ in range(2)]
    a, b = (
        gm.Session(model, algorithm=algorithm, mailbox=mailbox, learner_id=name, poll_interval=0.05)
        for model, mailbox, name in zip(models, (box, Spoiled(box, number)), "ab", strict=True)
    )
    with a, b:
        yield a, b, models[0], models[1]


def wait(sessions: tuple[gm.Session, ...], number: int) -> None:
    """Until they have seen the round, without a step."""
    ends = time.monotonic() + 60
    while any(session.rounds_seen < number for session in sessions):
        assert time.monotonic() < ends
        for session in sessions:
            session._learner.take_news()
        time.sleep(0.01)


def test_a_commit_that_is_there_is_not_dropped_for_one_that_cannot_be_read() -> None:
    algorithm = gm.DiLoCo(sync_every=4, fragments=1, in_flight=1, outer_lr=1.0, outer_momentum=0.0)
    with two(1, algorithm) as (a, b, model, other):
        for number in range(2):
            for _ in range(4):
                model["w"] += 1
                a.step(samples=1)
            wait((a,), number)
            a._learner._act_at = 0
            ends = time.monotonic() + 60
            while [one.record.round for one in b._handoff.arrivals] != list(range(number + 1)):
                assert time.monotonic() < ends
                time.sleep(0.01)
        assert model["w"][0] == 8.0
        with pytest.raises(gm.PayloadCorrupt, match="blobs/rounds/0000000001/"):
            b.close()  # which leaves what can be read
        assert other["w"][0] == 4.0


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_no_step_counts_twice_after_a_round_that_was_passed_over(mixing: float) -> None:
    algorithm = gm.DiLoCo(
        sync_every=4,
        fragments=1,
        in_flight=1,
        quorum_size=2,
        outer_lr=1.0,
        outer_momentum=0.0,
        mixing=mixing,
    )
    with two(0, algorithm) as (a, b, model, other):
        left = []
        for number in range(2):
            for _ in range(4):
                model["w"] += 1
                other["w"] += 1
                a.step(samples=1)
                b.step(samples=1)
            wait((a, b), number)
            a._learner._act_at = b._learner._act_at = 0
            left.append(b._learner.counts().steps[0])
        # The four of round 0 are in it, though b cannot read it; of the others mixing keeps half.
        assert left == [0, int(4 * mixing)]
