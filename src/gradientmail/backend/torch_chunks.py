"""CPU tensors in pieces that stay in the processor's second-level cache.

Under 32,768 elements PyTorch stays on the calling thread, whatever its number of threads.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat

from gradientmail.errors import MissingExtra

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise MissingExtra("torch", "torch") from error

__all__ = [
    "CHUNK",
    "Tensor",
    "again",
    "chunks",
    "constant",
    "fp32_pieces",
    "pieces",
    "scratch",
    "torch",
]

CHUNK = 31 * 1024
"""Elements worked on at a time: under PyTorch's 32,768, whole F4 blocks, whole rows of sums."""


def pieces(x: Tensor) -> Sequence[Tensor]:
    """Flat pieces of a contiguous array, in order; none of an empty one."""
    if x.numel() <= CHUNK:  # cutting costs more than adding two small arrays does
        return (x.view(-1),) if x.numel() else ()
    return x.view(-1).split(CHUNK)


def chunks(*arrays: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The pieces of arrays of one size, in step."""
    return zip(*map(pieces, arrays), strict=True)


def scratch(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for one piece of ``like``."""
    return torch.empty(min(like.numel(), CHUNK), dtype=dtype, device="cpu")


def again(memory: Tensor, like: Tensor) -> Iterable[Tensor]:
    """``memory``, of ``scratch``, for each piece of ``like`` in turn, at that piece's size.

    Making a view costs a quarter of what adding two pieces does, so that two serve for all.
    """
    whole, rest = divmod(like.numel(), CHUNK)
    return chain(repeat(memory, whole), (memory[:rest],) if rest else ())


def fp32_pieces(x: Tensor) -> Iterable[Tensor]:
    """The pieces of ``x`` in F32; of another dtype, copies that are good until the next one."""
    if x.dtype == torch.float32:
        return pieces(x)
    return map(torch.Tensor.copy_, again(scratch(x), x), pieces(x))


def constant(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """An operand for many chunks; a Python number would be converted anew for each of them."""
    return torch.tensor(value, dtype=dtype, device="cpu")
