"""zstd: a payload whose tensors are byte-shuffled, compressed as one frame of level 1.

Shuffling puts all first bytes of a tensor's elements first, then all second bytes, and so on:
exponents of neighbours are alike, and next to one another they compress. Formats of a byte or
less stay as they are, and so does the header.

Decompression trusts nothing: it takes memory of the order of the expected payload, whatever the
stored bytes claim, and accepts exactly one frame and no byte more (frame format: RFC 8878).
"""

from collections.abc import Buffer, Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from gradientmail.errors import MissingExtra, PayloadCorrupt
from gradientmail.exchange.payload import PayloadLayout, Slot
from gradientmail.schema import BITS

type Take = Callable[[int], memoryview]

_LEVEL = 1
_CHUNK = 2**18
"""Bytes that are shuffled at a time: they stay in the processor's cache."""
_WINDOW = 2**23
"""Bytes of history that every decoder should be able to keep (RFC 8878, 3.1.1.1.2)."""


def compress(layout: PayloadLayout, payload: Buffer, take: Take) -> memoryview:
    """The stored form of ``payload``, which is one of ``layout`` with its own header.

    Buffers come from ``take``. The same payload gives the same bytes with one version of zstd.
    """
    source = memoryview(payload).cast("B")
    if source.nbytes != layout.nbytes:
        raise ValueError(f"payload has {source.nbytes} bytes, its layout {layout.nbytes}")
    zstandard = require_zstandard()
    if any(map(_is_wide, layout.slots.values())):
        source = _each_slot(layout.slots, source, take(layout.nbytes), shuffle)
    out = take(_bound(layout.nbytes))
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    return out[: compressor.stream_reader(source, size=source.nbytes).readinto(out)]


def decompress(layout: PayloadLayout, stored: Buffer, take: Take) -> memoryview:
    """The payload of ``layout`` that ``stored`` is the stored form of, in a buffer from ``take``.

    ``PayloadCorrupt`` when it is not exactly one frame holding these tensors and a header for them,
    which need not be the one that this package writes.
    """
    zstandard = require_zstandard()
    source = memoryview(stored).cast("B")
    try:
        nbytes = _check_frame(zstandard, source, layout)
        out = _read_frame(zstandard, source, take(nbytes or layout.most_bytes), nbytes)
    except zstandard.ZstdError as error:
        raise PayloadCorrupt(f"payload is not valid zstd: {error}") from None
    slots = layout.check(out)
    if not any(map(_is_wide, slots.values())):
        return out
    return _each_slot(slots, out, take(out.nbytes), unshuffle)


def require_zstandard() -> Any:
    """The zstandard module; ``MissingExtra`` without it."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtra("zstd", "zstandard") from None
    return zstandard


def _bound(nbytes: int) -> int:
    """The most bytes that a frame of ``nbytes`` has (``ZSTD_compressBound``, rounded up)."""
    return nbytes + nbytes // 256 + 1024


def _check_frame(zstandard: Any, source: memoryview, layout: PayloadLayout) -> int | None:
    """Refuse, before any decoding, what cannot be one frame of a payload.

    How many bytes it says that it holds, None if it does not say.
    """
    frame = zstandard.get_frame_parameters(source)
    nbytes = None if frame.content_size == zstandard.CONTENTSIZE_UNKNOWN else frame.content_size
    data = layout.nbytes - len(layout.header)
    if nbytes is not None and not data < nbytes <= layout.most_bytes:
        raise PayloadCorrupt(f"payload should have {layout.nbytes} bytes, not {nbytes}")
    blocks = 16 + layout.most_bytes // 256
    end = _frame_end(source, zstandard.frame_header_size(source), blocks)
    if end + 4 * frame.has_checksum != source.nbytes:
        raise PayloadCorrupt("compressed payload is truncated or does not end with its frame")
    return nbytes


def _frame_end(source: memoryview, position: int, blocks: int) -> int:
    """Where the blocks of a frame end; the first is at ``position`` (RFC 8878, 3.1.1.2).

    No encoder makes more than ``blocks`` of them; walking on would only take time.
    """
    for _ in range(blocks):
        if position + 3 > source.nbytes:
            break
        block = int.from_bytes(source[position : position + 3], "little")
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        position += 3 + (1 if kind == 1 else size)  # kind 1: one byte, ``size`` times
        if last:
            return position
    raise PayloadCorrupt("compressed payload is truncated, or cut into too many blocks")


def _read_frame(
    zstandard: Any, source: memoryview, out: memoryview, nbytes: int | None
) -> memoryview:
    """The frame's content in ``out``, all of which it fills if it is to have ``nbytes``."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=max(out.nbytes, _WINDOW))
    reader = decompressor.stream_reader(source)
    read = reader.readinto(out)
    if read != (nbytes or read) or reader.read(1):
        raise PayloadCorrupt(f"compressed payload does not hold {nbytes or out.nbytes} bytes")
    return out[:read]


# Shuffling


def _width(slot: Slot) -> int:
    return BITS[slot.dtype] // 8


