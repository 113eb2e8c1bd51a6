"""Every deliberate breakage of the protocol is told by the invariant that it breaks."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.simulation import breakages
from tests.simulation.breakages import Breakage
from tests.simulation.breakages_of_formats import FORMAT_BREAKAGES

from gradientmail.testing.plans import Plan
from gradientmail.testing.recording import WITNESSED
from gradientmail.testing.schedules import simulate

BREAKAGES = [*breakages.BREAKAGES, *FORMAT_BREAKAGES]
SEEDS = 12
"""Some breakages matter only where calls interleave in one way."""


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda one: one.name.replace(" ", "-"))
def test_a_breakage_is_told(
    breakage: Breakage, monkeypatch: pytest.MonkeyPatch, count: Callable[[str, int], None]
) -> None:
    assert breakage.told_by in WITNESSED
    breakage.patch(monkeypatch)
    told: set[str] = set()
    for seed in range(SEEDS):
        outcome = simulate(replace(breakage.plan, seed=seed))
        told |= {violation.invariant for violation in outcome.violations}
        if breakage.told_by in told:
            count("breakages told", 1)
            return
    pytest.fail(f"{breakage.told_by} does not tell in {SEEDS} seeds; told: {sorted(told)}")


PLANS = list(dict.fromkeys(one.plan for one in BREAKAGES))


@pytest.mark.parametrize("plan", PLANS, ids=[str(number) for number in range(len(PLANS))])
def test_unbroken_it_holds_under_the_same_plans(plan: Plan) -> None:
    assert simulate(plan).violations == ()


def test_every_invariant_tells_of_a_breakage() -> None:
    assert WITNESSED.keys() == {one.told_by for one in BREAKAGES}
