"""Sums of large tensors, which PyTorch makes by rows in fp32 where that loses nothing."""

import pytest
import torch

from gradientmail.backend.torch import ROW, ROWS_FROM, TorchBackend
from gradientmail.backend.torch_chunks import CHUNK

BACKEND = TorchBackend()


def test_products_outside_fp32_of_both_signs() -> None:
    """Long enough that even the sums of rows are cut into pieces: one is inf, the next -inf."""
    first, second = CHUNK * ROW, 500_000
    x = torch.full((first + second,), 1e20)
    y = x.clone()
    y[first:] *= -1.0
    expected = float(x[0].double()) ** 2 * (first - second)
    assert BACKEND.dot(x, y) == pytest.approx(expected, rel=1e-9, abs=0.0)
    assert BACKEND.dot_squares(x, y)[0] == pytest.approx(expected, rel=1e-9, abs=0.0)


@pytest.mark.parametrize("count", [ROWS_FROM, ROWS_FROM + 5, 2**20])
def test_rows_are_as_exact_as_stated(count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    x, y = torch.randn(count, generator=draw), torch.randn(count, generator=draw)
    square, length = float(y.double().square().sum()), float(x.double().norm() * y.double().norm())
    dot = float(x.double() @ y.double())
    assert BACKEND.sum_of_squares(y) == pytest.approx(square, rel=3e-9, abs=0.0)
    assert BACKEND.dot_squares(x, y) == pytest.approx((dot, square), rel=3e-9, abs=3e-9 * length)


@pytest.mark.parametrize("value", [0.1, 1e-14, 1.8669323921203613])
def test_equal_values_round_one_way_by_less_than_the_stated_error(value: float) -> None:
    """The last one is the worst of some hundreds."""
    x = torch.full((2**20,), value)
    expected = float(x[0].double()) ** 2 * 2**20
    assert BACKEND.sum_of_squares(x) == pytest.approx(expected, rel=3e-7, abs=0.0)
    zero = torch.zeros_like(x)
    assert BACKEND.subtract_squares(x, zero, zero) == pytest.approx(expected, rel=3e-7, abs=0.0)
