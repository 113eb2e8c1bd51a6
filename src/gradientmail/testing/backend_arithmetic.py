"""The part of the backend contract about arithmetic, against float64."""

import itertools
import threading
from abc import ABC, abstractmethod

import numpy as np
import pytest

from gradientmail.backend.base import Backend
from gradientmail.testing.backend_values import (
    Doubles,
    Floats,
    Numbers,
    Placed,
    blank,
    draw,
    put,
    put_bytes,
    raw,
    rounded,
)

DTYPES = ("F32", "F16", "BF16")
# Around the sizes at which an implementation may cut tensors into pieces.
SHAPES = [(), (0,), (1,), (3, 0, 2), (33,), (5, 7, 11), (31744,), (3, 10923)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
terms = pytest.mark.parametrize("terms", [0, 1, 2])
COEFFICIENTS = (0.3, -1.7)


def wide(x: Numbers) -> Doubles:
    """``x`` in float64."""
    return x.astype(np.float64)


def equal(found: Floats, expected: Numbers) -> bool:
    """Whether all values are equal; zeros of either sign are. Shown as a bool, without a diff."""
    return found.shape == expected.shape and bool(np.array_equal(found, expected))


def assert_near(found: Floats, expected: Doubles, *, rtol: float, atol: float) -> None:
    """Every element within ``atol + rtol·|expected|``."""
    assert found.shape == expected.shape
    excess = np.abs(wide(found) - expected) - (atol + rtol * np.abs(expected))
    assert (excess <= 0.0).all(), f"off by {excess.max()} more than allowed"


class OverArrays(ABC):
    """A test of a backend, and arrays for it."""

    @abstractmethod
    def make_backend(self) -> Backend:
        """The backend under test."""

    def put(self, values: Floats, dtype: str = "F32") -> Placed:
        """An array of the backend with these values."""
        return put(self.make_backend(), values, dtype)

    def blank(self, shape: tuple[int, ...], dtype: str = "F32") -> Placed:
        """An array of the backend to write to."""
        return blank(self.make_backend(), dtype, shape)


class BackendArithmetic(OverArrays):
    """Sums and differences of tensors, combinations and the Nesterov step."""

    @every_shape
    @pytest.mark.parametrize("operation", ["subtract", "add"])
    def test_sum_and_difference_round_once(self, shape: tuple[int, ...], operation: str) -> None:
        """In fp32, whatever the dtypes, and then to that of the result."""
        sign = np.float32(1.0 if operation == "add" else -1.0)
        for dtypes in itertools.product(DTYPES, repeat=3):
            x, y = draw(shape, 1, dtypes[0]), draw(shape, 2, dtypes[1])
            out = self.blank(shape, dtypes[2])
            call = getattr(self.make_backend(), operation)
            call(self.put(x, dtypes[0]).array, self.put(y, dtypes[1]).array, out.array)
            assert equal(out.values(), rounded(wide(x + sign * y), dtypes[2])), dtypes

    @every_dtype
    def test_difference_over_its_right_operand(self, dtype: str) -> None:
        """``out`` may be ``right``."""
        x, y = draw((40_000,), 3, dtype), draw((40_000,), 4, dtype)
        expected = rounded(wide(x - y), dtype)
        for operation in ("subtract", "subtract_squares"):
            right = self.put(y, dtype)
            call = getattr(self.make_backend(), operation)
            call(self.put(x, dtype).array, right.array, right.array)
            assert equal(right.values(), expected)

    @every_shape
    @every_dtype
    @pytest.mark.parametrize("keep", [0.0, 0.25, 1.0])
    @pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
    def test_accumulate(
        self, shape: tuple[int, ...], dtype: str, keep: float, scale: float
    ) -> None:
        """Coefficient, product and sum each rounded to fp32; without ``keep`` out is not read."""
        x, start = draw(shape, 10, dtype), draw(shape, 11)
        out = self.blank(shape) if keep == 0.0 else self.put(start)
        self.make_backend().accumulate(out.array, self.put(x, dtype).array, keep=keep, scale=scale)
        kept = np.zeros_like(start) if keep == 0.0 else start * np.float32(keep)
        assert equal(out.values(), kept + x * np.float32(scale))

    @every_shape
    @pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 1e-60])
    def test_accumulate_where_it_lies(self, shape: tuple[int, ...], scale: float) -> None:
        """Without ``keep`` out may be the array itself, and gets what another array would get."""
        x, other = self.put(draw(shape, 10)), self.blank(shape)
        backend = self.make_backend()
        backend.accumulate(other.array, x.array, keep=0.0, scale=scale)
        backend.accumulate(x.array, x.array, keep=0.0, scale=scale)
        assert equal(x.values(), other.values())

    @pytest.mark.parametrize(
        ("value", "scale"),
        [(1e-30, 1e45), (1e-44, 1e60), (3e38, 1e-44), (1e30, 1e-60), (2.0, 1e38), (1e-40, 1e40)],
    )
    def test_coefficients_outside_fp32(self, value: float, scale: float) -> None:
        """The result is right as long as it is in range, in all that takes coefficients."""
        backend, x = self.make_backend(), np.full(100, value, np.float32)
        expected, placed = wide(x) * scale, self.put(x)
        outs = [self.blank((100,)), self.put(np.zeros(100, np.float32)), *[self.blank((100,))] * 1]
        backend.accumulate(outs[0].array, placed.array, keep=0.0, scale=scale)
        backend.accumulate(outs[1].array, placed.array, keep=1.0, scale=scale)
        backend.combine([(scale, placed.array)], outs[2].array)
        for out in outs:
            assert_near(out.values(), expected, rtol=3e-7, atol=1e-45)
        momentum, master = self.blank((100,)), self.blank((100,))
        backend.nesterov(
            [(scale, placed.array)],
            None,
            self.put(np.zeros(100, np.float32)).array,
            beta=0.5,
            lr=0.5,
            new_momentum=momentum.array,
            new_master=master.array,
        )
        assert_near(momentum.values(), expected, rtol=3e-7, atol=1e-45)
        assert_near(master.values(), -0.75 * expected, rtol=1e-6, atol=3e-45)

    @pytest.mark.parametrize("scale", [1e-30, 0.3, 1.0, 1e30])
    def test_exact_opposites_cancel(self, scale: float) -> None:
        """To zero, not to the rounding of a product."""
        x = draw((5000,), 12) * np.float32(1e5)
        backend, plus, minus = self.make_backend(), self.put(x), self.put(-x)
        out, both, momentum = (self.blank((5000,)) for _ in range(3))
        backend.accumulate(out.array, plus.array, keep=0.0, scale=scale)
        backend.accumulate(out.array, minus.array, keep=1.0, scale=scale)
        terms = [(scale, plus.array), (scale, minus.array)]
        backend.combine(terms, both.array)
        backend.nesterov(
            terms,
            None,
            plus.array,
            beta=0.9,
            lr=0.7,
            new_momentum=momentum.array,
            new_master=minus.array,
        )
        for placed in (out, both, momentum):
            assert not placed.values().any()
        assert equal(minus.values(), x)

    @every_shape
    @every_dtype
    @terms
    def test_combine(self, shape: tuple[int, ...], dtype: str, terms: int) -> None:
        """Coefficient, products and sum each rounded to fp32; zero with no term."""
        xs = [draw(shape, 12 + i, dtype) for i in range(terms)]
        out, delta = self.blank(shape), zip(COEFFICIENTS, xs, strict=False)
        self.make_backend().combine([(c, self.put(x, dtype).array) for c, x in delta], out.array)
        expected = np.zeros(shape, np.float32)
        for c, x in zip(COEFFICIENTS, xs, strict=False):
            expected = expected + x * np.float32(c)
        assert equal(out.values(), expected)

    @every_shape
    @every_dtype
    @terms
    @pytest.mark.parametrize("with_momentum", [False, True])
    def test_nesterov(
        self, shape: tuple[int, ...], dtype: str, terms: int, with_momentum: bool
    ) -> None:
        """``m' = β·m + Δ`` and ``master' = master − lr·(Δ + β·m')``."""
        delta, total = self._delta(shape, terms)
        master = draw(shape, 30, dtype)
        m = draw(shape, 31) if with_momentum else np.zeros(shape, np.float32)
        new_m, new = self.blank(shape), self.blank(shape)
        self.make_backend().nesterov(
            [(c, x.array) for c, x in delta],
            self.put(m).array if with_momentum else None,
            self.put(master, dtype).array,
            beta=0.9,
            lr=0.7,
            new_momentum=new_m.array,
            new_master=new.array,
        )
        momentum = 0.9 * wide(m) + total
        expected = wide(master) - 0.7 * (total + 0.9 * momentum)
        assert_near(new_m.values(), momentum, rtol=3e-7, atol=1e-6)
        assert_near(new.values(), expected, rtol=3e-7, atol=2e-6)

    @pytest.mark.parametrize("over", ["master", "first", "second", "twice"])
    def test_nesterov_over_what_it_uses_up(self, over: str) -> None:
        """Momentum over momentum, master over the old one or over a term: the same bytes.

        Also one of more terms than two, or one that comes twice.
        """
        shape: tuple[int, ...] = (70_001,)
        found: list[tuple[bytes, bytes]] = []
        for in_place in (False, True):
            delta, _ = self._delta(shape, 2)
            delta.append((0.6, delta[0][1] if over == "twice" else self.put(draw(shape, 29))))
            m, master = self.put(draw(shape, 31)), self.put(draw(shape, 30))
            terms = {"first": delta[0][1], "second": delta[1][1], "twice": delta[0][1]}
            old = {"master": master, **terms}
            new_m, new = (m, old[over]) if in_place else (self.blank(shape), self.blank(shape))
            self.make_backend().nesterov(
                [(c, x.array) for c, x in delta],
                m.array,
                master.array,
                beta=0.9,
                lr=0.7,
                new_momentum=new_m.array,
                new_master=new.array,
            )
            found.append((new_m.bytes(), new.bytes()))
        same = found[0] == found[1]
        assert same

    def _delta(
        self, shape: tuple[int, ...], terms: int
    ) -> tuple[list[tuple[float, Placed]], Doubles]:
        """A combination of so many terms, and its value."""
        xs = [draw(shape, 20 + i) for i in range(terms)]
        pairs = list(zip(COEFFICIENTS, xs, strict=False))
        total = sum((c * wide(x) for c, x in pairs), np.zeros(shape))
        return [(c, self.put(x)) for c, x in pairs], total

    @every_dtype
    def test_part(self, dtype: str) -> None:
        """A part is flat and in the same memory, of an array that can be written and of another."""
        backend, values = self.make_backend(), draw((5, 7), 50, dtype)
        placed = self.put(values, dtype)
        fixed = put_bytes(backend, raw(values, dtype), dtype, (5, 7))
        backend.subtract(
            backend.part(placed.array, 4, 15),
            backend.part(fixed.array, 4, 15),
            backend.part(placed.array, 4, 15),
        )
        expected = values.reshape(-1).copy()
        expected[4:15] = 0
        assert equal(placed.values().reshape(-1), expected)
        assert backend.sum_of_squares(backend.part(placed.array, 35, 35)) == 0.0

    def test_read_only_inputs(self) -> None:
        """Inputs may lie in memory that cannot be written, and are not changed."""
        backend, shape = self.make_backend(), (500,)
        data = [raw(draw(shape, seed), "F32") for seed in (40, 41)]
        x, y = (put_bytes(backend, each, "F32", shape) for each in data)
        out, other = self.blank(shape), self.blank(shape)
        backend.sum_of_squares(x.array)
        backend.dot(x.array, y.array)
        backend.sum_of_products(x.array, y.array)
        backend.add(x.array, y.array, out.array)
        backend.subtract(x.array, y.array, out.array)
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
        assert [x.bytes(), y.bytes()] == data

    def test_equal_inputs_give_equal_bytes_wherever_they_lie(self) -> None:
        """Results depend neither on where an array begins nor on the calling thread."""
        results = [self._results(by) for by in range(5)]
        worker = threading.Thread(target=lambda: results.append(self._results(0)))
        worker.start()
        worker.join()
        assert len(results) == 6
        assert len(set(results)) == 1

    def _results(self, shift: int) -> tuple[float, float, bytes]:
        backend, shape = self.make_backend(), (70_001,)

        def shifted(values: Floats) -> Placed:
            data = bytearray(shift * 4) + bytearray(raw(values, "F32"))
            memory = memoryview(data)[shift * 4 :]
            return Placed(backend.array(memory, "F32", shape), memory, self.put(values).spec)

        x, y, out = (shifted(draw(shape, seed)) for seed in (50, 51, 50))
        backend.combine([(0.3, x.array), (0.7, y.array)], out.array)
        return backend.sum_of_squares(x.array), backend.dot(x.array, y.array), out.bytes()
