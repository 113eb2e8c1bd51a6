"""Payloads: tensors in one buffer, in the bytes that the safetensors library would write.

The format (https://github.com/huggingface/safetensors#format): the header's length as 8 bytes
(little endian), the header, the data. The header is JSON, ``{name: {"dtype", "shape",
"data_offsets"}}``, offsets counting from the end of the header.

The library's own serializer orders tensors by format, the wider first, then by name, writes the
JSON compactly with non-ASCII characters as they are, and pads it with spaces to a multiple of 8.
``PayloadLayout`` writes exactly that; a test holds it against the library. Because of the order
every tensor is aligned to its elements when the buffer is.
"""

import hashlib
import json
from collections.abc import Buffer, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gradientmail.errors import PayloadCorrupt, ProtocolError
from gradientmail.exchange import fields
from gradientmail.schema import BITS, TensorSpec

_FILE_ORDER = ("F32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "F4")
"""The serializer's order of formats."""

CACHE_LINE = 64
"""Bytes. What begins in the middle of one takes a quarter longer to copy to."""
_LENGTH_BYTES = 8
_RESERVED = "__metadata__"
"""The header's entry for free text, which therefore cannot be a tensor."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies: its bytes are ``buffer[start:stop]`` of the whole payload."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.stop - self.start


class PayloadLayout:
    """The form of all payloads that hold these tensors.

    ``specs``: as given. ``header``: the bytes before the data, the length included. ``nbytes``:
    of the whole payload. ``slots``: by name, in the order of the data.
    """

    __slots__ = ("header", "nbytes", "slots", "specs")

    specs: tuple[TensorSpec, ...]
    header: bytes
    nbytes: int
    slots: Mapping[str, Slot]

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        """Lay out ``specs``, in any order; ``ValueError`` for what no payload can hold."""
        self.specs = tuple(specs)
        for spec in self.specs:
            _check_spec(spec)
        if len({spec.name for spec in self.specs}) != len(self.specs):
            raise ValueError("two tensors of a payload have the same name")
        ordered = sorted(self.specs, key=lambda spec: (_FILE_ORDER.index(spec.dtype), spec.name))
        ends = [0]
        for spec in ordered:
            ends.append(ends[-1] + spec.nbytes)
        self.header = _header(ordered, ends)
        base = len(self.header)
        self.nbytes = base + ends[-1]
        self.slots = MappingProxyType(
            {
                spec.name: Slot(spec.dtype, spec.shape, base + start, base + stop)
                for spec, start, stop in zip(ordered, ends[:-1], ends[1:], strict=True)
            }
        )

    def blank(self, take: Callable[[int], memoryview]) -> memoryview:
        """A buffer of ``nbytes`` from ``take``, header written, data whatever was there.

        Where ``take`` gives whole pages the data begins at a cache line, which copying wants.
        """
        lead = -len(self.header) % CACHE_LINE
        buffer = take(lead + self.nbytes)[lead:]
        buffer[: len(self.header)] = self.header
        return buffer

    def written(self, counts: Mapping[str, int]) -> int:
        """Up to which byte a payload is complete: ``counts`` elements of each tensor are written.

        Whole bytes of them, from the first element on; none of a tensor that is not there.
        """
        for name, slot in self.slots.items():
            stop = slot.start + counts.get(name, 0) * BITS[slot.dtype] // 8
            if name not in counts or stop < slot.stop:
                return stop
        return self.nbytes

    @property
    def most_header(self) -> int:
        """Bytes of the longest header that is read: another order, padding, some free text."""
        return 8 * len(self.header) + 2**16

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest payload that is read."""
        return self.nbytes - len(self.header) + _LENGTH_BYTES + self.most_header

    def check(self, buffer: Buffer) -> Mapping[str, Slot]:
        """The slots of ``buffer``, which must hold exactly these tensors, else ``PayloadCorrupt``.

        Its header may be another valid one: another order, padding, free text. The data itself is
        not looked at. Takes memory of the order of the own header, whatever the bytes are.
        """
        view = memoryview(buffer).cast("B")
        return self.slots if self.matches(view) else self._foreign(view)

    def matches(self, view: memoryview) -> bool:
        """Whether a payload has this size and header, byte by byte."""
        return view.nbytes == self.nbytes and view[: len(self.header)] == self.header

    def _foreign(self, view: memoryview) -> Mapping[str, Slot]:
        """Slots from a header that is not ours, in the order of the data."""
        entries, base = _read_header(view, limit=self.most_header)
        if entries.keys() != self.slots.keys():
            missing = self.slots.keys() - entries.keys()
            extra = entries.keys() - self.slots.keys()
            raise PayloadCorrupt(
                f"payload lacks tensors {fields.show(sorted(missing))} "
                f"and has others, {fields.show(sorted(extra))}"
            )
        found = {
            name: _read_slot(name, entries[name], expected, base)
            for name, expected in self.slots.items()
        }
        slots = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)))
        end = base
        for name, slot in slots.items():
            if slot.start != end:
                raise PayloadCorrupt(f"payload has a gap or an overlap before tensor {name!r}")
            end = slot.stop
        if end != view.nbytes:
            raise PayloadCorrupt(f"payload has {view.nbytes} bytes, its header describes {end}")
        return MappingProxyType(slots)


