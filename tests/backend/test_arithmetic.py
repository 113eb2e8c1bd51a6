"""The arithmetic of every backend, against float64."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.backend.arrays import BACKENDS, DTYPES, Placed, assert_near, blank, put

from gradientmail.backend.base import Backend

LARGEST = torch.finfo(torch.float32).max
# Around the sizes at which an implementation may cut tensors into pieces.
SHAPES = [(), (0,), (1,), (3, 0, 2), (33,), (5, 7, 11), (1024,), (31744,), (31745,), (3, 21845)]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def random(shape: tuple[int, ...], seed: int = 1, dtype: str = "F32") -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to(DTYPES[dtype])


@every_backend
@every_shape
@pytest.mark.parametrize("operation", ["subtract", "add"])
def test_sum_and_difference_round_once(
    backend: Backend, shape: tuple[int, ...], operation: str
) -> None:
    sign = 1.0 if operation == "add" else -1.0
    for dtypes in itertools.product(DTYPES, repeat=3):
        x, y = random(shape, 1, dtypes[0]), random(shape, 2, dtypes[1])
        out = blank(backend, dtypes[2], shape)
        getattr(backend, operation)(put(backend, x).array, put(backend, y).array, out.array)
        expected = (x.float() + sign * y.float()).to(DTYPES[dtypes[2]])
        assert torch.equal(out.tensor(), expected), dtypes


@every_backend
@every_dtype
def test_difference_over_its_right_operand(backend: Backend, dtype: str) -> None:
    x, y = random((40_000,), 3, dtype), random((40_000,), 4, dtype)
    right = put(backend, y)
    backend.subtract(put(backend, x).array, right.array, right.array)
    assert torch.equal(right.tensor(), (x.float() - y.float()).to(DTYPES[dtype]))


@every_backend
@every_shape
@every_dtype
def test_sums_are_float64(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    x, y = random(shape, 5, dtype), random(shape, 6, dtype)
    squares = backend.sum_of_squares(put(backend, x).array)
    assert squares == pytest.approx(float((x.double() ** 2).sum()), rel=1e-12)
    dot = backend.dot(put(backend, x).array, put(backend, y).array)
    length = float(x.double().norm() * y.double().norm())
    assert dot == pytest.approx(float((x.double() * y.double()).sum()), abs=1e-12 * length)


@every_backend
@every_dtype
@pytest.mark.parametrize("count", [2**20, 2**20 + 777])
def test_sums_of_large_tensors_are_nearly_float64(backend: Backend, count: int, dtype: str) -> None:
    x, y = random((count,), 7, dtype), random((count,), 8, dtype)
    # Partial sums in fp32 may be biased for values of a few bits.
    bound = 1e-9 if dtype == "F32" else 1e-7
    squares = backend.sum_of_squares(put(backend, x).array)
    assert squares == pytest.approx(float((x.double() ** 2).sum()), rel=bound)
    dot = backend.dot(put(backend, x).array, put(backend, y).array)
    length = float(x.double().norm() * y.double().norm())
    assert dot == pytest.approx(float((x.double() * y.double()).sum()), abs=bound * length)


@every_backend
@pytest.mark.parametrize("count", [5, 40_000, 2**20 + 5])
@pytest.mark.parametrize("scale", [LARGEST, 1e25, 1e19, 1e-19, 1e-25, 1e-38, 1e-45])
def test_sums_neither_overflow_nor_underflow(backend: Backend, count: int, scale: float) -> None:
    x = torch.full((count,), scale)
    x[::2] *= 0.5
    placed = put(backend, x)
    expected = float((x.double() ** 2).sum())
    assert expected > 0.0
    assert backend.sum_of_squares(placed.array) == pytest.approx(expected, rel=1e-7, abs=0.0)
    assert backend.dot(placed.array, put(backend, -x).array) == pytest.approx(
        -expected, rel=1e-7, abs=0.0
    )


@every_backend
@pytest.mark.parametrize("count", [3000, 2**20 + 5])
def test_one_large_value_among_small_ones_is_not_lost(backend: Backend, count: int) -> None:
    x = torch.full((count,), 1e-30)
    x[1234] = 1e30
    placed = put(backend, x)
    assert backend.sum_of_squares(placed.array) == pytest.approx(float(x[1234].double()) ** 2)
    y = torch.full((count,), 1e-30)
    expected = float((x.double() * y.double()).sum())
    assert backend.dot(placed.array, put(backend, y).array) == pytest.approx(
        expected, rel=1e-7, abs=0.0
    )


@every_backend
def test_products_outside_fp32_of_both_signs(backend: Backend) -> None:
    """Long enough that even the sums of rows are cut into pieces: one is inf, the next -inf."""
    first, second = 31744 * 256, 500_000
    x = torch.full((first + second,), 1e20)
    y = x.clone()
    y[first:] *= -1.0
    expected = float(x[0].double()) ** 2 * (first - second)
    assert backend.dot(put(backend, x).array, put(backend, y).array) == pytest.approx(
        expected, rel=1e-9, abs=0.0
    )


@every_backend
@every_dtype
@pytest.mark.parametrize("fused", ["subtract_squares", "dot_squares"])
@pytest.mark.parametrize("count", [0, 50_000, 2**20 + 5])
def test_fused_calls_are_their_parts(backend: Backend, dtype: str, fused: str, count: int) -> None:
    for scale in (1.0, 1e-4 if dtype == "F16" else 1e-25):
        x, y = (put(backend, random((count,), seed, dtype) * scale) for seed in (60, 61))
        if fused == "dot_squares":
            dot, squares = backend.dot_squares(x.array, y.array)
            assert squares == pytest.approx(backend.sum_of_squares(y.array), rel=1e-12, abs=0.0)
            assert dot == pytest.approx(backend.dot(x.array, y.array), rel=1e-12, abs=0.0)
        else:
            out, expected = blank(backend, dtype, (count,)), blank(backend, dtype, (count,))
            squares = backend.subtract_squares(x.array, y.array, out.array)
            backend.subtract(x.array, y.array, expected.array)
            assert out.bytes() == expected.bytes()
            assert squares == pytest.approx(backend.sum_of_squares(out.array), rel=1e-12, abs=0.0)


@every_backend
@pytest.mark.parametrize("count", [3, 2**20 + 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fused_squares_show_what_is_not_finite(backend: Backend, count: int, bad: float) -> None:
    x, y = random((count,), 62), random((count,), 63)
    y[count // 2] = bad
    _, squares = backend.dot_squares(put(backend, x).array, put(backend, y).array)
    assert not math.isfinite(squares)
    out = blank(backend, "F32", (count,))
    left, right = put(backend, x), put(backend, y)
    assert not math.isfinite(backend.subtract_squares(left.array, right.array, out.array))


@every_backend
@every_dtype
@pytest.mark.parametrize("count", [1, 50_000, 2**20 + 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_sum_of_squares_shows_what_is_not_finite(
    backend: Backend, dtype: str, count: int, bad: float
) -> None:
    for place in {0, count // 2, count - 1}:
        x = random((count,), 9, dtype)
        x[place] = bad
        assert not math.isfinite(backend.sum_of_squares(put(backend, x).array))


@every_backend
@every_shape
@every_dtype
@pytest.mark.parametrize("keep", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_accumulate(
    backend: Backend, shape: tuple[int, ...], dtype: str, keep: float, scale: float
) -> None:
    x, start = random(shape, 10, dtype), random(shape, 11)
    out = put(backend, torch.full_like(start, math.nan) if keep == 0.0 else start)
    backend.accumulate(out.array, put(backend, x).array, keep=keep, scale=scale)
    kept = torch.zeros_like(start) if keep == 0.0 else start * keep
    assert torch.equal(out.tensor(), kept + x.float() * scale)


@every_backend
@pytest.mark.parametrize(
    ("values", "scale"), [(1e-30, 1e45), (1e-44, 1e60), (3e38, 1e-44), (1e30, 1e-60), (2.0, 1e38)]
)
def test_coefficients_outside_fp32(backend: Backend, values: float, scale: float) -> None:
    x = torch.full((100,), values)
    expected = float(x[0].double()) * scale
    first, second = blank(backend, "F32", (100,)), put(backend, torch.zeros(100))
    placed = put(backend, x)
    backend.accumulate(first.array, placed.array, keep=0.0, scale=scale)
    backend.combine([(scale, placed.array)], second.array)
    for out in (first, second):
        assert out.tensor().double().tolist() == pytest.approx([expected] * 100, rel=2e-7)


@every_backend
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(1e-30, 1e30))
def test_exact_opposites_cancel(backend: Backend, value: float, scale: float) -> None:
    if abs(value * scale) > 1e38:
        return
    x = torch.tensor([value] * 40)
    out, both = blank(backend, "F32", (40,)), blank(backend, "F32", (40,))
    plus, minus = put(backend, x), put(backend, -x)
    backend.accumulate(out.array, plus.array, keep=0.0, scale=scale)
    backend.accumulate(out.array, minus.array, keep=1.0, scale=scale)
    backend.combine([(scale, plus.array), (scale, minus.array)], both.array)
    assert out.tensor().tolist() == both.tensor().tolist() == [0.0] * 40


@every_backend
@every_shape
@every_dtype
@pytest.mark.parametrize("terms", [0, 1, 2])
def test_combine(backend: Backend, shape: tuple[int, ...], dtype: str, terms: int) -> None:
    xs, cs = [random(shape, 12 + i, dtype) for i in range(terms)], [0.3, -1.7]
    out = blank(backend, "F32", shape)
    backend.combine([(c, put(backend, x).array) for c, x in zip(cs, xs, strict=False)], out.array)
    expected = torch.zeros(shape)
    for c, x in zip(cs, xs, strict=False):
        expected = expected + x.float() * c
    assert torch.equal(out.tensor(), expected)


@every_backend
@every_shape
@every_dtype
@pytest.mark.parametrize("terms", [0, 1, 2])
@pytest.mark.parametrize("with_momentum", [False, True])
def test_nesterov(
    backend: Backend, shape: tuple[int, ...], dtype: str, terms: int, with_momentum: bool
) -> None:
    xs, cs, master = [random(shape, 20 + i) for i in range(terms)], [0.3, -1.7], random(shape, 30)
    master = master.to(DTYPES[dtype])
    m = random(shape, 31) if with_momentum else torch.zeros(shape)
    new_m, new = blank(backend, "F32", shape), blank(backend, "F32", shape)
    backend.nesterov(
        [(c, put(backend, x).array) for c, x in zip(cs, xs, strict=False)],
        put(backend, m).array if with_momentum else None,
        put(backend, master).array,
        beta=0.9,
        lr=0.7,
        new_momentum=new_m.array,
        new_master=new.array,
    )
    pairs = zip(cs, xs, strict=False)
    delta = sum((c * x.double() for c, x in pairs), torch.zeros(shape).double())
    momentum = 0.9 * m.double() + delta
    expected = master.double() - 0.7 * (delta + 0.9 * momentum)
    assert_near(new_m.tensor().double(), momentum, rtol=3e-7, atol=1e-6)
    assert_near(new.tensor().double(), expected, rtol=3e-7, atol=2e-6)


@every_backend
def test_inputs_are_only_read(backend: Backend) -> None:
    x, y = put(backend, random((500,), 40)), put(backend, random((500,), 41))
    before, out, other = (x.bytes(), y.bytes()), *(blank(backend, "F32", (500,)) for _ in range(2))
    backend.sum_of_squares(x.array)
    backend.dot(x.array, y.array)
    backend.add(x.array, y.array, out.array)
    backend.accumulate(out.array, x.array, keep=0.5, scale=2.0)
    backend.combine([(0.5, x.array), (2.0, y.array)], out.array)
    backend.nesterov(
        [(0.5, x.array)],
        y.array,
        x.array,
        beta=0.9,
        lr=0.7,
        new_momentum=out.array,
        new_master=other.array,
    )
    assert (x.bytes(), y.bytes()) == before


@every_backend
def test_equal_inputs_give_equal_bytes_wherever_they_lie(backend: Backend) -> None:
    """Results must not depend on where in memory an array begins."""
    x, y = random((70_001,), 50), random((70_001,), 51)

    def shifted(values: torch.Tensor, by: int) -> Placed:
        raw = bytearray(by * 4) + bytearray(put(backend, values).bytes())
        memory = memoryview(raw)[by * 4 :]
        spec = put(backend, values).spec
        return Placed(backend.array(memory, "F32", spec.shape), memory, spec)

    def results(by: int) -> tuple[float, float, bytes]:
        a, b, out = shifted(x, by), shifted(y, by), shifted(x, by)
        backend.combine([(0.3, a.array), (0.7, b.array)], out.array)
        sums = backend.sum_of_squares(a.array), backend.dot(a.array, b.array)
        return (*sums, out.bytes())

    assert len({results(by) for by in range(5)}) == 1


@every_backend
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "F4"])
@pytest.mark.parametrize("shape", [(64,), (2, 32), (0,), (0, 64)], ids=str)
def test_arrays_are_views_of_their_buffer(
    backend: Backend, dtype: str, shape: tuple[int, ...]
) -> None:
    placed = blank(backend, dtype, shape)
    assert math.prod(placed.array.shape) in (placed.spec.count, placed.spec.count // 2)
    if dtype in DTYPES and placed.spec.count:
        backend.combine([], put(backend, torch.zeros(shape)).array)
        zeros = put(backend, torch.zeros(shape, dtype=DTYPES[dtype]))
        backend.add(zeros.array, zeros.array, placed.array)
        assert placed.bytes() == bytes(len(placed.bytes()))


@every_backend
def test_an_array_keeps_its_buffer_alive(backend: Backend) -> None:
    def build() -> object:
        return backend.array(memoryview(bytearray(b"\0\0\x80?" * 1000)), "F32", (1000,))

    arrays = [build() for _ in range(50)]
    assert [backend.sum_of_squares(array) for array in arrays] == [1000.0] * 50


@every_backend
@pytest.mark.parametrize("nbytes", [1, 4096, 100_001])
def test_allocated_memory_is_writable_and_of_that_size(backend: Backend, nbytes: int) -> None:
    memory = backend.pool().take(nbytes)
    memory[:] = b"\x7f" * nbytes
    assert (memory.nbytes, memory.format, memory.readonly) == (nbytes, "B", False)


NAMED: list[Callable[[Backend], object]] = [
    lambda b: b.encode(put(b, torch.ones(2)).array, "F64", blank(b, "F32", (2,)).array, None),
    lambda b: b.decode(put(b, torch.ones(2)).array, "I8", None, blank(b, "F32", (2,)).array),
]


@every_backend
@pytest.mark.parametrize("call", NAMED, ids=["encode", "decode"])
def test_unknown_formats_are_errors(backend: Backend, call: Callable[[Backend], object]) -> None:
    with pytest.raises((KeyError, ValueError)):
        call(backend)