def _is_wide(slot: Slot) -> bool:
    """Whether shuffling changes anything."""
    return _width(slot) > 1 and slot.nbytes > _width(slot)


def _each_slot(
    slots: Mapping[str, Slot],
    source: memoryview,
    out: memoryview,
    move: Callable[[memoryview, memoryview, int], None],
) -> memoryview:
    """``out``, having ``source`` in it with the wide tensors moved and all else copied."""
    copied = 0
    for slot in slots.values():
        if _is_wide(slot):
            out[copied : slot.start] = source[copied : slot.start]
            move(source[slot.start : slot.stop], out[slot.start : slot.stop], _width(slot))
            copied = slot.stop
    out[copied:] = source[copied:]
    return out


@cache
def _numpy() -> ModuleType | None:
    """NumPy if it is there: several times as fast as slicing, and other threads run meanwhile."""
    try:
        import numpy  # noqa: ICN001
    except ImportError:
        return None
    return numpy


def shuffle(source: memoryview, out: memoryview, width: int) -> None:
    """Write the first bytes of all elements, each of ``width`` bytes, then the second ones."""
    (slice_shuffle if _numpy() is None else numpy_shuffle)(source, out, width)


def unshuffle(source: memoryview, out: memoryview, width: int) -> None:
    """Undo ``shuffle``."""
    (slice_unshuffle if _numpy() is None else numpy_unshuffle)(source, out, width)


def slice_shuffle(source: memoryview, out: memoryview, width: int) -> None:
    """``shuffle`` by slices of ``bytes``, ten times as fast as those of a ``memoryview``."""
    count, step = source.nbytes // width, _CHUNK // width
    for first in range(0, count, step):
        last = min(first + step, count)
        chunk = source[first * width : last * width].tobytes()
        for byte in range(width):
            out[byte * count + first : byte * count + last] = chunk[byte::width]


def slice_unshuffle(source: memoryview, out: memoryview, width: int) -> None:
    """``unshuffle`` by slices of a ``bytearray``."""
    count, step = source.nbytes // width, _CHUNK // width
    for first in range(0, count, step):
        last = min(first + step, count)
        chunk = bytearray((last - first) * width)
        for byte in range(width):
            chunk[byte::width] = source[byte * count + first : byte * count + last]
        out[first * width : last * width] = chunk


def numpy_shuffle(source: memoryview, out: memoryview, width: int) -> None:
    """``shuffle`` by conversions that keep the lowest byte, which processors do many at a time.

    The byte wanted is the lowest of an element that is read so many bytes later. There is no such
    element at the end, so the last one is moved by itself.
    """
    numpy = _numpy()
    assert numpy is not None  # noqa: S101
    count, step = source.nbytes // width, _CHUNK // width
    shifted = numpy.ndarray((width, count - 1), f"<u{width}", source, strides=(1, width))
    planes = numpy.frombuffer(out, numpy.uint8).reshape(width, count)
    for first in range(0, count - 1, step):
        chunk = slice(first, min(first + step, count - 1))
        numpy.copyto(planes[:, chunk], shifted[:, chunk], casting="unsafe")
    planes[:, -1] = numpy.frombuffer(source[-width:], numpy.uint8)


def numpy_unshuffle(source: memoryview, out: memoryview, width: int) -> None:
    """``unshuffle`` by joining bytes to halves of elements, and halves to elements."""
    numpy = _numpy()
    assert numpy is not None  # noqa: S101
    elements = numpy.frombuffer(out, f"<u{width}")
    planes = numpy.frombuffer(source, numpy.uint8).reshape(width, -1)
    step = min(_CHUNK // width, len(elements))
    scratch = numpy.empty(step, "<u2")
    half, whole = (numpy.empty(step if width == 4 else 0, kind) for kind in ("<u2", "<u4"))
    for first in range(0, len(elements), step):
        chunk, joined = planes[:, first : first + step], elements[first : first + step]
        if width == 2:
            _join(numpy, chunk[0], chunk[1], joined, scratch)
            continue
        halves = half[: len(joined)]
        _join(numpy, chunk[0], chunk[1], halves, scratch)
        numpy.copyto(joined, halves)
        _join(numpy, chunk[2], chunk[3], halves, scratch)
        _put_above(numpy, halves, joined, whole)


def _join(numpy: ModuleType, low: Any, high: Any, out: Any, scratch: Any) -> None:
    """Fill ``out`` with elements of the lower halves ``low`` and the upper halves ``high``."""
    numpy.copyto(out, low)
    _put_above(numpy, high, out, scratch)


def _put_above(numpy: ModuleType, high: Any, out: Any, scratch: Any) -> None:
    """Give the elements of ``out``, which fill their lower halves, ``high`` as upper ones.

    Widened with zeros and put in half an element later: a shift that costs nothing.
    """
    half, widened = high.itemsize, scratch[: len(out)]
    numpy.copyto(widened, high)
    later = out.view(numpy.uint8)[half:]
    numpy.bitwise_or(later, widened.view(numpy.uint8)[:-half], out=later)
