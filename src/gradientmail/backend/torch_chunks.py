"""CPU tensors in pieces that stay in the processor's second-level cache.

Under 32,768 elements PyTorch stays on the calling thread, whatever its number of threads.
"""

from collections.abc import Iterator

from gradientmail.errors import MissingExtra

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise MissingExtra("torch", "torch") from error

__all__ = ["CHUNK", "Tensor", "chunks", "constant", "scratch", "torch"]

CHUNK = 31 * 1024
"""Elements worked on at a time: under PyTorch's 32,768, whole F4 blocks, whole rows of sums."""


def chunks(*arrays: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat pieces of contiguous arrays of one size, in step."""
    if not arrays[0].numel():
        return iter(())
    return zip(*(array.view(-1).split(CHUNK) for array in arrays), strict=True)


def scratch(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for one piece of ``like``."""
    return torch.empty(min(like.numel(), CHUNK), dtype=dtype, device="cpu")


def constant(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """An operand for many chunks; a Python number would be converted anew for each of them."""
    return torch.tensor(value, dtype=dtype, device="cpu")
