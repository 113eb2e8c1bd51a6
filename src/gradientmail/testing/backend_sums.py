"""The part of the backend contract about sums over a tensor, against float64."""

import math

import numpy as np
import pytest

from gradientmail.testing.backend_arithmetic import (
    OverArrays,
    every_dtype,
    every_shape,
    wide,
)
from gradientmail.testing.backend_values import LARGEST, draw

counts = pytest.mark.parametrize("count", [5, 40_000, 2**20 + 5])


class BackendSums(OverArrays):
    """Sums of squares and of products."""

    @every_shape
    @every_dtype
    def test_sums_are_float64(self, shape: tuple[int, ...], dtype: str) -> None:
        """To twelve digits for tensors of ordinary size."""
        x, y = draw(shape, 5, dtype), draw(shape, 6, dtype)
        backend = self.make_backend()
        squares = backend.sum_of_squares(self.put(x, dtype).array)
        assert type(squares) is float
        assert squares == pytest.approx(float((wide(x) ** 2).sum()), rel=1e-12)
        dot = backend.dot(self.put(x, dtype).array, self.put(y, dtype).array)
        assert type(dot) is float
        length = math.sqrt(float((wide(x) ** 2).sum()) * float((wide(y) ** 2).sum()))
        assert dot == pytest.approx(float((wide(x) * wide(y)).sum()), abs=1e-12 * length)

    @every_dtype
    @pytest.mark.parametrize("count", [2**20, 2**20 + 5])
    def test_sums_of_large_tensors_are_nearly_float64(self, count: int, dtype: str) -> None:
        """Partial sums may be fp32; then they may be biased for values of a few bits."""
        x, y = draw((count,), 1, dtype), draw((count,), 2, dtype)
        bound = 1e-9 if dtype == "F32" else 1e-7
        backend, length = self.make_backend(), float(count)
        squares = backend.sum_of_squares(self.put(x, dtype).array)
        assert squares == pytest.approx(float((wide(x) ** 2).sum()), rel=bound)
        dot = backend.dot(self.put(x, dtype).array, self.put(y, dtype).array)
        assert dot == pytest.approx(float((wide(x) * wide(y)).sum()), abs=bound * length)

    @counts
    @pytest.mark.parametrize("scale", [LARGEST, 1e25, 1e19, 1e-19, 1e-25, 1e-38, 1e-45])
    def test_sums_neither_overflow_nor_underflow(self, count: int, scale: float) -> None:
        """Norms of values near 1e±25 and beyond."""
        x = np.full(count, scale, np.float32)
        x[::2] *= np.float32(0.5)
        expected = float((wide(x) ** 2).sum())
        assert expected > 0.0
        backend, placed = self.make_backend(), self.put(x)
        squares = backend.sum_of_squares(placed.array)
        assert squares == pytest.approx(expected, rel=1e-7, abs=0.0)
        for call in (backend.dot, backend.sum_of_products):
            dot = call(placed.array, self.put(-x).array)
            assert dot == pytest.approx(-expected, rel=2e-6, abs=0.0)

    @pytest.mark.parametrize("count", [3000, 2**20 + 5])
    def test_one_large_value_among_small_ones_is_not_lost(self, count: int) -> None:
        """Nor are the small ones, where the other operand is small."""
        x = np.full(count, 1e-30, np.float32)
        x[1234] = 1e30
        placed, backend = self.put(x), self.make_backend()
        assert backend.sum_of_squares(placed.array) == pytest.approx(float(wide(x)[1234]) ** 2)
        y = np.full(count, 1e-30, np.float32)
        expected = float((wide(x) * wide(y)).sum())
        dot = backend.dot(placed.array, self.put(y).array)
        assert dot == pytest.approx(expected, rel=1e-7, abs=0.0)

    def test_products_outside_fp32_of_both_signs(self) -> None:
        """In fp32 the sum of the first part is inf, that of the second -inf."""
        first, second = 700_000, 400_000
        x = np.full(first + second, 1e20, np.float32)
        y = x.copy()
        y[first:] *= np.float32(-1.0)
        expected = float(wide(x[:1])[0]) ** 2 * (first - second)
        dot = self.make_backend().dot(self.put(x).array, self.put(y).array)
        assert dot == pytest.approx(expected, rel=1e-9, abs=0.0)

    @every_dtype
    @pytest.mark.parametrize("count", [0, 3, 50_000])
    def test_sum_of_products_is_near_the_dot_product(self, count: int, dtype: str) -> None:
        """It may be summed in fp32."""
        x, y = draw((count,), 58, dtype), draw((count,), 59, dtype)
        found = self.make_backend().sum_of_products(
            self.put(x, dtype).array, self.put(y, dtype).array
        )
        assert found == pytest.approx(float((wide(x) * wide(y)).sum()), abs=1e-6 * count)

    @every_dtype
    @pytest.mark.parametrize("count", [0, 50_000, 2**20 + 5])
    def test_fused_calls_are_their_parts(self, dtype: str, count: int) -> None:
        """``subtract_squares`` and ``dot_squares``."""
        backend = self.make_backend()
        for scale in (1.0, 1e-4 if dtype == "F16" else 1e-25):
            x, y = (self.put(draw((count,), seed, dtype, scale), dtype) for seed in (1, 2))
            dot, squares = backend.dot_squares(x.array, y.array)
            assert squares == pytest.approx(backend.sum_of_squares(y.array), rel=1e-12, abs=0.0)
            assert dot == pytest.approx(backend.dot(x.array, y.array), rel=1e-12, abs=0.0)
            out, expected = self.blank((count,), dtype), self.blank((count,), dtype)
            squares = backend.subtract_squares(x.array, y.array, out.array)
            backend.subtract(x.array, y.array, expected.array)
            assert out.bytes() == expected.bytes()
            assert squares == pytest.approx(backend.sum_of_squares(out.array), rel=1e-12, abs=0.0)

    @every_dtype
    @pytest.mark.parametrize("count", [1, 50_000, 2**20 + 5])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_squares_show_what_is_not_finite(self, dtype: str, count: int, bad: float) -> None:
        """Wherever it is, and from the fused calls too; no warning is given."""
        backend, x = self.make_backend(), draw((count,), 1, dtype)
        left = self.put(x, dtype)
        for place in {0, count // 2, count - 1}:
            y = x.copy()
            y[place] = bad
            right, out = self.put(y, dtype), self.blank((count,), dtype)
            assert not math.isfinite(backend.sum_of_squares(right.array))
            assert not math.isfinite(backend.dot_squares(left.array, right.array)[1])
            squares = backend.subtract_squares(left.array, right.array, out.array)
            assert not math.isfinite(squares)
