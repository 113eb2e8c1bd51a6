"""The formats of payloads on NumPy arrays, bit by bit as ``Backend.encode`` states them.

E4M3 and E2M1 are arrays of bytes here, and need no package beside NumPy.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache

from gradientmail.backend.numpy_chunks import CHUNK, Values, chunks, np, scratch

BLOCK = 32
"""Elements of an F4 tensor that share a scale."""


type Pieces = Callable[[], Iterator[Values]]
"""Gives the flat fp32 pieces of a tensor, ``CHUNK`` elements each but the last, from the start."""


def pieces_of(x: Values) -> Pieces:
    """The pieces of an array that is in memory."""
    return lambda: (piece for (piece,) in chunks(x))


def convert(source: Values, target: Values, dtype: str) -> None:
    """F32, F16 and BF16, either way. ``ValueError`` for another ``dtype``."""
    if dtype not in ("F32", "F16", "BF16"):
        raise ValueError(f"{dtype!r} is no format that goes without a scale")
    for x, out in chunks(source, target):
        np.copyto(out, x, casting="unsafe")


def _encode_e4m3(pieces: Pieces, data: Values, scale: Values) -> bool:
    magnitudes, codes, others = scratch(data), scratch(data, np.int32), scratch(data, np.int32)
    largest = 0.0
    for piece in pieces():
        # NaN is the largest of all here, and infinity otherwise.
        most = float(np.abs(piece, out=magnitudes[: piece.size]).max())
        if not math.isfinite(most):
            return False
        largest = max(largest, most)
    # A subnormal's exponent field reads -127; its true exponent is less, and both are clamped.
    exponent = min(max(math.frexp(largest)[1] - 1 - 7, -126), 127) if largest else 0
    scale.fill(2.0**exponent)
    inverse = np.float32(2.0**-exponent)
    for piece, (target,) in zip(pieces(), chunks(data), strict=True):
        count = piece.size
        scaled = np.multiply(piece, inverse, out=magnitudes[:count])
        np.abs(scaled, out=scaled)
        code = _e4m3_codes(scaled, codes[:count], others[:count])
        # The sign bit of -0 too: the bit 31 of an int32 comes down with its copies.
        sign = np.right_shift(piece.view(np.int32), 24, out=others[:count])
        np.bitwise_and(sign, 128, out=sign)
        np.bitwise_or(code, sign, out=code)
        np.copyto(target, code, casting="unsafe")
    return True


def _e4m3_codes(scaled: Values, code: Values, other: Values) -> Values:
    """Codes of magnitudes up to 256, in ``code``; ``other`` is scratch, as is ``scaled``.

    Below 2^-6 the values are even steps of 2^-9: what adding 2^14, whose unit of rounding that is,
    leaves in the last bits. From there on a code is the fp32 bits without the last 20, and without
    the difference of the biases, rounded to even by adding half a unit less one, and the bit that
    will be the last. The first is too large above, the second too small below.
    """
    bits = scaled.view(np.int32)
    np.right_shift(bits, 20, out=code)
    np.bitwise_and(code, 1, out=code)
    np.add(code, bits, out=code)
    np.add(code, 0x7FFFF - ((127 - 7) << 23), out=code)
    np.right_shift(code, 20, out=code)
    np.maximum(code, 8, out=code)
    np.add(scaled, np.float32(2.0**14), out=scaled)
    np.subtract(bits, int(np.float32(2.0**14).view(np.int32)), out=other)
    return np.minimum(code, other, out=code)


@cache
def _e4m3_values() -> Values:
    """The value of every byte."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    leading = np.where(exponent > 0, 8, 0)
    values = np.ldexp((leading + mantissa).astype(np.float32), np.maximum(exponent, 1) - 10)
    values[127] = math.nan
    return np.concatenate([values, -values]).astype(np.float32)


def _decode_e4m3(data: Values, scale: Values, targets: Iterator[Values]) -> Iterator[Values]:
    table, factor = _e4m3_values(), np.float32(scale[()])
    for (codes,), target in zip(chunks(data), targets, strict=True):
        np.take(table, codes, out=target, mode="clip")
        yield np.multiply(target, factor, out=target)


