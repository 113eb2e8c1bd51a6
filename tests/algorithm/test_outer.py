"""The outer step against its formula in float64, for every kind of parameter and commit."""

import math

import pytest
import torch
from tests.algorithm.tensors import BACKEND, blank, same_bytes, take
from tests.backend.arrays import assert_near

from gradientmail.algorithm.outer import FragmentState, OuterStep, apply_update
from gradientmail.algorithm.precision import LARGEST, outer_specs, theta_specs, update_specs
from gradientmail.backend.base import Combination
from gradientmail.schema import TensorSpec

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


def step(
    specs: list[TensorSpec],
    old: FragmentState,
    deltas: dict[str, Combination],
    commit_dtype: str | None,
    *,
    final: bool = False,
) -> tuple[FragmentState, dict[str, torch.Tensor]]:
    outer = blank(outer_specs(specs, commit_dtype=commit_dtype))
    new = FragmentState(blank(theta_specs(specs)), outer)
    update = blank(update_specs(specs, commit_dtype))
    optimizer = OuterStep(LR, BETA, commit_dtype)
    optimizer(BACKEND, specs, old, deltas, new=new, update=update, final=final, take=take)
    return new, update


def theta_zero(specs: list[TensorSpec], seed: int = 1) -> FragmentState:
    drawn = draw(seed)
    return FragmentState({s.name: drawn[s.name].to(TORCH[s.dtype]) for s in specs}, {})


@commits
@parameters
@finals
def test_momentum_and_master_follow_the_formula(
    dtype: str, commit_dtype: str | None, final: bool
) -> None:
    specs, state = specs_of(dtype), theta_zero(specs_of(dtype))
    master = {name: x.double() for name, x in state.theta.items()}
    momentum = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    for turn in range(4):
        x, y = draw(10 + turn), draw(20 + turn)
        deltas: dict[str, Combination] = {n: ((0.5, x[n]), (0.25, y[n])) for n in SHAPES}
        last = final and turn == 3
        state, _ = step(specs, state, deltas, commit_dtype, final=last)
        for name in SHAPES:
            delta = 0.5 * x[name].double() + 0.25 * y[name].double()
            if last:
                master[name] = master[name] - delta
            else:
                momentum[name] = BETA * momentum[name] + delta
                master[name] = master[name] - LR * (delta + BETA * momentum[name])
            found = state.momentum(name)
            assert found is not None
            assert_near(found.double(), momentum[name], rtol=1e-6, atol=1e-6)
            assert_near(state.master(name).double(), master[name], rtol=1e-6, atol=1e-6)


def test_final_step_keeps_the_momentum_bit_for_bit() -> None:
    specs = specs_of("BF16")
    deltas: dict[str, Combination] = {name: ((1.0, x),) for name, x in draw(2).items()}
    first, _ = step(specs, theta_zero(specs), deltas, None)
    last, _ = step(specs, first, deltas, None, final=True)
    fresh, _ = step(specs, theta_zero(specs), deltas, None, final=True)
    for name, shape in SHAPES.items():
        kept, before, none = last.momentum(name), first.momentum(name), fresh.momentum(name)
        assert kept is not None
        assert before is not None
        assert none is not None
        assert same_bytes(kept, before)
        assert same_bytes(none, torch.zeros(shape))


@parameters
def test_without_a_commit_dtype_theta_is_the_rounded_master(dtype: str) -> None:
    specs = specs_of(dtype)
    deltas: dict[str, Combination] = {name: ((0.1, x),) for name, x in draw(3).items()}
    new, update = step(specs, theta_zero(specs), deltas, None)
    assert update == {}
    assert ("master.w" in new.outer) == (dtype != "F32")
    for name, theta in new.theta.items():
        assert theta.dtype == TORCH[dtype]
        assert same_bytes(theta, new.master(name).to(TORCH[dtype]))
        if dtype == "F32":
            assert new.master(name) is theta


@commits
@parameters
def test_holder_of_the_old_theta_rebuilds_the_new_one_exactly(
    dtype: str, commit_dtype: str | None
) -> None:
    if commit_dtype is None:
        return
    specs = specs_of(dtype)
    state = theta_zero(specs)
    for turn in range(3):
        deltas: dict[str, Combination] = {n: ((0.1, x),) for n, x in draw(30 + turn).items()}
        new, update = step(specs, state, deltas, commit_dtype)
        rebuilt = blank(theta_specs(specs))
        apply_update(BACKEND, specs, state.theta, update, commit_dtype, rebuilt, take)
        assert all(same_bytes(rebuilt[name], theta) for name, theta in new.theta.items())
        state = new


@pytest.mark.parametrize("commit_dtype", ["F8_E4M3", "F4"])
def test_what_rounding_loses_stays_in_the_master(commit_dtype: str) -> None:
    """Theta follows the master for good: its distance does not add up over the rounds."""
    specs = [TensorSpec("w", "F32", (64,))]
    state = FragmentState({"w": torch.zeros(64)}, {})
    rng = torch.Generator().manual_seed(5)
    drift = torch.randn(64, generator=rng)
    for turn in range(60):
        noise = torch.randn(64, generator=rng)
        state, _ = step(specs, state, {"w": ((-1e-3, drift + noise),)}, commit_dtype)
        gap = float((state.theta["w"] - state.master("w")).abs().max())
        moved = float(state.master("w").abs().max())
        assert turn < 20 or gap <= 0.05 * moved


