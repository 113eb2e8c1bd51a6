"""The goodput simulation against what can be computed by hand."""

import math
from random import Random
from typing import Any

import pytest
from benchmarks.goodput_world import Case, Result, failures, simulate

import gradientmail as gm


def case(**changes: Any) -> Case:
    """Two learners for 20 minutes, with ``changes``."""
    usual: dict[str, Any] = {
        "learners": 2,
        "algorithm": gm.DiLoCo(sync_every=24, fragments=4, merge=gm.WeightedMean()),
        "step_seconds": 2.0,
        "between_failures": math.inf,
        "down_seconds": 30.0,
        "keeps_state": True,
        "duration": 720.0,
        "latency_seconds": 0.0,
    }
    return Case(**(usual | changes))


def test_without_failures_every_step_is_taken_and_what_is_overwritten_is_all_that_is_lost() -> None:
    result = simulate(case())
    assert result.trained == pytest.approx(1, abs=0.01)
    assert result.round_seconds == pytest.approx(12, rel=0.05)
    # Of the steps between two exchanges of a fragment a commit takes all but those after its copy.
    assert result.merged == pytest.approx(1 - result.stale_steps / 24, abs=0.06)


@pytest.mark.parametrize("between", [120.0, 480.0])
def test_failures_cost_what_renewal_theory_says(between: float) -> None:
    """Up for ``between`` on average, down for 30 s, half a step lost each time."""
    result = simulate(case(between_failures=between, duration=1440.0))
    expected = (between - 1.0) / (between + 30)
    assert result.trained == pytest.approx(expected, abs=0.07)
    assert result.tally.joins == 2, "whoever keeps its state does not join again"


def test_a_learner_that_loses_its_state_joins_again_and_less_is_merged() -> None:
    kept, lost = (
        simulate(case(between_failures=200.0, keeps_state=keeps)) for keeps in (True, False)
    )
    assert lost.tally.joins > 2
    assert 0.0 < lost.merged < kept.merged


def sent_by_a_commit(result: Result) -> float:
    return result.tally.sent / len(result.records)


def test_payloads_weigh_what_the_real_ones_would() -> None:
    """One learner: its delta, theta and momentum with master, at BF16 and F32; a quarter each."""
    result = simulate(case(learners=1, parameters=4e6))
    init = 4e6 * 2 / len(result.records)
    assert sent_by_a_commit(result) == pytest.approx(1e6 * (2 + 2 + 8) + init, rel=0.03)


def test_a_link_carries_one_payload_after_the_other() -> None:
    """A round cannot close before its closer has sent what it makes: 12 bytes a parameter."""
    slow = case(learners=1, parameters=4e6, bytes_per_second=1e6 / 2, cpu_bytes_per_second=1e15)
    assert simulate(slow).round_seconds >= 1e6 * 12 / 5e5 * 0.95


def test_failures_come_at_their_rate_however_short_the_run() -> None:
    gaps = failures(case(learners=8, between_failures=300.0), Random(1))
    assert len(gaps) == 8
    flat = [gap for row in gaps for gap in row]
    assert sum(flat) / len(flat) == pytest.approx(300, rel=0.02)
    assert failures(case(), Random(1)) == [[], []]