def _blocks(data: Values, scale: Values) -> Iterator[tuple[Values, Values]]:
    """The codes and the scales of each piece: CHUNK is even, and whole blocks."""
    for start in range(0, scale.size, CHUNK // BLOCK):
        stop = start + CHUNK // BLOCK
        yield data[start * BLOCK // 2 : stop * BLOCK // 2], scale[start:stop]


def _encode_e2m1(pieces: Pieces, data: Values, scale: Values) -> bool:
    finite = True
    for values, (packed, scales) in zip(pieces(), _blocks(data, scale), strict=True):
        padding = -values.size % BLOCK
        whole = np.append(values, np.zeros(padding, np.float32)) if padding else values
        finite &= _encode_blocks(whole, packed, scales)
    return finite


# The fp32 whose unit of rounding is 1, plus what the codes of steps 1/2, 1 and 2 are offset by.
_STEP_HALF, _STEP_1, _STEP_2 = (np.float32(2.0**23 + offset) for offset in (0, 2, 4))
_LARGEST_CODE = np.float32(2.0**23 + 7)
_HALF, _TWO = np.float32(0.5), np.float32(2.0)


def _encode_blocks(x: Values, packed: Values, scales: Values) -> bool:
    """One piece of whole blocks; whether all of it is finite."""
    magnitude = np.abs(x)
    field = _exponent_fields(magnitude)
    np.copyto(scales, field, casting="unsafe")
    inverse = ((254 - field) << 23).astype(np.int32).view(np.float32)
    blocks = magnitude.reshape(-1, BLOCK)
    np.multiply(blocks, inverse[:, None], out=blocks)
    # Codes 0-4 are steps of 1/2, 4-6 of 1, 6-7 of 2: a code is the least of three roundings. From
    # 2**23 on fp32 has steps of 1, so a sum there rounds to nearest even, once, to a whole number.
    code = np.multiply(magnitude, _TWO)
    np.add(code, _STEP_HALF, out=code)
    other = np.add(magnitude, _STEP_1)
    np.minimum(code, other, out=code)
    np.multiply(magnitude, _HALF, out=other)
    np.add(other, _STEP_2, out=other)
    np.minimum(code, other, out=code)
    np.minimum(code, _LARGEST_CODE, out=code)
    codes = code.view(np.int32).astype(np.uint8)
    np.bitwise_or(codes, np.left_shift((x < 0.0).view(np.uint8), 3), out=codes)
    pairs = codes.reshape(-1, 2)
    np.bitwise_or(pairs[:, 0], np.left_shift(pairs[:, 1], 4), out=packed)
    return bool(field.max() < 255 - 2)


def _exponent_fields(magnitude: Values) -> Values:
    """``k + 127`` of each block; 127 for one of zeros."""
    largest = magnitude
    for _ in range(BLOCK.bit_length() - 1):  # in pairs: a reduction of short rows is slow
        largest = np.maximum(largest[::2], largest[1::2])
    field = np.maximum((largest.view(np.int32) >> 23) - 2, 1)
    field[largest == 0.0] = 127
    return field


@cache
def _e2m1_pairs() -> Values:
    """Both values of a byte as one 64-bit word, so that one look-up gives two elements."""
    magnitudes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    values = np.concatenate([magnitudes, -magnitudes])
    return np.stack([np.tile(values, 16), values.repeat(16)], axis=1).view(np.uint64).reshape(-1)


@cache
def _e8m0_values() -> Values:
    """``2^(byte − 127)`` of every byte; the last is no number."""
    values = np.ldexp(np.float32(1.0), np.arange(256) - 127)
    values[255] = math.nan
    return values.astype(np.float32)


def _decode_e2m1(data: Values, scale: Values, targets: Iterator[Values]) -> Iterator[Values]:
    pairs, powers = _e2m1_pairs(), _e8m0_values()
    for target, (packed, scales) in zip(targets, _blocks(data, scale), strict=True):
        values = np.take(pairs, packed, mode="clip").view(np.float32).reshape(-1, BLOCK)
        factors = np.take(powers, scales, mode="clip")[:, None]
        if target.size % BLOCK:
            np.copyto(target, np.multiply(values, factors).reshape(-1)[: target.size])
        else:
            np.multiply(values, factors, out=target.reshape(-1, BLOCK))
        yield target


ENCODERS: dict[str, Callable[[Pieces, Values, Values], bool]] = {
    "F8_E4M3": _encode_e4m3,
    "F4": _encode_e2m1,
}
"""Write data and scale; False, and what was written means nothing, when a value is not finite."""

DECODERS: dict[str, Callable[[Values, Values, Iterator[Values]], Iterator[Values]]] = {
    "F8_E4M3": _decode_e4m3,
    "F4": _decode_e2m1,
}
"""Read data and scale into the pieces that are given, and yield each when it is written."""
