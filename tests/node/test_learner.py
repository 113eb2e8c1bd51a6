"""The learner's decisions as tables, and its counting and aligning against a handoff by hand."""

import math
from typing import Any

import pytest
import torch
from tests.node.bench import Bench
from tests.node.worlds import values

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.schedule import Schedule
from gradientmail.due import NEVER, Standing, due_at, enough_others, next_round
from gradientmail.events import Aligned
from gradientmail.rhythm import LONGEST_PAUSE_SECONDS, Turn

SCHEDULE = Schedule(10, 3)  # due at 3, 6, 10, 13, 16, 20, …: gaps 3, 3, 4


def standing(
    local_step: int = 0,
    rounds_seen: int = -1,
    last_published: int = -1,
    published_at: int = 0,
    overwritten_at: tuple[int, ...] = (0, 0, 0),
) -> Standing:
    return Standing(local_step, rounds_seen, last_published, published_at, overwritten_at)


@pytest.mark.parametrize(
    ("seen", "published", "expected"), [(-1, -1, 0), (-1, 0, 1), (4, 2, 5), (4, 5, 6), (4, 4, 5)]
)
def test_next_round(seen: int, published: int, expected: int) -> None:
    assert next_round(standing(rounds_seen=seen, last_published=published)) == expected


@pytest.mark.parametrize(
    ("state", "in_flight", "closing", "expected"),
    [
        # Fresh: round 0 after gap 3; at once with one step of training when it is about to close.
        (standing(), 2, False, 3),
        (standing(), 2, True, 1),
        # Round 1 after another 3, round 2 only within what may be in flight.
        (standing(last_published=0, published_at=3), 2, False, 6),
        (standing(last_published=1, published_at=6), 2, False, NEVER),
        (standing(last_published=1, published_at=6), 2, True, NEVER),
        (standing(last_published=1, published_at=6), 3, False, 10),
        # Its fragment was overwritten just now: not before a step of training.
        (standing(rounds_seen=2, last_published=2, published_at=10), 2, False, 13),
        (
            standing(rounds_seen=2, last_published=2, published_at=10, overwritten_at=(15, 0, 0)),
            2,
            False,
            16,
        ),
        (
            standing(rounds_seen=2, last_published=2, published_at=10, overwritten_at=(11, 0, 0)),
            2,
            True,
            12,
        ),
        # Others are far ahead: the next round follows what was seen.
        (standing(rounds_seen=7, last_published=2, published_at=10), 2, False, 14),
    ],
)
def test_due(state: Standing, in_flight: int, closing: bool, expected: float) -> None:
    assert due_at(state, SCHEDULE, in_flight, closing=closing) == expected


@pytest.mark.parametrize(
    ("quorum", "live", "expected"),
    [(1, 1, 1), (1, 5, 1), (2, 2, 1), (2, 5, 1), (4, 3, 2), (4, 5, 3), (9, 4, 3)],
)
def test_enough_others(quorum: int, live: int, expected: int) -> None:
    """``max(min(quorum, live) − 1, 1)``."""
    assert enough_others(quorum, live) == expected


def test_rounds_are_published_when_due_and_in_flight_bounds_them() -> None:
    bench = Bench(DiLoCo(sync_every=10, fragments=3, in_flight=2))
    bench.steps(30)
    assert bench.sent() == [(0, 3, 3, 12), (1, 6, 6, 24)]
    bench.arrive(0, 1.0, {"me": (3, 12)})
    bench.steps(1)
    # Overdue by far: the next goes out at once. Fragment 2 was never aligned with.
    assert bench.sent() == [(2, 31, 31, 124)]
    bench.arrive(1, 1.0, {"me": (6, 24)})
    bench.steps(3)
    assert bench.sent() == [(3, 34, 3, 12)]


def test_a_snapshot_is_a_copy_of_its_moment_and_names_its_anchor() -> None:
    bench = Bench(DiLoCo(sync_every=2, fragments=1, in_flight=1))
    bench.steps(2)
    (outgoing,) = bench.handoff.outbox
    outgoing.ready()
    assert outgoing.anchor.number == 0
    assert outgoing.rounds_seen == -1
    assert not outgoing.final
    before = values(bench.model)
    with torch.no_grad():
        for parameter in bench.model.parameters():
            parameter.zero_()
    for name, array in outgoing.blank.arrays.items():
        assert torch.equal(array, before[name])


@pytest.mark.parametrize("mixing", [0.0, 0.25, 0.5, 0.9])
def test_aligning_mixes_and_restarts_the_counters(mixing: float) -> None:
    algorithm = DiLoCo(sync_every=10, fragments=1, in_flight=1, mixing=mixing)
    bench = Bench(algorithm)
    bench.steps(10)
    assert bench.sent() == [(0, 10, 10, 40)]
    bench.steps(2)
    old = values(bench.model)
    bench.arrive(0, 2.0, {"me": (10, 40), "other": (9, 36)})
    bench.steps(1)
    for name, value in values(bench.model).items():
        expected = mixing * old[name] + (1 - mixing) * 2.0
        torch.testing.assert_close(value, expected)
    assert bench.learner.rounds_seen == 0
    left = 13 - 10
    kept = math.floor(mixing * left)
    kept_tokens = math.floor(mixing * (52 - 40))
    bench.steps(10)
    assert bench.sent() == [(1, 20, 7 + kept, 28 + kept_tokens)]
    (event,) = [e for e in bench.handoff.events if isinstance(e, Aligned)]
    assert (event.round, event.version, event.steps_replaced) == (0, 1, left)


