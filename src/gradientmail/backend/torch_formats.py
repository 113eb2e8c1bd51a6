"""The formats of payloads on CPU tensors, bit by bit as ``Backend.encode`` states them.

Encoders read an array piece by piece, from memory or from whatever computes it; decoders write it
so. What is in between stays in the cache, in scratch that is kept from piece to piece.
"""

import math
from collections.abc import Callable, Iterable, Iterator

from gradientmail.backend.torch_chunks import CHUNK, Tensor, chunks, constant, scratch, torch

BLOCK = 32
"""Elements of an F4 tensor that share a scale."""

type Pieces = Callable[[], Iterable[Tensor]]
"""Gives an F32 array from its start, in flat pieces of CHUNK; each is good until the next one."""


def convert(source: Tensor, target: Tensor, dtype: str) -> None:
    """F32, F16 and BF16 into one another, rounded to nearest even."""
    if dtype not in ("F32", "F16", "BF16"):
        raise ValueError(f"unknown format {dtype!r}, or its scale is missing")
    for x, out in chunks(source, target):
        out.copy_(x)


def pieces_of(x: Tensor) -> Pieces:
    """An F32 array that is in memory."""
    return lambda: (piece for (piece,) in chunks(x))


def _encode_e4m3(pieces: Pieces, data: Tensor, scale: Tensor) -> bool:
    largest, values = 0.0, scratch(data)
    for piece in pieces():
        top = float(torch.abs(piece, out=values[: piece.numel()]).amax())
        if not math.isfinite(top):
            return False
        largest = max(largest, top)
    # A subnormal's exponent field reads -127; its true exponent is less, and both are clamped.
    exponent = min(max(math.frexp(largest)[1] - 1 - 7, -126), 127) if largest else 0
    scale.fill_(2.0**exponent)
    inverse = constant(2.0**-exponent)
    for piece, (target,) in zip(pieces(), chunks(data), strict=True):
        # At most 256 after scaling, within the format's 448; the cast rounds to nearest even.
        target.copy_(torch.mul(piece, inverse, out=values[: piece.numel()]))
    return True


_E4M3_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


def _decode_e4m3(data: Tensor, scale: Tensor, targets: Iterable[Tensor]) -> Iterator[Tensor]:
    index = scratch(data, torch.int32)
    for (codes,), target in zip(chunks(data.view(torch.uint8)), targets, strict=True):
        torch.index_select(_E4M3_VALUES, 0, index[: codes.numel()].copy_(codes), out=target)
        yield target.mul_(scale)


_ZERO = constant(0.0)
# The fp32 whose unit of rounding is 1, plus what the codes of steps 1/2, 1 and 2 are offset by.
_STEP_1_2, _STEP_1, _STEP_2 = (constant(2.0**23 + offset) for offset in (0, 2, 4))
_LARGEST_CODE, _BIT_3 = constant(7, torch.uint8), constant(8, torch.uint8)
_NIBBLE, _SIGN_TO_BIT_3 = constant(4, torch.int16), constant(28, torch.int32)
# Exponent fields of fp32: the least of a block, where they begin, k's distance, and none at all.
_LEAST, _EXPONENT = constant(3 << 23, torch.int32), constant(23, torch.int32)
_DOWN, _INVERT, _NONE = (constant(value, torch.int32) for value in (2, 256, 0))
_NOT_FINITE = 255 - 2
"""The scale byte of a block with a NaN or an infinity."""


