"""Which tensors of a PyTorch model lie in the same memory."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

from gradientmail.backend.torch_chunks import torch

_WITH_STORAGE = (torch.Tensor, torch.nn.Parameter)
"""Classes of which every tensor has a storage of its own or a part of one."""


def check_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """``ValueError`` when two of ``tensors`` stand for the same elements, or for some of them.

    Views that lie beside each other in one storage, as a recurrent network's weights do, are fine.
    Tensors of subclasses, which may have no storage, are not looked at.
    """
    by_storage: dict[tuple[torch.device, int], dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if tensor.numel() and type(tensor) in _WITH_STORAGE:
            place = tensor.device, tensor.untyped_storage().data_ptr()
            by_storage[place][name] = tensor
    for sharing in by_storage.values():
        if len(sharing) > 1 and not _apart(sharing):
            _check_storage(sharing)


def _apart(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether each of these ends before the next one begins."""
    bounds = sorted(_bounds(tensor) for tensor in tensors.values())
    return all(stop <= start for (_, stop), (start, _) in pairwise(bounds))


def _check_storage(tensors: Mapping[str, torch.Tensor]) -> None:
    """They may only be interleaved, as the columns of a matrix are: mark the bytes of each."""
    length = max(stop for _, stop in map(_bounds, tensors.values()))
    marks = torch.zeros(length, dtype=torch.bool, device="cpu")
    for name, tensor in tensors.items():
        own = _marks_of(marks, tensor)
        if own.any():
            first = next(
                other for other in tensors if _share(marks.zero_(), tensors[other], tensor)
            )
            raise ValueError(
                f"the tensors {first!r} and {name!r} share memory, so that each commit would write "
                "one over the other; tie parameters by making them one (decoder.weight = "
                "encoder.weight, without .data), which is exchanged once, or clone one of them"
            )
        own.fill_(True)


def _share(marks: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> bool:
    _marks_of(marks, x).fill_(True)
    return bool(_marks_of(marks, y).any())


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor covers, and the first behind the last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    length = sum(stride * (size - 1) for size, stride in sizes) + 1
    first, width = int(tensor.storage_offset()), tensor.element_size()
    return first * width, (first + length) * width


def _marks_of(marks: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The marks, one a byte, of what the tensor covers; what an expanded one repeats once."""
    width, strides = tensor.element_size(), tensor.stride()
    sizes = (size if stride else 1 for size, stride in zip(tensor.shape, strides, strict=True))
    return marks.as_strided(
        (*sizes, width),
        (*(stride * width for stride in strides), 1),
        tensor.storage_offset() * width,
    )
