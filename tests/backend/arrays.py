"""Arrays of a backend over memory that the test can see, so that a test knows no framework.

PyTorch is what the expected values are computed in, whatever the backend.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from gradientmail.backend.base import Backend
from gradientmail.backend.mlx import MlxBackend
from gradientmail.backend.numpy import NumpyBackend
from gradientmail.backend.torch import TorchBackend
from gradientmail.schema import BITS, TensorSpec

BACKENDS: list[Backend] = [TorchBackend(), NumpyBackend(), MlxBackend()]
"""The backends that the tests of the algorithm run over."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Placed:
    """A backend's array and the memory under it."""

    array: Any
    memory: memoryview
    spec: TensorSpec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def bytes(self) -> bytes:
        return bytes(self.memory)

    def tensor(self) -> torch.Tensor:
        """A copy of what the memory holds now."""
        if not self.spec.count:
            return torch.empty(self.spec.shape, dtype=DTYPES[self.spec.dtype])
        raw = torch.frombuffer(bytearray(self.memory), dtype=DTYPES[self.spec.dtype])
        return raw.view(self.spec.shape)


def blank(backend: Backend, dtype: str, shape: tuple[int, ...]) -> Placed:
    """An array with old content: 0xff is NaN in every float format."""
    spec = TensorSpec("x", dtype, shape)
    memory = memoryview(bytearray(b"\xff" * (spec.count * BITS[dtype] // 8)))
    return Placed(backend.array(memory, dtype, shape), memory, spec)


def put(backend: Backend, values: torch.Tensor) -> Placed:
    """An array with these values, dtype and shape."""
    placed = blank(backend, _NAMES[values.dtype], tuple(values.shape))
    values = values.contiguous()
    placed.memory[:] = ctypes.string_at(values.data_ptr(), placed.memory.nbytes)
    return placed


def assert_near(found: torch.Tensor, expected: torch.Tensor, *, rtol: float, atol: float) -> None:
    """Every element within ``atol + rtol·|expected|``; ``torch.testing`` is slow to import."""
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs()
    bound = atol + rtol * expected.double().abs()
    assert (error <= bound).all(), f"off by {float((error - bound).max())} more than allowed"


def put_bytes(backend: Backend, data: bytes, dtype: str, shape: tuple[int, ...]) -> Placed:
    """An array over these bytes, read-only as a fetched payload is."""
    memory = memoryview(data)
    return Placed(backend.array(memory, dtype, shape), memory, TensorSpec("x", dtype, shape))
