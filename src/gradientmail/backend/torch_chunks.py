"""CPU tensors in pieces that stay in the processor's second-level cache.

Under 32,768 elements PyTorch stays on the calling thread, whatever its number of threads. Where it
has but one, pieces are four times as large: a quarter as many calls go over the same elements.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, repeat

from gradientmail.backend.base import fp32_factors
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
    "cut",
    "factors",
    "fp32_pieces",
    "piece_size",
    "pieces",
    "scratch",
    "torch",
]

CHUNK = 31 * 1024
"""Elements worked on at a time: under PyTorch's 32,768, whole F4 blocks, whole rows of sums."""


VIEWS = 32
"""Pieces of an array that exist at a time: making each by itself takes nearly twice as long."""


def piece_size() -> int:
    """Elements in a piece of a pass that begins now, a multiple of ``CHUNK``.

    To be asked once a pass: PyTorch's number of threads may change at any time.
    """
    return 4 * CHUNK if torch.get_num_threads() == 1 else CHUNK


def cut(flat: Tensor, size: int) -> Iterator[Tensor]:
    """Pieces of ``size`` of a flat array, made as they are needed, ``VIEWS`` at a time.

    All at once would be thousands of objects, which set off the garbage collector, for nothing.
    """
    if flat.numel() <= VIEWS * size:
        return iter(flat.split(size))
    return chain.from_iterable(some.split(size) for some in flat.split(VIEWS * size))


def pieces(x: Tensor, size: int = CHUNK) -> Iterable[Tensor]:
    """Flat pieces of a contiguous array, in order; none of an empty one."""
    if x.numel() <= size:  # cutting costs more than adding two small arrays does
        return (x.view(-1),) if x.numel() else ()
    return cut(x.view(-1), size)


def chunks(*arrays: Tensor, size: int = CHUNK) -> Iterator[tuple[Tensor, ...]]:
    """The pieces of arrays of one size, in step."""
    return zip(*(pieces(array, size) for array in arrays), strict=True)


def scratch(like: Tensor, dtype: torch.dtype = torch.float32, size: int = CHUNK) -> Tensor:
    """Memory for one piece of ``like``."""
    return torch.empty(min(like.numel(), size), dtype=dtype, device="cpu")


def again(memory: Tensor, like: Tensor) -> Iterable[Tensor]:
    """``memory``, of ``scratch``, for each piece of ``like`` in turn, at that piece's size.

    Making a view costs a quarter of what adding two pieces does, so that two serve for all.
    """
    whole, rest = divmod(like.numel(), max(memory.numel(), 1))
    return chain(repeat(memory, whole), (memory[:rest],) if rest else ())


def fp32_pieces(x: Tensor, size: int = CHUNK) -> Iterable[Tensor]:
    """The pieces of ``x`` in F32; of another dtype, copies that are good until the next one."""
    if x.dtype == torch.float32:
        return pieces(x, size)
    return map(torch.Tensor.copy_, again(scratch(x, size=size), x), pieces(x, size))


def constant(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """An operand for many chunks; a Python number would be converted anew for each of them."""
    return torch.tensor(value, dtype=dtype, device="cpu")


def factors(scale: float) -> list[Tensor]:
    """``fp32_factors`` of a coefficient, as operands."""
    return [constant(factor) for factor in fp32_factors(scale)]
