"""The outer step against its formula in float64, for every kind of parameter and commit."""

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from tests.algorithm.tensors import arrays, blank, take
from tests.backend.arrays import Placed, assert_near, put

from gradientmail.algorithm import outer_parts
from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.outer import (
    FragmentState,
    OuterStep,
    Transition,
    apply_update,
    outer_steps,
)
from gradientmail.algorithm.precision import LARGEST, outer_specs, update_specs
from gradientmail.backend.base import Backend, Combination
from gradientmail.schema import TensorSpec

type Deltas = dict[str, Combination]

SHAPES = {"b": (), "e": (0,), "w": (7, 9)}
TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LR, BETA = 0.7, 0.9
commits = pytest.mark.parametrize("commit_dtype", [None, "F32", "F16", "BF16", "F8_E4M3", "F4"])
parameters = pytest.mark.parametrize("dtype", TORCH)
finals = pytest.mark.parametrize("final", [False, True], ids=["step", "final"])


def specs_of(dtype: str) -> list[TensorSpec]:
    return [TensorSpec(name, dtype, shape) for name, shape in SHAPES.items()]


def draw(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) * scale for name, shape in SHAPES.items()}


@dataclass(frozen=True)
class State:
    """A fragment's state in arrays of a backend, by name."""

    theta: Mapping[str, Placed]
    outer: Mapping[str, Placed]

    def momentum(self, name: str) -> Placed:
        return self.outer[f"momentum.{name}"]

    def master(self, name: str) -> Placed:
        return self.outer.get(f"master.{name}", self.theta[name])

    def given(self) -> FragmentState:
        return FragmentState(arrays(self.theta), arrays(self.outer))


def terms(backend: Backend, scale: float, tensors: Mapping[str, torch.Tensor]) -> Deltas:
    """A delta of one term."""
    return {name: ((scale, put(backend, x).array),) for name, x in tensors.items()}


def step(
    backend: Backend,
    specs: list[TensorSpec],
    old: State,
    deltas: Mapping[str, Combination],
    commit_dtype: str | None,
    *,
    final: bool = False,
) -> tuple[State, dict[str, Placed]]:
    outer = blank(backend, outer_specs(specs, commit_dtype=commit_dtype))
    new = State(blank(backend, specs), outer)
    update = blank(backend, update_specs(specs, commit_dtype))
    change = Transition(old.given(), deltas, new.given(), arrays(update), final)
    OuterStep(LR, BETA, commit_dtype)(backend, specs, change, take)
    return new, update


def theta_zero(backend: Backend, specs: list[TensorSpec], seed: int = 1) -> State:
    drawn = draw(seed)
    theta = {s.name: put(backend, drawn[s.name].to(TORCH[s.dtype])) for s in specs}
    return State(theta, {})


@commits
@parameters
@finals
def test_parts_of_a_step_write_what_the_whole_one_does(
    monkeypatch: pytest.MonkeyPatch,
    backend: Backend,
    dtype: str,
    commit_dtype: str | None,
    final: bool,
) -> None:
    """Tensors larger than a part in ranges, small ones together; and each tells what it wrote."""
    monkeypatch.setattr(outer_parts, "PART", 10)
    specs, averaged = specs_of(dtype), {"b"}
    algorithm = DiLoCo(
        sync_every=1, fragments=1, in_flight=1, outer_lr=LR, commit_dtype=commit_dtype
    )
    old, _ = step(
        backend, specs, theta_zero(backend, specs), terms(backend, 1.0, draw(2)), commit_dtype
    )
    deltas: Deltas = {
        name: ((0.5, put(backend, x).array), (2.0, put(backend, x.exp()).array))
        for name, x in draw(3).items()
    }
    whole, parted = (
        {
            "theta": blank(backend, specs),
            "outer": blank(backend, outer_specs(specs, commit_dtype=commit_dtype)),
            "update": blank(backend, update_specs(specs, commit_dtype)),
        }
        for _ in range(2)
    )
    for outer, those in outer_steps(algorithm, specs, averaged):
        new = FragmentState(arrays(whole["theta"]), arrays(whole["outer"]))
        change = Transition(old.given(), deltas, new, arrays(whole["update"]), final)
        outer(backend, those, change, take)
    new = FragmentState(arrays(parted["theta"]), arrays(parted["outer"]))
    change = Transition(old.given(), deltas, new, arrays(parted["update"]), final)
    parts = outer_parts.OuterParts(algorithm, averaged, backend, specs, change, take)
    written: dict[str, dict[str, int]] = {name: {} for name in whole}
    for part in (*parts.moves, *parts.follows):
        assert part.write() == ()
        for payload, counts in part.written.items():
            assert all(written[payload].get(name, -1) < count for name, count in counts.items())
            written[payload] |= counts
    counted = {
        "theta": specs,
        "outer": outer_specs(specs, commit_dtype=commit_dtype),
        "update": update_specs(specs, commit_dtype),
    }
    for payload, own in counted.items():
        assert written[payload] == {spec.name: spec.count for spec in own}
        for spec in own:
            assert parted[payload][spec.name].bytes() == whole[payload][spec.name].bytes()
    assert len(parts.moves) == 2 + 7, "e; w in ranges of 10; b, which is averaged"


