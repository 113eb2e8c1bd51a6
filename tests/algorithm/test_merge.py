"""The merge against the formulas of its docstring, written down again in float64."""

import gc
import itertools
import math
import weakref
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.algorithm.tensors import take
from tests.backend.arrays import assert_near, blank, put

from gradientmail.algorithm.diloco import Rda, WeightedMean
from gradientmail.algorithm.merge import NOISE, Fold, Merged, contribution_weight
from gradientmail.backend.base import Array, Backend, Combination
from gradientmail.schema import TensorSpec

type Arrays = dict[str, torch.Tensor]

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHAPES = {"a.weight": (7, 13), "b.bias": (), "embed.weight": (5, 8), "none": (0, 3)}
MERGES = {"rda": Rda(), "mean": WeightedMean()}
every_merge = pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
counts = pytest.mark.parametrize("count", range(1, 10))


def specs_of(arrays: Arrays, dtype: str = "F32") -> list[TensorSpec]:
    return [TensorSpec(name, dtype, tuple(x.shape)) for name, x in arrays.items()]


def placed(backend: Backend, arrays: Arrays) -> dict[str, Array]:
    """The same values in arrays of the backend."""
    return {name: put(backend, x).array for name, x in arrays.items()}


def combined(backend: Backend, delta: Combination, shape: tuple[int, ...]) -> torch.Tensor:
    """The value of a combination."""
    out = blank(backend, "F32", shape)
    backend.combine(delta, out.array)
    return out.tensor()


def folded(
    backend: Backend,
    merge: Rda | WeightedMean,
    contributions: Sequence[Arrays],
    weights: Sequence[float],
) -> tuple[Merged, Arrays]:
    """What the fold says, and its deltas as fp32 tensors."""
    specs = specs_of(contributions[0])
    fold = Fold(merge, specs, backend, take)
    for arrays, weight in zip(contributions, weights, strict=True):
        assert fold.add(placed(backend, arrays), weight)
    assert fold.count == len(contributions)
    merged = fold.merged()
    return merged, {s.name: combined(backend, merged.deltas[s.name], s.shape) for s in specs}


def phi(x: torch.Tensor) -> torch.Tensor:
    return x / max(float(x.norm()), 1e-12)


