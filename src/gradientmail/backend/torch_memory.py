"""Which tensors of a PyTorch model lie in the same memory."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from gradientmail.backend.torch_chunks import torch

type Tensors = Mapping[str, torch.Tensor]

type _Place = tuple[int, int, str]
"""The addresses of a tensor's first element and of what is behind its last one, and its name."""


BYTE_ADDRESSED = ("cpu", "cuda")
"""Devices on which ``data_ptr`` is an address; on others it may be what stands for a storage."""


class SeparateMemory:
    """That no two tensors of a model lie in the same memory: at first, and at each ``check``."""

    def __init__(self, tensors: Callable[[], Tensors]) -> None:
        """``ValueError`` as ``check_memory``; ``tensors`` gives them as they are at the time."""
        self._tensors = tensors
        self._addresses: list[int] = []
        self.check()

    def check(self) -> None:
        """``ValueError`` as ``check_memory``; looks closely only when a tensor has moved."""
        tensors = self._tensors()
        addresses = list(map(_address, tensors.values()))
        if addresses != self._addresses:
            check_memory(tensors)
            self._addresses = addresses


def check_memory(tensors: Tensors) -> None:
    """``ValueError`` when two of ``tensors`` stand for the same elements, or for some of them.

    Views that lie beside each other, as a recurrent network's weights do, are fine. Tensors without
    memory of their own, as those of some subclasses, are not looked at.
    """
    by_space: dict[tuple[torch.device, int], list[_Place]] = defaultdict(list)
    for name, tensor in tensors.items():
        start, storage = _address(tensor), 0
        if not start or not tensor.numel():
            continue
        if tensor.device.type not in BYTE_ADDRESSED:
            start = int(tensor.storage_offset()) * tensor.element_size()
            storage = tensor.untyped_storage().data_ptr()
        by_space[tensor.device, storage].append((start, start + _length(tensor), name))
    for places in by_space.values():
        for group in _reaching_into_each_other(sorted(places)):
            _check_group(group, tensors)


def _address(tensor: torch.Tensor) -> int:
    """Where its elements begin; 0 where it has no memory of its own."""
    try:
        return tensor.data_ptr()
    except Exception:  # a subclass may say so in any way
        return 0


def _length(tensor: torch.Tensor) -> int:
    """The bytes from its first element to the end of its last one."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum(stride * (size - 1) for size, stride in sizes) + 1) * tensor.element_size()


def _reaching_into_each_other(places: Sequence[_Place]) -> Iterator[list[_Place]]:
    """Groups of ``places``, which are in order, of which each begins before another one ends."""
    group, end = list[_Place](), 0
    for place in places:
        if place[0] >= end and group:
            yield group
            group = list[_Place]()
        group.append(place)
        end = max(end, place[1])
    yield group


def _check_group(group: Sequence[_Place], tensors: Tensors) -> None:
    """They may only be interleaved, as the columns of a matrix are: mark the bytes of each."""
    if len(group) < 2:
        return
    begin, end = group[0][0], max(stop for _, stop, _ in group)
    marks = torch.zeros(end - begin, dtype=torch.bool, device="cpu")

    def marks_of(place: _Place) -> torch.Tensor:
        return _marks_of(marks, tensors[place[2]], place[0] - begin)

    for index, place in enumerate(group):
        if marks_of(place).any():
            marks.zero_()
            for other in group[:index]:  # the first of them that has an element of it
                marks_of(other).fill_(True)
                if marks_of(place).any():
                    raise ValueError(_shared(other[2], place[2]))
        marks_of(place).fill_(True)


def _marks_of(marks: torch.Tensor, tensor: torch.Tensor, start: int) -> torch.Tensor:
    """The marks, one a byte, of a tensor from ``start`` on; what an expanded one repeats once."""
    width, strides = tensor.element_size(), tensor.stride()
    sizes = (size if stride else 1 for size, stride in zip(tensor.shape, strides, strict=True))
    return marks.as_strided((*sizes, width), (*(stride * width for stride in strides), 1), start)


def _shared(*names: str) -> str:
    first, second = sorted(names)
    return (
        f"the tensors {first!r} and {second!r} share memory, so that each commit would write one "
        "over the other; tie parameters by making them one (decoder.weight = encoder.weight, "
        "without .data), which is exchanged once, or clone one of them"
    )
