"""The part of the backend contract about values at and beyond the ends of a dtype's range."""

from abc import ABC, abstractmethod

import numpy as np
import pytest

from gradientmail.algorithm.precision import LARGEST
from gradientmail.backend.base import Backend
from gradientmail.testing.backend_values import draw, put

NOT_FINITE = (np.nan, np.inf, -np.inf)
every_dtype = pytest.mark.parametrize("dtype", LARGEST)
every_count = pytest.mark.parametrize("count", [1, 40_000, 2**20 + 5])


class BackendRange(ABC):
    """``is_finite``, ``clamp``, and what the outer step says of its result."""

    @abstractmethod
    def make_backend(self) -> Backend:
        """The backend under test."""

    @every_dtype
    @every_count
    def test_one_value_that_is_not_finite_is_found_wherever_it_is(
        self, dtype: str, count: int
    ) -> None:
        """First, last, in the middle; two infinities of opposite sign as well."""
        backend = self.make_backend()
        values = np.array(draw((count,), 1, dtype))
        assert backend.is_finite(put(backend, values, dtype).array)
        for value in NOT_FINITE:
            for place in {0, count // 2, count - 1}:
                spoilt = values.copy()
                spoilt[place] = value
                spoilt[-1] = -value if place == 0 < count - 1 else spoilt[-1]
                assert not backend.is_finite(put(backend, spoilt, dtype).array)

    @every_dtype
    def test_sums_that_overflow_are_finite_values(self, dtype: str) -> None:
        """The largest values are finite, however many there are."""
        backend = self.make_backend()
        values = np.full(40_000, LARGEST[dtype], np.float32)
        assert backend.is_finite(put(backend, values, dtype).array)
        assert backend.is_finite(put(backend, np.zeros((0,), np.float32), dtype).array)

    @every_count
    def test_the_outer_step_tells_whether_it_came_out_finite(self, count: int) -> None:
        """Of the master; one value counts wherever it is, and large sums of finite ones do not."""
        assert self._stepped(np.full(count, LARGEST["F32"], np.float32))
        for place in {0, count // 2, count - 1}:
            for value in NOT_FINITE:
                master = np.array(draw((count,), 3))
                master[place] = value
                assert not self._stepped(master)

    def _stepped(self, master: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> bool:
        backend = self.make_backend()
        zero, new_momentum, new_master = (
            put(backend, np.zeros(master.shape, np.float32)).array for _ in range(3)
        )
        return backend.nesterov(
            [(1.0, zero)],
            zero,
            put(backend, master).array,
            beta=0.9,
            lr=0.7,
            new_momentum=new_momentum,
            new_master=new_master,
        )

    @every_dtype
    @every_count
    def test_clamp_brings_everything_within_the_limit(self, dtype: str, count: int) -> None:
        """In place; what lies within stays as it is, and NaN becomes 0."""
        backend = self.make_backend()
        values = np.array(draw((count,), 2, dtype))
        limit = 0.5
        values[: len(NOT_FINITE)] = NOT_FINITE[:count]
        placed = put(backend, values, dtype)
        backend.clamp(placed.array, limit)
        expected = np.clip(np.where(np.isnan(values), np.float32(0), values), -limit, limit)
        assert np.array_equal(placed.values(), expected)

    @every_dtype
    def test_the_largest_values_are_their_own_limit(self, dtype: str) -> None:
        """Infinities become them, and nothing else changes."""
        backend, limit = self.make_backend(), LARGEST[dtype]
        values = np.array([np.inf, -np.inf, limit, -limit, 1.5, -0.25], np.float32)
        placed = put(backend, values, dtype)
        backend.clamp(placed.array, limit)
        assert placed.values().tolist() == [limit, -limit, limit, -limit, 1.5, -0.25]
