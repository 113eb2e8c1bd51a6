"""Random and exhaustive schedules of faults: every invariant holds, and a seed repeats itself."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradientmail.algorithm import outer_parts
from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.backend.base import Array
from gradientmail.errors import MissingExtra
from gradientmail.testing.plans import (
    ALGORITHMS,
    FAULT_KINDS,
    PLAIN,
    STRIKES,
    WORK_STRIKES,
    Fault,
    Formats,
    How,
    NodePlan,
    Plan,
    Strike,
    faulty_plan,
    random_plan,
    with_random_formats,
)
from gradientmail.testing.schedules import main, simulate
from gradientmail.testing.simulated import Connection
from gradientmail.testing.vector import VectorBackend
from gradientmail.verification import Violation

SHORT = Plan(
    DiLoCo(sync_every=2, fragments=2),
    (NodePlan("n0", step_seconds=0.5), NodePlan("n1", joins_at=0.2, step_seconds=0.5)),
    seconds=4.0,
    lease_every=1.0,
    lease_timeout=4.0,
)
"""Creates a run, closes some rounds, sweeps them."""
PACKED = replace(
    SHORT,
    algorithm=replace(SHORT.algorithm, delta_dtype="F4", commit_dtype="F8_E4M3"),
    formats=Formats(("BF16", "F32"), compressed=(True, False), buffers=True),
)
"""The same, and more that can go wrong with a payload."""
CALLS = 60
"""The calls of each node that single faults strike: creation, join, and several rounds."""

WORK = 50
"""The same of work beside the loop, once it has joined."""


@pytest.fixture
def wanted(request: pytest.FixtureRequest) -> int:
    """How many random schedules to run."""
    return int(request.config.getoption("--schedules"))


def test_random_schedules(wanted: int, count: Callable[[str, int], None]) -> None:
    """A share of the 10,000; the whole of it: ``--schedules 10000``."""
    said: list[str] = []
    failed = main(["--count", str(wanted)], said.append)
    print(*said)
    assert failed == 0, "\n".join(said)
    count("random schedules", wanted)


short_plans = pytest.mark.parametrize("plan", [SHORT, PACKED], ids=["plain", "packed"])


def violations_of_strikes(
    plan: Plan, node: int, how: How, numbers: Iterable[int]
) -> dict[int, tuple[Violation, ...]]:
    """What a short run violates when one call of a node goes wrong, by that call's number."""
    found = {
        number: simulate(replace(plan, strikes=(Strike(node, number, how),))).violations
        for number in numbers
    }
    return {number: violations for number, violations in found.items() if violations}


@pytest.mark.parametrize("how", STRIKES)
@pytest.mark.parametrize("node", [0, 1])
@short_plans
def test_every_single_fault_of_a_short_run(
    wanted: int, plan: Plan, node: int, how: How, count: Callable[[str, int], None]
) -> None:
    """Each call of each node: lost before or after it acts, a crash, a node that wakes up late.

    Without ``--schedules`` a twentieth of them, other ones for each kind of fault.
    """
    stride = 20 if wanted < 1000 else 1
    first = 2 * STRIKES.index(how) + node + 10 * (plan is PACKED)
    numbers = range(1 + first % stride, CALLS + 1, stride)
    assert violations_of_strikes(plan, node, how, numbers) == {}
    count("single faults", len(numbers))


@pytest.mark.parametrize("how", WORK_STRIKES)
@pytest.mark.parametrize("node", [0, 1])
@short_plans
def test_work_that_fails_once_makes_no_wrong_delta_and_no_wrong_commit(
    wanted: int, plan: Plan, node: int, how: How, count: Callable[[str, int], None]
) -> None:
    """What a node gives to other threads, before or after it is done: memory runs out, say."""
    stride = 8 if wanted < 1000 else 1
    first = 2 * WORK_STRIKES.index(how) + node + 4 * (plan is PACKED)
    numbers = range(1 + first % stride, WORK + 1, stride)
    assert violations_of_strikes(plan, node, how, numbers) == {}
    count("single faults of work", len(numbers))


@short_plans
def test_the_short_run_has_the_calls_that_single_faults_strike(plan: Plan) -> None:
    outcome = simulate(plan)
    assert outcome.violations == ()
    assert min(outcome.calls[:2]) > CALLS
    assert min(outcome.work[:2]) > WORK


@pytest.mark.parametrize("commit_dtype", [None, "F32", "F4"])
@pytest.mark.parametrize("formats", [PLAIN, PACKED.formats], ids=["plain", "packed"])
def test_tensors_that_are_stepped_in_ranges(
    monkeypatch: pytest.MonkeyPatch, commit_dtype: str | None, formats: Formats
) -> None:
    """As large ones are; all of these are too small for that."""
    monkeypatch.setattr(outer_parts, "PART", 1)
    whole, cut = VectorBackend.part, list[int]()

    def part(self: VectorBackend, array: Array, start: int, stop: int) -> Array:
        cut.append(stop - start)
        return whole(self, array, start, stop)

    monkeypatch.setattr(VectorBackend, "part", part)
    algorithm = replace(SHORT.algorithm, commit_dtype=commit_dtype)
    outcome = simulate(replace(SHORT, algorithm=algorithm, formats=formats))
    assert outcome.violations == ()
    assert outcome.rounds > 2
    assert set(cut) == {1}


