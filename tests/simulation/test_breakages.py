"""Every deliberate breakage of the protocol is told by the invariant that it breaks."""

import pytest
from tests.simulation.breakages import BREAKAGES, Breakage

from gradientmail.testing.plans import Plan
from gradientmail.testing.recording import WITNESSED
from gradientmail.testing.schedules import simulate


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda one: one.name.replace(" ", "-"))
def test_a_breakage_is_told(breakage: Breakage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert breakage.told_by in WITNESSED
    breakage.patch(monkeypatch)
    told = {violation.invariant for violation in simulate(breakage.plan).violations}
    assert breakage.told_by in told


PLANS = list(dict.fromkeys(one.plan for one in BREAKAGES))


@pytest.mark.parametrize("plan", PLANS, ids=[str(number) for number in range(len(PLANS))])
def test_unbroken_it_holds_under_the_same_plans(plan: Plan) -> None:
    assert simulate(plan).violations == ()