def sha256_hex(buffer: Buffer) -> str:
    """sha256 of ``buffer`` as 64 lowercase hexadecimal digits. Other threads run meanwhile."""
    return hashlib.sha256(buffer).hexdigest()


def _check_spec(spec: TensorSpec) -> None:
    if spec.name == _RESERVED:
        raise ValueError(f"a tensor cannot be named {_RESERVED!r}: safetensors keeps that name")
    try:
        spec.name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"tensor name {spec.name!r} cannot be encoded in UTF-8") from None
    if spec.dtype not in _FILE_ORDER:
        raise ValueError(f"tensor {spec.name!r} has dtype {spec.dtype!r}, not one of {_FILE_ORDER}")
    if any(size < 0 for size in spec.shape):
        raise ValueError(f"tensor {spec.name!r} has a negative size in its shape {spec.shape}")
    if spec.count * BITS[spec.dtype] % 8:
        raise ValueError(f"tensor {spec.name!r}, {spec}, does not fill whole bytes; pad it")


def _header(ordered: list[TensorSpec], ends: list[int]) -> bytes:
    entries = {
        spec.name: {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, stop]}
        for spec, start, stop in zip(ordered, ends[:-1], ends[1:], strict=True)
    }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _read_header(view: memoryview, limit: int) -> tuple[dict[str, object], int]:
    """Entries by tensor name, and where the data begins. A header over ``limit`` is not parsed."""
    if view.nbytes < _LENGTH_BYTES:
        raise PayloadCorrupt(f"payload of {view.nbytes} bytes is shorter than a header's length")
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    base = _LENGTH_BYTES + length
    if base > view.nbytes:
        raise PayloadCorrupt(f"payload of {view.nbytes} bytes ends inside its header")
    try:
        entries = fields.parse(view[_LENGTH_BYTES:base], "payload's header", limit)
    except ProtocolError as error:
        raise PayloadCorrupt(str(error)) from None
    if not isinstance(entries, dict):
        raise PayloadCorrupt("payload's header is not a JSON object")
    entries.pop(_RESERVED, None)
    return entries, base


_entry = {
    "dtype": fields.any_text,
    "shape": fields.sequence(fields.integer()),
    "data_offsets": fields.pair(fields.integer(), fields.integer()),
}


def _read_slot(name: str, entry: object, expected: Slot, base: int) -> Slot:
    where = f"payload's entry of tensor {name!r}"
    try:
        member = fields.instance(dict, _entry)(entry, where)
    except ProtocolError as error:
        raise PayloadCorrupt(str(error)) from None
    start, stop = member["data_offsets"]
    if (member["dtype"], member["shape"]) != (expected.dtype, expected.shape):
        raise PayloadCorrupt(
            f"{where} says {member['dtype'][:16]!r} and a shape of {len(member['shape'])} sizes, "
            f"expected {expected.dtype!r} {list(expected.shape)}"
        )
    if stop - start != expected.nbytes:
        raise PayloadCorrupt(f"{where} has {stop - start} bytes, expected {expected.nbytes}")
    return Slot(expected.dtype, expected.shape, base + start, base + stop)
