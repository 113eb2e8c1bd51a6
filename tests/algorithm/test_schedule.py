"""The schedule: whole numbers, checked over many shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientmail.algorithm.schedule import Schedule

schedules = st.integers(1, 40).flatmap(
    lambda fragments: st.builds(Schedule, st.integers(fragments, 500), st.just(fragments))
)
rounds = st.integers(0, 10**10)


def test_a_schedule_by_hand() -> None:
    schedule = Schedule(sync_every=10, fragments=3)
    assert [schedule.fragment(r) for r in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [schedule.version(r) for r in range(7)] == [1, 1, 1, 2, 2, 2, 3]
    assert [schedule.due_step(r) for r in range(7)] == [3, 6, 10, 13, 16, 20, 23]
    assert [schedule.gap(r) for r in range(7)] == [3, 3, 4, 3, 3, 4, 3]


def test_one_fragment_is_standard_diloco() -> None:
    schedule = Schedule(sync_every=500, fragments=1)
    assert [schedule.due_step(r) for r in range(3)] == [500, 1000, 1500]
    assert [schedule.gap(r) for r in range(3)] == [500, 500, 500]


@given(schedules, rounds)
def test_gaps_of_any_turn_sum_to_sync_every(schedule: Schedule, start: int) -> None:
    turn = range(start, start + schedule.fragments)
    assert sum(schedule.gap(r) for r in turn) == schedule.sync_every
    assert sorted(schedule.fragment(r) for r in turn) == list(range(schedule.fragments))


@given(schedules, rounds)
def test_gaps_are_even_and_at_least_one(schedule: Schedule, round_: int) -> None:
    least = schedule.sync_every // schedule.fragments
    assert least <= schedule.gap(round_) <= least + 1
    assert schedule.gap(round_) >= 1


@given(schedules, st.integers(0, 300))
def test_due_step_is_the_sum_of_the_gaps(schedule: Schedule, round_: int) -> None:
    assert schedule.due_step(round_) == sum(schedule.gap(r) for r in range(round_ + 1))


@given(schedules, rounds)
def test_a_fragment_gains_a_version_every_turn(schedule: Schedule, round_: int) -> None:
    later = round_ + schedule.fragments
    assert schedule.fragment(later) == schedule.fragment(round_)
    assert schedule.version(later) == schedule.version(round_) + 1
    assert schedule.due_step(later) == schedule.due_step(round_) + schedule.sync_every


@pytest.mark.parametrize(("sync_every", "fragments"), [(3, 4), (3, 0), (0, 0), (2, -1)])
def test_bad_sizes(sync_every: int, fragments: int) -> None:
    with pytest.raises(ValueError, match=f"fragments={fragments}"):
        Schedule(sync_every, fragments)