class _BlockEncoder:
    """F4 of one piece after the other; every view of the scratch is made once."""

    def __init__(self, size: int) -> None:
        """For pieces of ``size`` elements, whole blocks."""

        def blank(dtype: torch.dtype, count: int = size) -> Tensor:
            return torch.empty(count, dtype=dtype, device="cpu")

        self.size = size
        self._magnitude, self._code, self._other = (blank(torch.float32) for _ in range(3))
        self._rows = self._magnitude.view(-1, BLOCK)
        self._row_bits = self._magnitude.view(torch.int32).view(-1, BLOCK)
        self._code_bits = self._code.view(torch.int32)
        self._other_bits = self._other.view(torch.int32)
        self._codes, self._signs = blank(torch.uint8), blank(torch.uint8)
        self._pairs = self._codes.view(torch.int16)
        self._packed = blank(torch.int16, size // 2)
        self._field, self._inverse = (blank(torch.int32, size // BLOCK) for _ in range(2))
        self._zero = blank(torch.bool, size // BLOCK)
        self._factor = self._inverse.view(torch.float32).view(-1, 1)

    def encode(self, x: Tensor, packed: Tensor, scales: Tensor) -> None:
        """Write the codes and scale bytes of ``x``."""
        # The sum turns -0.0 into 0.0: only what is below zero has a sign.
        signed = torch.add(x, _ZERO, out=self._other)
        torch.abs(signed, out=self._magnitude)
        torch.bitwise_right_shift(self._other_bits, _SIGN_TO_BIT_3, out=self._other_bits)
        signs = torch.bitwise_and(self._signs.copy_(self._other_bits), _BIT_3, out=self._signs)
        self._scale(scales)
        torch.mul(self._rows, self._factor, out=self._rows)
        # Codes 0-4 are steps of 1/2, 4-6 of 1, 6-7 of 2: a code is the least of three roundings.
        # From 2**23 on fp32 has steps of 1, so a sum there rounds to nearest even, once, to a
        # whole number, whose last bits are the code.
        code, other = self._code, self._other
        torch.add(_STEP_1_2, self._magnitude, alpha=2.0, out=code)
        torch.minimum(code, torch.add(_STEP_1, self._magnitude, out=other), out=code)
        torch.minimum(code, torch.add(_STEP_2, self._magnitude, alpha=0.5, out=other), out=code)
        codes = torch.minimum(self._codes.copy_(self._code_bits), _LARGEST_CODE, out=self._codes)
        torch.bitwise_or(codes, signs, out=codes)
        torch.bitwise_right_shift(self._pairs, _NIBBLE, out=self._packed)
        packed.copy_(torch.bitwise_or(self._packed, self._pairs, out=self._packed))

    def _scale(self, scales: Tensor) -> None:
        """The bytes ``k + 127`` of the blocks, and the factors ``2^-k``."""
        field = torch.amax(self._row_bits, dim=1, out=self._field)
        torch.eq(field, _NONE, out=self._zero)
        torch.maximum(field, _LEAST, out=field)
        torch.bitwise_right_shift(field, _EXPONENT, out=field)
        field.masked_fill_(self._zero, 127 + 2)
        torch.sub(_INVERT, field, out=self._inverse)
        torch.bitwise_left_shift(self._inverse, _EXPONENT, out=self._inverse)
        scales.copy_(torch.sub(field, _DOWN, out=field))


def _encode_e2m1(pieces: Pieces, data: Tensor, scale: Tensor) -> bool:
    if not data.numel():
        return True
    encoder: _BlockEncoder | None = None
    for piece, packed, scales in zip(
        pieces(), data.split(CHUNK // 2), scale.split(CHUNK // BLOCK), strict=True
    ):
        missing = -piece.numel() % BLOCK
        x = torch.cat([piece, piece.new_zeros(missing)]) if missing else piece
        if encoder is None or encoder.size != x.numel():
            encoder = _BlockEncoder(x.numel())
        encoder.encode(x, packed, scales)
    return all(int(part.amax()) < _NOT_FINITE for (part,) in chunks(scale))


_E2M1 = torch.tensor(  # whatever dtype the user has made the default one
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device="cpu"
)
_E2M1_SIGNED = torch.cat([_E2M1, -_E2M1])
# Both values of a byte as one 64-bit word, so that one look-up gives two elements.
_E2M1_PAIRS = torch.stack([_E2M1_SIGNED.repeat(16), _E2M1_SIGNED.repeat_interleave(16)], 1)
_E2M1_WORDS = _E2M1_PAIRS.view(torch.int64).view(-1)
_E8M0_VALUES = (torch.arange(256, dtype=torch.int32, device="cpu") << 23).view(torch.float32)
_E8M0_VALUES[0], _E8M0_VALUES[255] = 2.0**-127, math.nan


def _decode_e2m1(data: Tensor, scale: Tensor, targets: Iterable[Tensor]) -> Iterator[Tensor]:
    if not data.numel():
        return
    for target, packed, scales in zip(
        targets, data.split(CHUNK // 2), scale.split(CHUNK // BLOCK), strict=True
    ):
        words = torch.index_select(_E2M1_WORDS, 0, packed.int())
        factors = torch.index_select(_E8M0_VALUES, 0, scales.int()).view(-1, 1)
        values = words.view(torch.float32).view(-1, BLOCK)
        if target.numel() % BLOCK:
            target.copy_(values.mul_(factors).view(-1)[: target.numel()])
        else:
            torch.mul(values, factors, out=target.view(-1, BLOCK))
        yield target


ENCODERS: dict[str, Callable[[Pieces, Tensor, Tensor], bool]] = {
    "F8_E4M3": _encode_e4m3,
    "F4": _encode_e2m1,
}
"""Write the array that the pieces make into data and scale; whether all of it is finite."""

DECODERS: dict[str, Callable[[Tensor, Tensor, Iterable[Tensor]], Iterator[Tensor]]] = {
    "F8_E4M3": _decode_e4m3,
    "F4": _decode_e2m1,
}
"""Write data and scale, decoded, into F32 pieces of CHUNK, and give each when it is done."""