def test_counts_that_a_commit_does_not_hold_are_kept_by_mixing_alone() -> None:
    """Not among the participants: taken is 0."""
    bench = Bench(DiLoCo(sync_every=10, fragments=1, in_flight=1, mixing=0.5))
    bench.steps(6)
    bench.arrive(0, 2.0, {"other": (9, 36)})
    bench.steps(1)
    bench.steps(10)
    # ⌊0.5·7⌋ and ⌊0.5·28⌋ remain.
    assert bench.sent() == [(1, 10, 3 + 3, 14 + 12)]


def test_a_round_about_to_close_is_published_early() -> None:
    bench = Bench(DiLoCo(sync_every=100, fragments=2, in_flight=2, quorum_size=3))
    bench.handoff.live = 3
    bench.now = 1.0
    for _ in range(5):
        bench.now += 1.0
        bench.steps(1)
    assert bench.sent() == []
    assert bench.handoff.waits_for == 0  # due in 45 s, others may be quicker
    bench.handoff.others = (0, 1)
    bench.handoff.tell()
    bench.steps(1)
    assert bench.sent() == []
    bench.handoff.others = (0, 2)
    bench.handoff.tell()
    bench.steps(1)
    assert bench.sent() == [(0, 7, 7, 28)]
    # Of another round they say nothing.
    bench.handoff.others = (0, 2)
    bench.handoff.tell()
    bench.steps(1)
    assert bench.sent() == []


def test_step_seconds_is_an_average_of_the_time_between_steps() -> None:
    bench = Bench(DiLoCo(sync_every=4, fragments=1, in_flight=1), [10.0, 12.0, 13.0, 17.0])
    bench.steps(4)
    (outgoing,) = bench.handoff.outbox
    assert outgoing.step_seconds == pytest.approx((2.0 * 0.9 + 0.1 * 1.0) * 0.9 + 0.1 * 4.0)


def test_a_failure_is_raised_by_every_step() -> None:
    bench = Bench(DiLoCo(sync_every=4, fragments=1, in_flight=1))
    error = RuntimeError("gone")
    bench.handoff.fail(error)
    bench.handoff.fail(RuntimeError("later"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            bench.steps(1)


def test_a_repair_puts_every_sick_fragment_back_at_once() -> None:
    bench = Bench(DiLoCo(sync_every=10, fragments=2, in_flight=2))
    bench.steps(6)
    assert [row[0] for row in bench.sent()] == [0]
    names = [[spec.name for spec in fragment.specs] for fragment in bench.fragments]
    own: dict[str, Any] = dict(bench.model.named_parameters())
    with torch.no_grad():
        own[names[0][0]].view(-1)[0] = math.nan
        own[names[1][0]].view(-1)[0] = math.inf
    bench.handoff.repairs.append((0, (names[0][0],)))
    bench.handoff.tell()
    bench.steps(1)
    for value in values(bench.model).values():
        assert torch.equal(value, torch.zeros_like(value))  # the anchors
    assert not bench.handoff.repairs
    # Round 0 is still open: it goes out again with the steps since the repair, which lasted until
    # now: that very step counts from the next.
    bench.steps(3)
    sent = bench.sent()
    assert sent[0][0] == 0
    assert sent[0][2] <= 3


def test_every_round_that_is_asked_for_again_is_published_again() -> None:
    """Of two that are asked for between two steps, the earlier one last."""
    bench = Bench(DiLoCo(sync_every=6, fragments=3, in_flight=3))
    bench.steps(6)
    assert [row[0] for row in bench.sent()] == [0, 1, 2]
    for number in (1, 0):
        bench.handoff.repairs.append((number, ()))
    bench.handoff.tell()
    bench.steps(6)
    assert [row[0] for row in bench.sent()] == [0, 1, 2]


def test_leaving_with_nothing_in_flight_is_immediate() -> None:
    bench = Bench(DiLoCo(sync_every=10, fragments=2, in_flight=2))
    bench.steps(3)
    assert bench.learner.in_flight() == ()
    assert bench.learner.leave(lambda: 0.0) == ()
    bench.steps(2)
    assert bench.learner.in_flight() == (0,)
    assert bench.learner.leave(lambda: 0.0) == (0,)
    bench.learner.settle()
    for value in values(bench.model).values():
        assert torch.equal(value, torch.zeros_like(value))


def test_the_loop_knows_when_a_round_is_due() -> None:
    """Which is next, and in how many seconds as steps come; none while it needs a commit."""
    bench = Bench(DiLoCo(sync_every=20, fragments=2, in_flight=1))
    for _ in range(2):
        bench.now += 0.5
        bench.steps(1)
    assert (bench.handoff.waits_for, bench.handoff.due_seconds) == (0, 8 * 0.5)
    for _ in range(8):
        bench.now += 0.5
        bench.steps(1)
    assert [row[0] for row in bench.sent()] == [0]
    assert bench.handoff.waits_for is None


@pytest.mark.parametrize("due", [0.2, 0.9, 5.0])
def test_others_snapshots_are_looked_for_when_the_own_is_late(due: float) -> None:
    """Steps may become slow after it was told when the round is due."""
    turn = Turn(1.0)
    assert turn.pause(None, 0.0, 10.0) == LONGEST_PAUSE_SECONDS
    assert turn.pause(3, due, 20.0) == (0.0 if due > 1.0 else 1.0)
    assert turn.pause(3, due, 20.75) == (0.0 if due > 1.0 else 0.25)
    assert turn.pause(3, due, 21.0 - 1e-9) == 0.0  # what a clock rounds away is not waited for
    assert turn.pause(3, due, 21.0) == 0.0
    assert turn.pause(3, due, 99.0) == 0.0
    assert turn.pause(4, 0.2, 99.0) == 1.0