def test_contributions_are_let_go_when_all_has_moved(backend: Backend) -> None:
    specs = [TensorSpec("w", "F32", (64,))]
    blanks = [
        blank(backend, specs),
        blank(backend, outer_specs(specs, commit_dtype="F4")),
        blank(backend, update_specs(specs, "F4")),
    ]
    theta, outer, update = (arrays(one) for one in blanks)
    deltas = terms(backend, 1.0, {"w": torch.ones(64)})
    contribution = weakref.ref(deltas["w"][0][1])
    old = State({"w": put(backend, torch.ones(64))}, {}).given()
    parts = outer_parts.OuterParts(
        DiLoCo(sync_every=1, fragments=1, in_flight=1, commit_dtype="F4"),
        (),
        backend,
        specs,
        Transition(old, deltas, FragmentState(theta, outer), update, final=False),
        take,
    )
    del deltas
    assert contribution() is not None
    while parts.moves:
        assert parts.moves.popleft().write() == ()
    assert contribution() is None
    assert len(parts.follows) == 1


@pytest.mark.parametrize("commit_dtype", [None, "F16", "F4"])
def test_what_one_range_drives_beyond_is_held_in_all(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, commit_dtype: str | None
) -> None:
    monkeypatch.setattr(outer_parts, "PART", 2)
    specs = [TensorSpec("w", "F32", (8,))]
    start, push = torch.ones(8), torch.zeros(8)
    start[5], push[5] = LARGEST["F32"], -LARGEST["F32"]
    algorithm = DiLoCo(
        sync_every=1, fragments=1, in_flight=1, outer_lr=1.0, commit_dtype=commit_dtype
    )
    outer = blank(backend, outer_specs(specs, commit_dtype=commit_dtype))
    new = State(blank(backend, specs), outer)
    change = Transition(
        State({"w": put(backend, start)}, {}).given(),
        terms(backend, 1.0, {"w": push}),
        new.given(),
        arrays(blank(backend, update_specs(specs, commit_dtype))),
        final=False,
    )
    parts = outer_parts.OuterParts(algorithm, (), backend, specs, change, take)
    named = []
    for part in (*parts.moves, *parts.follows):
        named.append(part.write())
        parts.beyond.update(named[-1])
    assert named == [(), (), ("w",), ()] + [("w",)] * (commit_dtype is not None)
    assert new.master("w").tensor().tolist() == start.tolist()
    assert new.theta["w"].tensor().tolist() == start.tolist()


@commits
@parameters
@finals
def test_momentum_and_master_follow_the_formula(
    backend: Backend, dtype: str, commit_dtype: str | None, final: bool
) -> None:
    specs, state = specs_of(dtype), theta_zero(backend, specs_of(dtype))
    master = {name: x.tensor().double() for name, x in state.theta.items()}
    momentum = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    for turn in range(4):
        x, y = draw(10 + turn), draw(20 + turn)
        deltas: Deltas = {
            n: ((0.5, put(backend, x[n]).array), (0.25, put(backend, y[n]).array)) for n in SHAPES
        }
        last = final and turn == 3
        state, _ = step(backend, specs, state, deltas, commit_dtype, final=last)
        for name in SHAPES:
            delta = 0.5 * x[name].double() + 0.25 * y[name].double()
            if last:
                master[name] = master[name] - delta
            else:
                momentum[name] = BETA * momentum[name] + delta
                master[name] = master[name] - LR * (delta + BETA * momentum[name])
            assert_near(state.momentum(name).tensor(), momentum[name], rtol=1e-6, atol=1e-6)
            assert_near(state.master(name).tensor(), master[name], rtol=1e-6, atol=1e-6)


