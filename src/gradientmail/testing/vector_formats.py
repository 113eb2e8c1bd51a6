"""The formats of payloads on a few numbers in plain Python, as ``Backend.encode`` states them.

Slow, and a second opinion: by tables of all values, searched for the nearest one.
"""

import math
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from gradientmail.algorithm.precision import BLOCK

_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}


def _magnitudes(mantissa_bits: int, bias: int, count: int) -> list[float]:
    """The values of the codes 0 to ``count − 1``, without the sign."""
    found = []
    for code in range(count):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        leading = 1 << mantissa_bits if exponent else 0
        found.append(math.ldexp(leading + mantissa, max(exponent, 1) - bias - mantissa_bits))
    return found


_E4M3, _E2M1 = _magnitudes(3, 7, 127), _magnitudes(1, 1, 8)


def _middles(table: Sequence[float]) -> list[float]:
    return [(x + y) / 2 for x, y in pairwise(table)]


_E4M3_MIDDLES, _E2M1_MIDDLES = _middles(_E4M3), _middles(_E2M1)


class Packed:
    """Numbers that a ``memoryview`` cannot show: of 16 bits, or one without dimensions.

    They lie in the bytes of a buffer, which it keeps alive.
    """

    __slots__ = ("_buffer", "_dtype")

    def __init__(self, buffer: memoryview, dtype: str) -> None:
        """``dtype`` is F32, F16 or BF16."""
        self._buffer = buffer
        self._dtype = dtype

    def __len__(self) -> int:
        """How many."""
        return self._buffer.nbytes // _WIDTHS[self._dtype]

    def __iter__(self) -> Iterator[float]:
        """Each in turn."""
        return iter(self.tolist())

    def __float__(self) -> float:
        """The only one."""
        (value,) = self.tolist()
        return value

    def __getitem__(self, place: slice) -> "Packed":
        """Some of them, in the same memory."""
        start, stop, _ = place.indices(len(self))
        width = _WIDTHS[self._dtype]
        return Packed(self._buffer[start * width : stop * width], self._dtype)

    def tolist(self) -> list[float]:
        """Their values."""
        return _unpack(self._buffer, self._dtype)

    def rounded(self, values: Iterable[float]) -> list[float]:
        """What ``put`` would leave of the values."""
        return _unpack(memoryview(pack(values, self._dtype)), self._dtype)

    def put(self, values: Iterable[float]) -> None:
        """Write all of them, rounded to F32 and then to this format, to nearest even."""
        self._buffer[:] = pack(values, self._dtype)


def pack(values: Iterable[float], dtype: str) -> bytes:
    """The bytes of F32, F16 or BF16 numbers, rounded to F32 first."""
    short = array("f", values)
    if dtype == "F32":
        return short.tobytes()
    if dtype == "F16":
        return b"".join(map(_half, short))
    return array("H", map(_brain, array("I", short.tobytes()))).tobytes()


def _half(value: float) -> bytes:
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", math.copysign(math.inf, value))


def _brain(bits: int) -> int:
    if bits & 0x7FFFFFFF > 0x7F800000:  # NaN, which rounding could make an infinity of
        return bits >> 16 | 0x40
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def _unpack(data: memoryview, dtype: str) -> list[float]:
    if dtype == "F32":
        return array("f", bytes(data)).tolist()
    if dtype == "F16":
        return list(struct.unpack(f"<{data.nbytes // 2}e", data))
    wide = bytearray(2 * data.nbytes)
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    return array("f", bytes(wide)).tolist()


def encode_e4m3(values: Sequence[float]) -> tuple[bytes, float]:
    """Codes and the scale. Of values that are not finite the scale is NaN."""
    if not all(map(math.isfinite, values)):
        return bytes(len(values)), math.nan
    exponent = _exponent(values, 7)
    codes = [
        _nearest(math.ldexp(abs(value), -exponent), _E4M3_MIDDLES)
        | (128 if math.copysign(1.0, value) < 0 else 0)
        for value in values
    ]
    return bytes(codes), math.ldexp(1.0, exponent)


def decode_e4m3(codes: Iterable[int], scale: float) -> Iterator[float]:
    """The values; NaN for the codes that are no number."""
    for code in codes:
        magnitude = _E4M3[code & 127] if code & 127 < len(_E4M3) else math.nan
        yield (-magnitude if code >> 7 else magnitude) * scale


def encode_e2m1(values: Sequence[float]) -> tuple[bytes, bytes]:
    """Codes, two a byte, padded to blocks, and a scale a block; 255, no number, if not finite."""
    packed, scales = bytearray(), bytearray()
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        codes = [0] * BLOCK
        scales.append(255)
        if all(map(math.isfinite, block)):
            exponent = _exponent(block, 2)
            scales[-1] = exponent + 127
            for place, value in enumerate(block):
                code = _nearest(math.ldexp(abs(value), -exponent), _E2M1_MIDDLES)
                codes[place] = code | (8 if value < 0 else 0)
        packed += bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    return bytes(packed), bytes(scales)


def decode_e2m1(packed: Sequence[int], scales: Sequence[int], count: int) -> Iterator[float]:
    """The first ``count`` values; NaN in a block whose scale is no number."""
    for place in range(count):
        code = packed[place // 2] >> 4 * (place % 2) & 15
        power = scales[place // BLOCK]
        scale = math.nan if power == 255 else math.ldexp(1.0, power - 127)
        yield (-_E2M1[code & 7] if code >> 3 else _E2M1[code]) * scale


def _exponent(values: Sequence[float], below: int) -> int:
    largest = max(map(abs, values), default=0.0)
    return min(max(math.frexp(largest)[1] - 1 - below, -126), 127) if largest else 0


def _nearest(magnitude: float, middles: Sequence[float]) -> int:
    """The code of the nearest value, of two equally near the even one; the last for any beyond."""
    code = bisect_left(middles, magnitude)
    tie = code < len(middles) and middles[code] == magnitude
    return code + (tie and code % 2)
