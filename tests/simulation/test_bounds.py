"""What is left in the store is bounded, and what the page on guarantees names exists."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gradientmail.exchange.lease_book import kept_seconds
from gradientmail.testing.plans import ALGORITHMS, Fault, NodePlan, Plan, long_plan
from gradientmail.testing.recording import WITNESSED
from gradientmail.testing.schedules import simulate

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"


@pytest.mark.parametrize("crashes", [4, 16])
def test_objects_are_bounded_however_often_closers_die(crashes: int) -> None:
    """Three nodes die by turns, mostly between a commit and the end of its sweep."""
    faults = tuple(Fault(5.0 + 5.3 * n, "crash", n % 3, 2.0) for n in range(crashes))
    nodes = tuple(NodePlan(f"n{n}", step_seconds=0.5) for n in range(3))
    plan = Plan(ALGORITHMS[0], nodes, faults, seconds=100.0)
    outcome = simulate(replace(plan, seed=crashes))
    assert outcome.violations == ()
    fragments, learners = 2, len(nodes) + 1
    # Payloads of 2·P rounds and of the one that commits; three open rounds and the last one's
    # snapshots; claims; two beats a learner; manifest, its claims and first parameters.
    bound = 2 * (2 * fragments + 2) + 2 * learners * 4 + 12 + 2 * learners + 2 + fragments
    assert outcome.most_objects - outcome.rounds <= bound


def test_leases_are_bounded_however_many_learners_die() -> None:
    """Every four minutes one with an id of its own comes, and is killed soon after."""
    died, kept = 36, kept_seconds(120.0)
    settled = (NodePlan("n0", step_seconds=60.0), NodePlan("n1", step_seconds=60.0))
    passing = tuple(NodePlan(f"p{n}", 240.0 * n, step_seconds=60.0) for n in range(died))
    faults = tuple(Fault(240.0 * n + 80.0, "crash", n + 2, again=False) for n in range(died))
    plan = Plan(
        ALGORITHMS[0],
        (*settled, *passing),
        faults,
        seconds=240.0 * died,
        poll_interval=10.0,
        lease_every=60.0,
        lease_timeout=120.0,
    )
    outcome = simulate(plan)
    assert outcome.violations == ()
    # Those who died while their leases are kept, noticed by listings 90 s and a round apart, and
    # swept with the next commit; two beats of each who lives.
    bound = (kept + 90.0 + 3 * 120.0) // 240.0 + 1 + 2 * 3
    assert outcome.most_beats <= bound < died


@pytest.mark.parametrize("seed", [0, 3])
def test_who_wakes_when_its_lease_is_swept_does_no_harm(seed: int) -> None:
    """Hours in which learners with ids of their own die, and one sleeps for more than an hour."""
    assert simulate(long_plan(seed)).violations == ()


def test_the_page_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text("utf-8"))
    assert len(named) >= 12
    for path, test in named:
        text = (ROOT / path).read_text("utf-8")
        assert f"def {test}(" in text or not test, f"{path}::{test}"


def test_the_page_has_every_invariant() -> None:
    page = PAGE.read_text("utf-8")
    assert [name for name in WITNESSED if f"`{name}`" not in page] == []
