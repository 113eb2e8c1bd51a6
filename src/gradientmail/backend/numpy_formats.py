"""The formats of payloads on NumPy arrays, bit by bit as ``Backend.encode`` states them.

E4M3 and E2M1 are arrays of bytes here, and need no package beside NumPy.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache

from gradientmail.backend.numpy_chunks import CHUNK, Values, chunks, np, scratch

BLOCK = 32
"""Elements of an F4 tensor that share a scale."""


def _convert(source: Values, target: Values, _scale: Values | None) -> None:
    """F32, F16 and BF16, either way."""
    for x, out in chunks(source, target):
        np.copyto(out, x, casting="unsafe")


def _encode_e4m3(x: Values, data: Values, scale: Values) -> None:
    magnitude, codes, other = scratch(x), scratch(x, np.int32), scratch(x, np.int32)
    largest = 0.0
    for (piece,) in chunks(x):
        largest = max(largest, float(np.abs(piece, out=magnitude[: piece.size]).max()))
    # A subnormal's exponent field reads -127; its true exponent is less, and both are clamped.
    exponent = min(max(math.frexp(largest)[1] - 1 - 7, -126), 127) if largest else 0
    scale.fill(2.0**exponent)
    inverse = np.float32(2.0**-exponent)
    for piece, target in chunks(x, data):
        count = piece.size
        scaled = np.multiply(piece, inverse, out=magnitude[:count])
        np.abs(scaled, out=scaled)
        code = _e4m3_codes(scaled, codes[:count], other[:count])
        # The sign bit of -0 too: the bit 31 of an int32 comes down with its copies.
        sign = np.right_shift(piece.view(np.int32), 24, out=other[:count])
        np.bitwise_and(sign, 128, out=sign)
        np.bitwise_or(code, sign, out=code)
        np.copyto(target, code, casting="unsafe")


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


def _decode_e4m3(data: Values, out: Values, scale: Values) -> None:
    table, factor = _e4m3_values(), np.float32(scale[()])
    for codes, target in chunks(data, out):
        np.take(table, codes, out=target, mode="clip")
        np.multiply(target, factor, out=target)


def _block_pieces(x: Values, data: Values, scale: Values) -> Iterator[tuple[Values, ...]]:
    """Pieces of an array, of its F4 codes and of their scales: CHUNK is even and whole blocks."""
    flat = x.reshape(-1)
    for start in range(0, x.size, CHUNK):
        first, block, stop = start // 2, start // BLOCK, start + CHUNK
        yield flat[start:stop], data[first : stop // 2], scale[block : stop // BLOCK]


def _encode_e2m1(x: Values, data: Values, scale: Values) -> None:
    for values, packed, scales in _block_pieces(x, data, scale):
        padding = -values.size % BLOCK
        whole = np.append(values, np.zeros(padding, np.float32)) if padding else values
        _encode_blocks(whole, packed, scales)


# The fp32 whose unit of rounding is 1, plus what the codes of steps 1/2, 1 and 2 are offset by.
_STEP_HALF, _STEP_1, _STEP_2 = (np.float32(2.0**23 + offset) for offset in (0, 2, 4))
_LARGEST_CODE = np.float32(2.0**23 + 7)
_HALF, _TWO = np.float32(0.5), np.float32(2.0)


def _encode_blocks(x: Values, packed: Values, scales: Values) -> None:
    """One piece of whole blocks."""
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


def _decode_e2m1(data: Values, out: Values, scale: Values) -> None:
    pairs, powers = _e2m1_pairs(), _e8m0_values()
    for target, packed, scales in _block_pieces(out, data, scale):
        values = np.take(pairs, packed, mode="clip").view(np.float32).reshape(-1, BLOCK)
        factors = np.take(powers, scales, mode="clip")[:, None]
        if target.size % BLOCK:
            np.copyto(target, np.multiply(values, factors).reshape(-1)[: target.size])
        else:
            np.multiply(values, factors, out=target.reshape(-1, BLOCK))


CODECS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    **dict.fromkeys(("F32", "F16", "BF16"), (_convert, _convert)),
    "F8_E4M3": (_encode_e4m3, _decode_e4m3),
    "F4": (_encode_e2m1, _decode_e2m1),
}
"""How each format is written and read."""