def test_no_term_is_no_change_but_the_momentum_carries_on() -> None:
    specs = [TensorSpec("w", "F32", (5,))]
    old = FragmentState({"w": torch.ones(5)}, {"momentum.w": torch.full((5,), 2.0)})
    new, _ = step(specs, old, {"w": ()}, None)
    momentum = new.momentum("w")
    assert momentum is not None
    assert_near(momentum, torch.full((5,), 1.8), rtol=1e-6, atol=0.0)
    assert_near(new.theta["w"], torch.full((5,), 1.0 - 0.7 * 0.9 * 1.8), rtol=1e-6, atol=1e-7)


def test_old_state_is_only_read() -> None:
    specs = specs_of("BF16")
    deltas: dict[str, Combination] = {name: ((0.1, x),) for name, x in draw(6).items()}
    first, _ = step(specs, theta_zero(specs), deltas, "F4")
    before = {n: x.clone() for n, x in {**first.theta, **first.outer}.items()}
    for final in (False, True):
        step(specs, first, deltas, "F4", final=final)
    for name, x in {**first.theta, **first.outer}.items():
        assert same_bytes(x, before[name])


def test_a_coefficient_outside_fp32_is_right_when_the_product_is_inside() -> None:
    specs = [TensorSpec("w", "F32", (4,))]
    old = FragmentState({"w": torch.zeros(4)}, {})
    new, _ = step(specs, old, {"w": ((1e41, torch.full((4,), 1e-38)),)}, None)
    momentum = new.momentum("w")
    assert momentum is not None
    expected = float(torch.tensor(1e-38)) * 1e41
    assert math.isclose(float(momentum[0]), expected, rel_tol=1e-6)


@commits
@parameters
@finals
def test_no_finite_contribution_drives_the_parameters_out_of_range(
    dtype: str, commit_dtype: str | None, final: bool
) -> None:
    """Deltas at the end of fp32's range, round after round: held at the largest finite values."""
    specs, state = specs_of(dtype), theta_zero(specs_of(dtype))
    for turn in range(5):
        sign = 1.0 if turn < 3 else -1.0
        huge = {name: torch.full(shape, sign * 3.3e38) for name, shape in SHAPES.items()}
        deltas: dict[str, Combination] = {name: ((1.0, huge[name]),) for name in SHAPES}
        old = state
        state, update = step(specs, state, deltas, commit_dtype, final=final)
        arrays = {**state.theta, **state.outer, **update}
        for name, array in arrays.items():
            assert array.float().isfinite().all(), name
        if turn == 0:
            for name in ("b", "w"):
                assert (state.theta[name].float() < old.theta[name].float()).all()


@parameters
def test_a_parameter_beyond_its_dtypes_range_is_held_there_and_its_master_goes_on(
    dtype: str,
) -> None:
    specs = [TensorSpec("w", dtype, (4,))]
    largest = LARGEST[dtype]
    start = torch.tensor([0.0, 1.0, 0.99 * largest, -0.99 * largest]).to(TORCH[dtype])
    state = FragmentState({"w": start}, {})
    push = torch.tensor([0.0, 0.5, -0.4 * largest, 0.4 * largest])
    new = FragmentState(blank(theta_specs(specs)), blank(outer_specs(specs, commit_dtype=None)))
    deltas: dict[str, Combination] = {"w": ((1.0, push),)}
    optimizer = OuterStep(LR, 0.0, None)
    held = optimizer(BACKEND, specs, state, deltas, new=new, update={}, final=False, take=take)
    assert held == ("w",)
    found = new.theta["w"].double().tolist()
    assert found[0] == 0.0
    assert found[1] == pytest.approx(1.0 - LR * 0.5, rel=1e-2)
    assert found[2:] == [largest, -largest]
    if dtype == "F16":  # the master knows by how far it went too far
        assert new.master("w")[2].item() == pytest.approx(0.99 * 65504 + LR * 0.4 * 65504, rel=1e-3)


@pytest.mark.parametrize("commit_dtype", ["F16", "F8_E4M3", "F4", "BF16"])
def test_an_update_too_large_for_its_format_arrives_in_parts(commit_dtype: str) -> None:
    """What does not fit stays in the master, as what rounding loses does."""
    specs = [TensorSpec("w", "F32", (4,))]
    state = FragmentState({"w": torch.zeros(4)}, {})
    goal = torch.tensor([-1e6, 2e5, 1.0, 0.0])
    for turn in range(18):
        new = FragmentState(
            blank(theta_specs(specs)), blank(outer_specs(specs, commit_dtype=commit_dtype))
        )
        update = blank(update_specs(specs, commit_dtype))
        delta: Combination = ((1.0, -goal / 1.0),) if turn == 0 else ()
        OuterStep(1.0, 0.0, commit_dtype)(
            BACKEND, specs, state, {"w": delta}, new=new, update=update, final=False, take=take
        )
        for array in (*new.theta.values(), *new.outer.values(), *update.values()):
            assert array.float().isfinite().all()
        state = new
    torch.testing.assert_close(state.master("w"), goal)
    torch.testing.assert_close(state.theta["w"], goal, rtol=1e-3, atol=0.5)


def test_what_is_in_range_is_not_held() -> None:
    specs = specs_of("BF16")
    new = FragmentState(blank(theta_specs(specs)), blank(outer_specs(specs, commit_dtype=None)))
    drawn = draw(3)
    deltas: dict[str, Combination] = {name: ((1.0, drawn[name]),) for name in SHAPES}
    held = OuterStep(LR, BETA, None)(
        BACKEND, specs, theta_zero(specs), deltas, new=new, update={}, final=False, take=take
    )
    assert held == ()