def expected_delta(
    merge: Rda | WeightedMean, name: str, xs: Sequence[torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    vs, total = [x.double() for x in xs], math.fsum(weights)
    zero = torch.zeros_like(vs[0])
    if isinstance(merge, WeightedMean) or merge.direct_pattern in name:
        return sum((v * (w / total) for v, w in zip(vs, weights, strict=True)), zero)
    radius = math.fsum(float(v.norm()) * (w / total) for v, w in zip(vs, weights, strict=True))
    s = sum((phi(v) * (w / total) for v, w in zip(vs, weights, strict=True)), zero)
    return radius * phi(s)


def expected_cosine(contributions: Sequence[Arrays]) -> float | None:
    whole = [torch.cat([x.double().flatten() for x in arrays.values()]) for arrays in contributions]
    units = [v / v.norm() if v.norm() else v for v in whole]
    pairs = [float(u @ v) for u, v in itertools.combinations(units, 2)]
    return sum(pairs) / len(pairs) if pairs else None


def check(
    backend: Backend,
    merge: Rda | WeightedMean,
    contributions: list[Arrays],
    weights: list[float],
) -> None:
    merged, found = folded(backend, merge, contributions, weights)
    for name, delta in found.items():
        expected = expected_delta(merge, name, [a[name] for a in contributions], weights)
        assert delta.isfinite().all(), name
        if expected.numel():
            bound = 1e-6 * float(expected.abs().max()) + 4e-45 * len(weights)
            assert float((delta.double() - expected).abs().max()) <= bound, name
    expected_cos = expected_cosine(contributions)
    if expected_cos is None:
        assert merged.cosine is None
    else:
        assert merged.cosine == pytest.approx(expected_cos, abs=1e-6)


def random_contributions(
    seed: int, count: int, dtype: str, scales: Sequence[float]
) -> tuple[list[Arrays], list[float]]:
    print(f"seed {seed}")
    rng = torch.Generator().manual_seed(seed)
    contributions = []
    for index in range(count):
        scale = scales[index % len(scales)]
        drawn = {n: torch.randn(s, generator=rng).clamp(-3, 3) for n, s in SHAPES.items()}
        contributions.append({n: (x * scale).to(DTYPES[dtype]) for n, x in drawn.items()})
    weights = (torch.rand(count, generator=rng).double() * 4.0 + 0.1).tolist()
    return contributions, weights


@counts
@every_merge
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_formulas(
    backend: Backend, merge: Rda | WeightedMean, count: int, dtype: str
) -> None:
    for seed in range(3):
        check(backend, merge, *random_contributions(seed, count, dtype, [1e-3, 1e-2]))


@counts
@every_merge
@pytest.mark.parametrize(
    "scales",
    [[1e25], [1e-25], [5e36], [1e-37], [1e25, 1e-25], [3e36, 1e-37, 1.0]],
    ids=lambda s: "/".join(f"{x:g}" for x in s),
)
def test_extreme_values_stay_finite_and_right(
    backend: Backend, merge: Rda | WeightedMean, count: int, scales: list[float]
) -> None:
    check(backend, merge, *random_contributions(7, count, "F32", scales))


@counts
@every_merge
@pytest.mark.parametrize("weights", [[3.0], [0.3, 0.7], [1.0, 1e-9, 1e9]], ids=len)
def test_the_largest_values_do_not_overflow(
    backend: Backend, merge: Rda | WeightedMean, count: int, weights: list[float]
) -> None:
    largest = torch.finfo(torch.float32).max
    given_weights = [weights[index % len(weights)] for index in range(count)]
    _, found = folded(backend, merge, [{"x": torch.full((40,), largest)}] * count, given_weights)
    assert_near(found["x"], torch.full((40,), largest), rtol=2e-6, atol=0.0)


def test_the_largest_values_do_not_overflow_in_the_sums_either(backend: Backend) -> None:
    """Weights that sum to just under a power of two, where rounding could lift a sum over it."""
    largest = torch.finfo(torch.float32).max
    for seed in range(30):
        drawn = torch.rand(7, generator=torch.Generator().manual_seed(seed)).double() + 0.1
        weights = (drawn / drawn.sum() * (1.0 - 1e-12)).tolist()
        _, found = folded(backend, WeightedMean(), [{"x": torch.full((3,), largest)}] * 7, weights)
        assert_near(found["x"], torch.full((3,), largest), rtol=2e-6, atol=0.0)


@every_merge
@pytest.mark.parametrize("weight", [1e-30, 1.0, 3e7, 1e30])
@counts
def test_only_ratios_of_weights_count(
    backend: Backend, merge: Rda | WeightedMean, weight: float, count: int
) -> None:
    contributions, weights = random_contributions(3, count, "F32", [1.0])
    check(backend, merge, contributions, [w * weight for w in weights])


@every_merge
def test_weights_of_very_different_size(backend: Backend, merge: Rda | WeightedMean) -> None:
    contributions, _ = random_contributions(4, 4, "F32", [1.0])
    check(backend, merge, contributions, [1.0, 1e30, 1e-30, 2e30])


@counts
@every_merge
def test_equal_contributions_are_their_own_merge(
    backend: Backend, merge: Rda | WeightedMean, count: int
) -> None:
    contributions, weights = random_contributions(5, 1, "F32", [1.0])
    merged, found = folded(backend, merge, contributions * count, weights * count)
    for name, delta in found.items():
        assert_near(delta, contributions[0][name], rtol=5e-7, atol=0.0)
    assert merged.cosine == (None if count == 1 else pytest.approx(1.0, abs=1e-6))


@every_merge
def test_one_contribution_comes_back_bit_for_bit(
    backend: Backend, merge: Rda | WeightedMean
) -> None:
    for seed in range(20):
        (arrays,), weights = random_contributions(seed, 1, "F32", [10.0 ** (seed - 10)])
        _, found = folded(backend, merge, [arrays], weights)
        for name, delta in found.items():
            assert torch.equal(delta, arrays[name])


@pytest.mark.parametrize("count", [2, 4, 6, 8])
@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-8])
def test_opposite_directions_cancel_to_exactly_zero(
    backend: Backend, count: int, factor: float, scale: float
) -> None:
    """Whatever their lengths: RDA averages directions, and these have none in common."""
    one, _ = random_contributions(9, 1, "F32", [scale])
    other = {name: x * -factor for name, x in one[0].items()}
    _, found = folded(
        backend, Rda(direct_pattern="no such"), [one[0], other] * (count // 2), [2.5] * count
    )
    for delta in found.values():
        assert torch.equal(delta, torch.zeros_like(delta))


@pytest.mark.parametrize("count", [2, 4, 6, 8])
def test_exact_opposites_have_no_mean(backend: Backend, count: int) -> None:
    one, _ = random_contributions(9, 1, "F32", [1.0])
    other = {name: -x for name, x in one[0].items()}
    _, found = folded(backend, WeightedMean(), [one[0], other] * (count // 2), [0.3] * count)
    for delta in found.values():
        assert torch.equal(delta, torch.zeros_like(delta))


@pytest.mark.parametrize("turns", [3, 5, 6])
def test_directions_around_a_circle_cancel(backend: Backend, turns: int) -> None:
    """Lengths differ, the directions 2π/n apart sum to nothing but rounding."""
    rng = torch.Generator().manual_seed(11)
    x, y = torch.linalg.qr(torch.randn(300, 2, generator=rng).double())[0].t()
    contributions = []
    for turn in range(turns):
        angle = 2 * math.pi * turn / turns
        vector = (1.0 + turn) * (math.cos(angle) * x + math.sin(angle) * y)
        contributions.append({"w": vector.float()})
    merged, found = folded(backend, Rda(), contributions, [1.0] * turns)
    assert torch.equal(found["w"], torch.zeros(300))
    assert merged.cosine == pytest.approx(-1.0 / (turns - 1), abs=1e-6)


@pytest.mark.parametrize("angle", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("count", [2, 3])
def test_nearly_opposite_directions_keep_full_length(
    backend: Backend, angle: float, count: int
) -> None:
    """What is left of them, far above rounding, is a direction, and the merge follows it."""
    rng = torch.Generator().manual_seed(13)
    x, y = torch.linalg.qr(torch.randn(500, 2, generator=rng).double())[0].t()
    one, other = x.float(), (-math.cos(angle) * x + math.sin(angle) * y).float()
    contributions = [{"w": one}, {"w": other}, {"w": torch.zeros(500)}][:count]
    _, found = folded(backend, Rda(), contributions, [1.0] * count)
    assert float(found["w"].double().norm()) == pytest.approx(2.0 / count, rel=1e-6)
    # What is left points along y, turned by half the angle. Its error is fp32's, over the angle.
    along = 2.0 / count * math.cos(angle / 2)
    assert float(found["w"].double() @ y) == pytest.approx(along, rel=1e-6 / angle)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_is_left_within_rounding_is_zero(backend: Backend, count: int) -> None:
    rng = torch.Generator().manual_seed(17)
    x = torch.randn(400, generator=rng)
    nudged = -x * (1.0 + 0.5 * NOISE * torch.sign(torch.randn(400, generator=rng)))
    zeros = [{"w": torch.zeros(400)}] * (count - 2)
    _, found = folded(backend, Rda(), [{"w": x}, {"w": nudged}, *zeros], [1.0] * count)
    assert torch.equal(found["w"], torch.zeros(400))


@counts
@every_merge
def test_zero_contributions_count_with_their_weight(
    backend: Backend, merge: Rda | WeightedMean, count: int
) -> None:
    contributions, weights = random_contributions(19, count, "F32", [1.0])
    zero = {name: torch.zeros_like(x) for name, x in contributions[0].items()}
    for place in {0, count // 2, count}:
        with_zero = [*contributions[:place], zero, *contributions[place:]]
        check(backend, merge, with_zero, [*weights[:place], 1.7, *weights[place:]])


@counts
@every_merge
def test_nothing_but_zeros_is_zero(backend: Backend, merge: Rda | WeightedMean, count: int) -> None:
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    merged, found = folded(backend, merge, [zero] * count, [1.0] * count)
    for delta in found.values():
        assert torch.equal(delta, torch.zeros_like(delta))
    assert merged.cosine == (None if count == 1 else 0.0)


@counts
@every_merge
def test_order_changes_the_last_bits_at_most(
    backend: Backend, merge: Rda | WeightedMean, count: int
) -> None:
    contributions, weights = random_contributions(23, count, "F32", [1.0, 10.0])
    merged, found = folded(backend, merge, contributions, weights)
    turned, back = folded(backend, merge, contributions[::-1], weights[::-1])
    for name, delta in found.items():
        scale = float(delta.abs().max()) if delta.numel() else 0.0
        assert_near(back[name], delta, rtol=0.0, atol=1e-6 * scale)
    assert turned.cosine == (None if count == 1 else pytest.approx(merged.cosine, abs=1e-6))


@every_merge
def test_same_order_gives_the_same_bytes(backend: Backend, merge: Rda | WeightedMean) -> None:
    for count in (1, 2, 3, 6):
        runs = [
            folded(backend, merge, *random_contributions(29, count, "F32", [1.0])) for _ in range(2)
        ]
        assert runs[0][0].cosine == runs[1][0].cosine
        for name, delta in runs[0][1].items():
            assert torch.equal(delta, runs[1][1][name])


@every_merge
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("before", [0, 1, 2, 3, 4])
def test_what_is_not_finite_changes_nothing(
    backend: Backend, merge: Rda | WeightedMean, bad: float, before: int
) -> None:
    contributions, weights = random_contributions(31, before + 2, "F32", [1.0])
    spoiled = {name: x.clone() for name, x in contributions[-1].items()}
    spoiled["embed.weight"][3, 2] = bad
    specs = specs_of(contributions[0])
    fold, clean = (Fold(merge, specs, backend, take) for _ in range(2))
    good = [placed(backend, arrays) for arrays in contributions]
    for arrays, weight in zip(good[:before], weights, strict=False):
        assert fold.add(arrays, weight)
        assert clean.add(arrays, weight)
    assert not fold.add(placed(backend, spoiled), 1.0)
    assert fold.count == before
    assert fold.add(good[-1], weights[-1])
    assert clean.add(good[-1], weights[-1])
    for name, shape in SHAPES.items():
        x, y = (combined(backend, one.merged().deltas[name], shape) for one in (fold, clean))
        assert torch.equal(x, y)
    assert fold.merged().cosine == clean.merged().cosine


def test_largest_finite_values_are_finite(backend: Backend) -> None:
    largest = torch.full((64,), torch.finfo(torch.float32).max)
    fold = Fold(Rda(), specs_of({"w": largest}), backend, take)
    assert all(fold.add(placed(backend, {"w": largest}), 1.0) for _ in range(4))


@every_merge
def test_memory_does_not_grow_with_the_contributions(
    backend: Backend, merge: Rda | WeightedMean
) -> None:
    contributions, weights = random_contributions(37, 9, "F32", [1.0])
    # The sum of two opposite directions is measured in memory of its own; one number always is
    # in the same or the opposite direction.
    specs = specs_of(contributions[0])
    waiting = [placed(backend, {n: x.abs() for n, x in arrays.items()}) for arrays in contributions]
    taken: list[int] = []

    def counted(nbytes: int) -> memoryview:
        taken.append(nbytes)
        return take(nbytes)

    fold = Fold(merge, specs, backend, counted)
    once = sum(spec.nbytes for spec in specs)
    alive: list[weakref.ref[Array]] = []
    for index in range(9):
        arrays = waiting[index]
        waiting[index] = {}
        alive += [weakref.ref(x) for x in arrays.values()]
        fold.add(arrays, weights[index])
        del arrays
        held = sum(ref() is not None for ref in alive)
        assert held == len(SHAPES) * (index + 1 if index < 2 else 0)
        fold.merged()
        assert sum(taken) == (0 if index < 2 else 2 * once)


@every_merge
def test_contributions_are_only_read(backend: Backend, merge: Rda | WeightedMean) -> None:
    contributions, weights = random_contributions(41, 5, "F32", [1.0])
    fold = Fold(merge, specs_of(contributions[0]), backend, take)
    for arrays, weight in zip(contributions, weights, strict=True):
        given = {name: put(backend, x) for name, x in arrays.items()}
        fold.add({name: x.array for name, x in given.items()}, weight)
        combined(backend, fold.merged().deltas["a.weight"], SHAPES["a.weight"])
        for name, x in given.items():
            assert torch.equal(x.tensor(), arrays[name])


@every_merge
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_sums_may_lie_where_the_first_contribution_lay(
    backend: Backend, merge: Rda | WeightedMean, count: int
) -> None:
    """And then give what they give anywhere else, to the last bit; also if summed up before."""
    contributions, weights = random_contributions(53, count, "F32", [1.0, 0.0, 1e-20])
    specs = specs_of(contributions[0])
    plain = Fold(merge, specs, backend, take)
    asked: list[Mapping[str, Array]] = []

    def sum_in(first: Mapping[str, Array]) -> Mapping[str, Array]:
        asked.append(first)
        return first

    given = [placed(backend, arrays) for arrays in contributions]
    over = Fold(merge, specs, backend, take)
    for arrays, more, weight in zip(contributions, given, weights, strict=True):
        assert plain.add(placed(backend, arrays), weight)
        if over.count == 2:
            assert not over.sums_too_few
            over.sum_up(sum_in)
            assert over.sums_too_few
            assert not over.holds_contributions
        assert over.add(more, weight)
        assert not over.sums_too_few
    assert [one is given[0] for one in asked] == ([True] if count > 2 else [])
    one, two = plain.finish(), over.finish()
    assert one.cosine == two.cosine
    for name, shape in SHAPES.items():
        x, y = (combined(backend, merged.deltas[name], shape) for merged in (one, two))
        assert torch.equal(x, y)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_is_finished_holds_nothing(backend: Backend, count: int) -> None:
    """But what the merge refers to; and the next one starts with nothing."""
    contributions, weights = random_contributions(59, count, "F32", [1.0])
    alive: list[weakref.ref[memoryview]] = []

    def watched(nbytes: int) -> memoryview:
        memory = take(nbytes)
        alive.append(weakref.ref(memory))
        return memory

    fold = Fold(Rda(), specs_of(contributions[0]), backend, watched)
    for arrays, weight in zip(contributions, weights, strict=True):
        fold.add(placed(backend, arrays), weight)
    _, found = folded(backend, Rda(), contributions, weights)
    merged = fold.finish()
    gc.collect()
    assert merged.cosine == (None if count == 1 else pytest.approx(merged.cosine))
    assert sum(one() is not None for one in alive) <= (len(SHAPES) if count > 2 else 0)
    for name, shape in SHAPES.items():
        assert torch.equal(combined(backend, merged.deltas[name], shape), found[name])
    assert fold.count == 0
    assert not fold.holds_contributions
    with pytest.raises(ValueError, match="no contribution"):
        fold.merged()


def test_merging_twice_and_then_more_is_merging_once(backend: Backend) -> None:
    contributions, weights = random_contributions(43, 6, "F32", [1.0])
    specs = specs_of(contributions[0])
    fold = Fold(Rda(), specs, backend, take)
    for arrays, weight in zip(contributions, weights, strict=True):
        fold.add(placed(backend, arrays), weight)
        fold.merged()
        fold.merged()
    _, found = folded(backend, Rda(), contributions, weights)
    for name, shape in SHAPES.items():
        assert torch.equal(combined(backend, fold.merged().deltas[name], shape), found[name])


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=3, max_size=3),
            st.floats(1e-3, 1e12),
        ),
        min_size=1,
        max_size=7,
    )
)
def test_no_finite_input_gives_nan_or_infinity(
    backend: Backend, drawn: list[tuple[list[float], float]]
) -> None:
    contributions = [{"w": torch.tensor(values)} for values, _ in drawn]
    weights = [weight for _, weight in drawn]
    for merge in MERGES.values():
        merged, found = folded(backend, merge, contributions, weights)
        assert found["w"].isfinite().all()
        total = sum(weights)
        most = sum(
            float(a["w"].double().norm()) * (w / total)
            for a, w in zip(contributions, weights, strict=True)
        )
        assert float(found["w"].double().norm()) <= most * (1 + 1e-5) + 1e-43
        assert merged.cosine is None or -1.0 <= merged.cosine <= 1.0


def test_direct_pattern_is_found_in_the_lowercased_name(backend: Backend) -> None:
    contributions, weights = random_contributions(47, 3, "F32", [1.0, 30.0])
    named = [{"Tok_EMBED.w": a["a.weight"], "other": a["a.weight"]} for a in contributions]
    _, found = folded(backend, Rda("embed"), named, weights)
    vectors = [a["a.weight"] for a in contributions]
    mean = expected_delta(WeightedMean(), "x", vectors, weights)
    rda = expected_delta(Rda(), "x", vectors, weights)
    assert_near(found["Tok_EMBED.w"].double(), mean, rtol=1e-5, atol=1e-6)
    assert_near(found["other"].double(), rda, rtol=1e-5, atol=1e-6)
    assert float((mean - rda).abs().max()) > 1e-2


def test_nothing_to_merge_and_bad_weights_are_errors(backend: Backend) -> None:
    fold = Fold(Rda(), specs_of({"w": torch.ones(3)}), backend, take)
    with pytest.raises(ValueError, match="no contribution"):
        fold.merged()
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            fold.add(placed(backend, {"w": torch.ones(3)}), weight)
    assert fold.count == 0


def test_weight_is_tokens_squared_over_steps() -> None:
    assert contribution_weight(160, 10) == 2560.0
    assert contribution_weight(3, 7) == 9 / 7
    assert contribution_weight(2**62, 3) == 2**124 / 3
    assert contribution_weight(0, 0) == 0.0
    assert contribution_weight(-5, 3) == contribution_weight(5, -3) == 0.0