faults = st.builds(
    Fault,
    at_seconds=st.floats(0.0, 40.0),
    kind=st.sampled_from(FAULT_KINDS),
    node=st.integers(0, 1),
    seconds=st.sampled_from([0.1, 3.0, 12.0, 30.0]),
    again=st.booleans(),
)
strikes = st.builds(
    Strike, node=st.integers(0, 1), number=st.integers(1, 150), how=st.sampled_from(STRIKES)
)


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    link=st.builds(Connection, st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 0.5])),
    rates=st.tuples(st.sampled_from([0.8, 1.0, 1.25]), st.sampled_from([0.8, 1.0, 1.25])),
    faults=st.lists(faults, max_size=5),
    strikes=st.lists(strikes, max_size=4),
    seed=st.integers(0, 1000),
    formats=st.one_of(st.none(), st.integers(0, 1000)),
)
def test_schedules_that_shrink(
    algorithm: DiLoCo,
    link: Connection,
    rates: tuple[float, float],
    faults: list[Fault],
    strikes: list[Strike],
    seed: int,
    formats: int | None,
) -> None:
    nodes = tuple(
        NodePlan(f"n{number}", clock_rate=rate, connection=link)
        for number, rate in enumerate(rates)
    )
    plan = Plan(algorithm, nodes, tuple(faults), tuple(strikes), seconds=40.0, seed=seed)
    plan = plan if formats is None else with_random_formats(plan, formats)
    assert simulate(plan).violations == ()


def test_half_of_the_plans_have_other_formats_and_the_same_faults() -> None:
    plans = [(faulty_plan(seed), random_plan(seed)) for seed in range(300)]
    assert 120 < sum(plain == other for plain, other in plans) < 180
    for plain, other in plans:
        kept = replace(
            other.algorithm,
            delta_dtype=plain.algorithm.delta_dtype,
            commit_dtype=plain.algorithm.commit_dtype,
        )
        assert replace(other, formats=PLAIN, algorithm=kept) == plain
    changed = [other for _, other in plans]
    for dtypes in (
        Counter(plan.algorithm.delta_dtype for plan in changed),
        Counter(plan.algorithm.commit_dtype for plan in changed),
    ):
        assert dtypes.keys() == {None, "F32", "F16", "BF16", "F8_E4M3", "F4"}
        assert min(dtypes.values()) > 5
    assert {name for plan in changed for name in plan.formats.parameters} == {"F32", "F16", "BF16"}
    assert sum(any(plan.formats.compressed) for plan in changed) > 60
    assert sum(plan.formats.buffers for plan in changed) > 40


def test_the_same_seed_gives_the_same_history() -> None:
    """In this process again, and in another one, whose strings hash otherwise."""
    seed = 3
    code = (
        "from gradientmail.testing.plans import random_plan\n"
        "from gradientmail.testing.schedules import simulate\n"
        f"print(simulate(random_plan({seed})).history)"
    )
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    first, second = simulate(random_plan(seed)), simulate(random_plan(seed))
    assert first == second
    assert first.history == other
    assert simulate(random_plan(seed + 1)).history != first.history


def test_a_failing_seed_is_one_line_to_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradientmail.exchange.lease import Lease

    async def remove(self: Lease, numbers: object) -> None:
        del self, numbers

    monkeypatch.setattr(Lease, "_remove", remove)
    said: list[str] = []
    assert main(["--first", "5", "--count", "1"], said.append) == 1
    assert said[0].startswith("python -m gradientmail.testing.schedules --first 5 --count 1  # ")
    assert "1 schedules failed" in said[-1]


def test_without_zstandard_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtra, match=r"gradientmail\[zstd\]"):
        main(["--count", "1"])


@pytest.mark.parametrize(
    "seed", [2099, 20060, 30036, 30506, 51024, 51234, 52345, 103117, 109055, 304753, 308786, 408719]
)
def test_seeds_that_failed_once(seed: int) -> None:
    """30036: two closers made the same bytes of different snapshots, and one told of its own.

    408719: a process that was cut off outlived one that left cleanly, and ended the one after it.

    Of the checker itself: 51024 and 51234, a node alone whose parameters stop being finite trains
    for its round again; 52345, a process that leaves has no parameters to spoil; 103117 and 109055,
    where calls fail three beats in a row may be late, and a role be lost, though nobody died;
    304753 and 308786, objects take their time over a slow link, a vandal's ten kilobytes above all.
    """
    assert simulate(faulty_plan(seed)).violations == ()