def test_final_step_keeps_the_momentum_bit_for_bit(backend: Backend) -> None:
    specs = specs_of("BF16")
    deltas = terms(backend, 1.0, draw(2))
    first, _ = step(backend, specs, theta_zero(backend, specs), deltas, None)
    last, _ = step(backend, specs, first, deltas, None, final=True)
    fresh, _ = step(backend, specs, theta_zero(backend, specs), deltas, None, final=True)
    for name, shape in SHAPES.items():
        assert last.momentum(name).bytes() == first.momentum(name).bytes()
        assert fresh.momentum(name).bytes() == put(backend, torch.zeros(shape)).bytes()


@parameters
def test_without_a_commit_dtype_theta_is_the_rounded_master(backend: Backend, dtype: str) -> None:
    specs = specs_of(dtype)
    deltas = terms(backend, 0.1, draw(3))
    new, update = step(backend, specs, theta_zero(backend, specs), deltas, None)
    assert update == {}
    assert ("master.w" in new.outer) == (dtype != "F32")
    for name, theta in new.theta.items():
        rounded = new.master(name).tensor().to(TORCH[dtype])
        assert theta.bytes() == put(backend, rounded).bytes()


@commits
@parameters
def test_holder_of_the_old_theta_rebuilds_the_new_one_exactly(
    backend: Backend, dtype: str, commit_dtype: str | None
) -> None:
    if commit_dtype is None:
        return
    specs = specs_of(dtype)
    state = theta_zero(backend, specs)
    for turn in range(3):
        deltas = terms(backend, 0.1, draw(30 + turn))
        new, update = step(backend, specs, state, deltas, commit_dtype)
        rebuilt = blank(backend, specs)
        old, out = arrays(state.theta), arrays(rebuilt)
        apply_update(backend, specs, old, arrays(update), commit_dtype, out, take)
        assert all(rebuilt[name].bytes() == theta.bytes() for name, theta in new.theta.items())
        state = new


@pytest.mark.parametrize("commit_dtype", ["F8_E4M3", "F4"])
def test_what_rounding_loses_stays_in_the_master(backend: Backend, commit_dtype: str) -> None:
    """Theta follows the master for good: its distance does not add up over the rounds."""
    specs = [TensorSpec("w", "F32", (64,))]
    state = State({"w": put(backend, torch.zeros(64))}, {})
    rng = torch.Generator().manual_seed(5)
    drift = torch.randn(64, generator=rng)
    for turn in range(60):
        noise = torch.randn(64, generator=rng)
        deltas = terms(backend, -1e-3, {"w": drift + noise})
        state, _ = step(backend, specs, state, deltas, commit_dtype)
        theta, master = state.theta["w"].tensor(), state.master("w").tensor()
        gap, moved = float((theta - master).abs().max()), float(master.abs().max())
        assert turn < 20 or gap <= 0.05 * moved


def test_no_term_is_no_change_but_the_momentum_carries_on(backend: Backend) -> None:
    specs = [TensorSpec("w", "F32", (5,))]
    ones, twos = torch.ones(5), torch.full((5,), 2.0)
    old = State({"w": put(backend, ones)}, {"momentum.w": put(backend, twos)})
    new, _ = step(backend, specs, old, {"w": ()}, None)
    assert_near(new.momentum("w").tensor(), torch.full((5,), 1.8), rtol=1e-6, atol=0.0)
    assert_near(
        new.theta["w"].tensor(), torch.full((5,), 1.0 - 0.7 * 0.9 * 1.8), rtol=1e-6, atol=1e-7
    )


def test_old_state_is_only_read(backend: Backend) -> None:
    specs = specs_of("BF16")
    deltas = terms(backend, 0.1, draw(6))
    first, _ = step(backend, specs, theta_zero(backend, specs), deltas, "F4")
    before = {n: x.bytes() for n, x in {**first.theta, **first.outer}.items()}
    for final in (False, True):
        step(backend, specs, first, deltas, "F4", final=final)
    for name, x in {**first.theta, **first.outer}.items():
        assert x.bytes() == before[name]


def test_a_coefficient_outside_fp32_is_right_when_the_product_is_inside(backend: Backend) -> None:
    specs = [TensorSpec("w", "F32", (4,))]
    old = State({"w": put(backend, torch.zeros(4))}, {})
    deltas = terms(backend, 1e41, {"w": torch.full((4,), 1e-38)})
    new, _ = step(backend, specs, old, deltas, None)
    momentum = new.momentum("w").tensor()
    expected = float(torch.tensor(1e-38)) * 1e41
    assert math.isclose(float(momentum[0]), expected, rel_tol=1e-6)


