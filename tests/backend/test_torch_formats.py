"""F4 of large tensors in PyTorch, which work on pieces, many at a time, in two ways."""

import pytest
import torch

from gradientmail.backend.numpy import NumpyBackend
from gradientmail.backend.torch import TorchBackend
from gradientmail.backend.torch_chunks import CHUNK
from gradientmail.backend.torch_formats import BLOCK

BACKEND = TorchBackend()
COUNT = 33 * CHUNK + 45
"""More than the pieces whose scales are written together, and no whole number of blocks."""


def _blank(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = -(-count // BLOCK)
    return (
        torch.full((blocks * BLOCK // 2,), 255, dtype=torch.uint8),
        torch.full((blocks,), 255, dtype=torch.uint8),
    )


def _encoded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale = _blank(x.numel())
    BACKEND.encode(x, "F4", data, scale)
    return data, scale


def _draw(seed: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [0, 110, 112, 113, 114, 125, -110, -124, -126, -148])
@pytest.mark.parametrize("block", [0, COUNT // BLOCK])
def test_a_large_tensor_is_what_numpy_makes_of_it(k: int, block: int) -> None:
    """Also when one block, the first or the last, is so large or so small as to go another way."""
    x = _draw(1)
    x[block * BLOCK : (block + 1) * BLOCK] *= 2.0**k
    data, scale = _encoded(x)
    expected, scales = _blank(COUNT)
    NumpyBackend().encode(x.numpy(), "F4", expected.numpy(), scales.numpy())
    assert torch.equal(data, expected)
    assert torch.equal(scale, scales)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, COUNT - 1])
def test_a_difference_that_is_not_finite(value: float, place: int) -> None:
    """Wherever it is, and whether or not another block goes another way."""
    for other in (1.0, 1e-40):
        x, y = _draw(2), _draw(3)
        x[64:96], y[64:96] = other, 0.0
        data, scale = _blank(COUNT)
        assert BACKEND.encode_difference(x, y, "F4", data, scale, x.clone) is True
        x[place] = value
        assert BACKEND.encode_difference(x, y, "F4", data, scale, x.clone) is False


@pytest.mark.parametrize("offset", [1, 2])
def test_decodes_into_any_place(offset: int) -> None:
    """Two elements are written at a time only where that fits."""
    data, scale = _encoded(_draw(4))
    out, memory = torch.empty(COUNT), torch.full((COUNT + 3,), 7.0)
    BACKEND.decode(data, "F4", scale, out)
    BACKEND.decode(data, "F4", scale, memory[offset : offset + COUNT])
    assert torch.equal(memory[offset : offset + COUNT], out)
    rest = torch.cat([memory[:offset], memory[offset + COUNT :]])
    assert rest.tolist() == [7.0] * 3
