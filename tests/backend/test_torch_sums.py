"""Sums of large tensors, which PyTorch makes by rows in fp32 where that loses nothing."""

import weakref
from collections.abc import Iterator

import pytest
import torch

from gradientmail.algorithm.diloco import WeightedMean
from gradientmail.algorithm.merge import LARGE, Fold
from gradientmail.backend.torch import TorchBackend
from gradientmail.backend.torch_chunks import CHUNK, VIEWS, cut, piece_size
from gradientmail.backend.torch_sums import ROW, ROWS_FROM
from gradientmail.schema import TensorSpec

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
    assert BACKEND.sum_of_squares(y) == pytest.approx(square, rel=1e-8, abs=0.0)
    assert BACKEND.dot_squares(x, y) == pytest.approx((dot, square), rel=1e-8, abs=1e-8 * length)


@pytest.mark.parametrize("value", [0.1, 1e-14, 1.8669323921203613])
def test_equal_values_round_one_way_by_less_than_the_stated_error(value: float) -> None:
    """The last one is the worst of some hundreds."""
    x = torch.full((2**20,), value)
    expected = float(x[0].double()) ** 2 * 2**20
    assert BACKEND.sum_of_squares(x) == pytest.approx(expected, rel=3e-7, abs=0.0)
    zero = torch.zeros_like(x)
    assert BACKEND.subtract_squares(x, zero, zero) == pytest.approx(expected, rel=3e-7, abs=0.0)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def everything(count: int, dtype: torch.dtype) -> tuple[list[float], list[torch.Tensor]]:
    """All passes that go by pieces, over the same numbers."""
    draw = torch.Generator().manual_seed(count)
    x, y, z = (torch.randn(count, generator=draw).to(dtype) for _ in range(3))
    outs = [torch.zeros(count) for _ in range(6)] + [torch.zeros(count, dtype=dtype)]
    numbers = [BACKEND.dot(x, y), *BACKEND.dot_squares(x, y), BACKEND.sum_of_squares(x)]
    numbers.append(BACKEND.subtract_squares(x, y, outs[0]))
    numbers.append(BACKEND.subtract_squares(x, y, outs[6]))
    BACKEND.add(x, y, outs[1])
    BACKEND.combine(((0.3, x), (0.7, y)), outs[2])
    BACKEND.accumulate(outs[3], x, keep=0.0, scale=0.3)
    BACKEND.accumulate(outs[3], y, keep=0.5, scale=0.7)
    numbers.append(
        BACKEND.nesterov(
            ((0.3, x), (0.7, y)),
            outs[3].clone(),
            z,
            beta=0.9,
            lr=0.7,
            new_momentum=outs[4],
            new_master=outs[5],
        )
    )
    BACKEND.clamp(outs[5], 0.5)
    for quantized, data, scale in formats(count):
        outs += [data, scale, torch.zeros(count), torch.zeros(count, dtype=dtype)]
        BACKEND.encode(x.float(), quantized, data, scale)
        BACKEND.decode(data, quantized, scale, outs[-2])
        numbers.append(
            BACKEND.encode_difference(x, y, quantized, data, scale, lambda: torch.zeros(count))
        )
        BACKEND.add_decoded(z, data, quantized, scale, outs[-1], lambda: torch.zeros(count))
    return [*numbers, BACKEND.is_finite(outs[4])], outs


def formats(count: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Quantized formats, with memory for so many elements and for their scales."""
    blocks = -(-count // 32)
    e2m1 = torch.zeros(16 * blocks, dtype=torch.uint8), torch.zeros(blocks, dtype=torch.uint8)
    e4m3 = torch.zeros(count, dtype=torch.float8_e4m3fn), torch.zeros(())
    return [("F4", *e2m1), ("F8_E4M3", *e4m3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, CHUNK, 2 * CHUNK + 1, ROWS_FROM + 5, 9 * CHUNK + 300])
def test_the_bits_do_not_depend_on_the_number_of_threads(
    threads: None, count: int, dtype: torch.dtype
) -> None:
    """With one thread pieces are larger; a run's nodes need not have as many."""
    torch.set_num_threads(1)
    assert piece_size() == 4 * CHUNK
    numbers, outs = everything(count, dtype)
    torch.set_num_threads(2)
    assert piece_size() == CHUNK
    others, other_outs = everything(count, dtype)
    assert numbers == others
    for one, other in zip(outs, other_outs, strict=True):
        assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


@pytest.mark.parametrize("count", [20_000, LARGE - 1, LARGE, 40_000, 2**16, 100_003, 131_071])
def test_the_cosine_does_not_depend_on_the_number_of_threads(threads: None, count: int) -> None:
    """From 32,768 elements on PyTorch sums on several threads, in another order."""
    specs = [TensorSpec("w", "F32", (count,))]
    found: set[float | None] = set()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        for seed in range(5):
            draw = torch.Generator().manual_seed(count + seed)
            fold = Fold(WeightedMean(), specs, BACKEND, lambda size: memoryview(bytearray(size)))
            for _ in range(2):
                assert fold.add({"w": torch.randn(count, generator=draw)}, 1.0)
            found.add(fold.merged().cosine)
    assert len(found) == 5


@pytest.mark.parametrize("count", [1, VIEWS * 3, VIEWS * 9 + 2])
def test_few_pieces_exist_at_a_time(count: int) -> None:
    """Thousands would set off the garbage collector in the middle of a pass."""
    x = torch.arange(count)
    seen: list[weakref.ref[torch.Tensor]] = []
    found: list[int] = []
    for piece in cut(x, 3):
        seen.append(weakref.ref(piece))
        found += piece.tolist()
        assert sum(one() is not None for one in seen) <= VIEWS
    assert found == x.tolist()
    assert len(seen) == -(-count // 3)