@commits
@parameters
@finals
def test_no_finite_contribution_drives_the_parameters_out_of_range(
    backend: Backend, dtype: str, commit_dtype: str | None, final: bool
) -> None:
    """Deltas at the end of fp32's range, round after round: held at the largest finite values."""
    specs, state = specs_of(dtype), theta_zero(backend, specs_of(dtype))
    for turn in range(5):
        sign = 1.0 if turn < 3 else -1.0
        huge = {name: torch.full(shape, sign * 3.3e38) for name, shape in SHAPES.items()}
        old = state
        deltas = terms(backend, 1.0, huge)
        state, update = step(backend, specs, state, deltas, commit_dtype, final=final)
        for name, placed in {**state.theta, **state.outer}.items():
            assert placed.tensor().isfinite().all(), name
        for name, placed in update.items():
            if placed.spec.dtype in TORCH:
                assert placed.tensor().isfinite().all(), name
        if turn == 0:
            for name in ("b", "w"):
                found, before = state.theta[name].tensor(), old.theta[name].tensor()
                assert (found.float() < before.float()).all()


def held(
    backend: Backend,
    specs: list[TensorSpec],
    old: State,
    deltas: Deltas,
    momentum: float,
) -> tuple[State, tuple[str, ...]]:
    """A step without an update, and the names of the parameters that were held in range."""
    outer = blank(backend, outer_specs(specs, commit_dtype=None))
    new = State(blank(backend, specs), outer)
    change = Transition(old.given(), deltas, new.given(), {}, final=False)
    names = OuterStep(LR, momentum, None)(backend, specs, change, take)
    return new, names


@parameters
def test_a_parameter_beyond_its_dtypes_range_is_held_there_and_its_master_goes_on(
    backend: Backend, dtype: str
) -> None:
    specs = [TensorSpec("w", dtype, (4,))]
    largest = LARGEST[dtype]
    start = torch.tensor([0.0, 1.0, 0.99 * largest, -0.99 * largest]).to(TORCH[dtype])
    push = torch.tensor([0.0, 0.5, -0.4 * largest, 0.4 * largest])
    old = State({"w": put(backend, start)}, {})
    new, names = held(backend, specs, old, terms(backend, 1.0, {"w": push}), 0.0)
    assert names == ("w",)
    found = new.theta["w"].tensor().double().tolist()
    assert found[0] == 0.0
    assert found[1] == pytest.approx(1.0 - LR * 0.5, rel=1e-2)
    assert found[2:] == [largest, -largest]
    if dtype == "F16":  # the master knows by how far it went too far
        master = new.master("w").tensor()[2].item()
        assert master == pytest.approx(0.99 * 65504 + LR * 0.4 * 65504, rel=1e-3)


@pytest.mark.parametrize("commit_dtype", ["F16", "F8_E4M3", "F4", "BF16"])
def test_an_update_too_large_for_its_format_arrives_in_parts(
    backend: Backend, commit_dtype: str
) -> None:
    """What does not fit stays in the master, as what rounding loses does."""
    specs = [TensorSpec("w", "F32", (4,))]
    state = State({"w": put(backend, torch.zeros(4))}, {})
    goal = torch.tensor([-1e6, 2e5, 1.0, 0.0])
    for turn in range(18):
        outer = blank(backend, outer_specs(specs, commit_dtype=commit_dtype))
        new = State(blank(backend, specs), outer)
        update = blank(backend, update_specs(specs, commit_dtype))
        deltas = terms(backend, 1.0, {"w": -goal}) if turn == 0 else {"w": ()}
        change = Transition(state.given(), deltas, new.given(), arrays(update), final=False)
        OuterStep(1.0, 0.0, commit_dtype)(backend, specs, change, take)
        for placed in (*new.theta.values(), *new.outer.values()):
            assert placed.tensor().isfinite().all()
        state = new
    assert_near(state.master("w").tensor(), goal, rtol=1e-6, atol=1e-6)
    assert_near(state.theta["w"].tensor(), goal, rtol=1e-3, atol=0.5)


def test_what_is_in_range_is_not_held(backend: Backend) -> None:
    specs = specs_of("BF16")
    old = theta_zero(backend, specs)
    _, names = held(backend, specs, old, terms(backend, 1.0, draw(3)), BETA)
    assert names == ()
