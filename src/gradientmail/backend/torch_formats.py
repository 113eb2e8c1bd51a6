"""The formats of payloads on CPU tensors, bit by bit as ``Backend.encode`` states them.

Encoders read an array piece by piece, from memory or from whatever computes it; decoders write it
so. What is in between stays in the cache, in scratch that is kept from piece to piece.
"""

import math
from collections.abc import Callable, Iterable, Iterator

from gradientmail.backend.torch_chunks import (
    Tensor,
    again,
    chunks,
    constant,
    cut,
    piece_size,
    scratch,
    torch,
)

BLOCK = 32
"""Elements of an F4 tensor that share a scale."""

type Pieces = Callable[[], Iterable[Tensor]]
"""Gives an F32 array from its start, in flat pieces; each is good until the next one."""


def convert(source: Tensor, target: Tensor, dtype: str) -> None:
    """F32, F16 and BF16 into one another, rounded to nearest even."""
    if dtype not in ("F32", "F16", "BF16"):
        raise ValueError(f"unknown format {dtype!r}, or its scale is missing")
    for x, out in chunks(source, target, size=piece_size()):
        out.copy_(x)


def _encode_e4m3(pieces: Pieces, size: int, data: Tensor, scale: Tensor) -> bool:
    largest, values = 0.0, scratch(data, size=size)
    for piece in pieces():
        top = float(torch.abs(piece, out=values[: piece.numel()]).amax())
        if not math.isfinite(top):
            return False
        largest = max(largest, top)
    # A subnormal's exponent field reads -127; its true exponent is less, and both are clamped.
    exponent = min(max(math.frexp(largest)[1] - 1 - 7, -126), 127) if largest else 0
    scale.fill_(2.0**exponent)
    inverse = constant(2.0**-exponent)
    for piece, (target,) in zip(pieces(), chunks(data, size=size), strict=True):
        # At most 256 after scaling, within the format's 448; the cast rounds to nearest even.
        target.copy_(torch.mul(piece, inverse, out=values[: piece.numel()]))
    return True


_E4M3_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


def _decode_e4m3(
    data: Tensor, scale: Tensor, targets: Iterable[Tensor], size: int
) -> Iterator[Tensor]:
    index = scratch(data, torch.int32, size)
    for (codes,), target in zip(chunks(data.view(torch.uint8), size=size), targets, strict=True):
        torch.index_select(_E4M3_VALUES, 0, index[: codes.numel()].copy_(codes), out=target)
        yield target.mul_(scale)


# F4. In units of its least number, F16 has steps of 1 up to 2^11, then of 2, then of 4: they grow
# where those of E2M1 do, 1/2, 1 and 2. With 1/2 at 509 units, each middle of two values of E2M1 is
# one of two F16 numbers; and as 509 is 1 more than a multiple of 4, the even one of the two lies
# where the even code does. So rounding to F16, once, decides every tie as E2M1 does. The bits,
# times 1 + 12/2^11, are then at least 512 * i - 256 just for what rounds to code i or more.
_STEP = 2 * 509 * 2.0**-24
_EVEN_OUT = constant(1 + 12 / 2**11, torch.float16)
_HALF_A_CODE = constant(256, torch.int16)
_LARGEST_CODE = constant(8 * 512 - 1 - 256, torch.int16)
# A code is in bits 9 to 11 of its 16 bits, below the sign, where the bits of an F16 one come to
# when they are taken away four times. Of two elements, the bits then come together in 21 to 28.
_TO_BIT_12 = -4
_CODES, _TOGETHER = constant(0x1E001E00, torch.int32), constant(1 + (1 << 12), torch.int32)
_TO_BYTE = constant(21, torch.int32)

_ZERO = constant(0.0)
_EXPONENT, _INFINITE = constant(255 << 23, torch.int32), 255 << 23
_LEAST, _LEAST_FIELD = constant(3 << 23, torch.int32), 3 << 23
_ZEROS_FIELD = 127 + 2 << 23
# The bits of factors, from which a block's exponent field is taken: over twice its scale, in steps.
_HALVED, _HALVED_TO_STEPS = constant(255 << 23, torch.int32), constant(2 * _STEP)
_STEPS = int(constant(_STEP).view(torch.int32)) + (256 - 127 << 23)
_IN_STEPS, _TOO_LARGE = constant(_STEPS, torch.int32), _STEPS & _INFINITE
"""From here on a block's factor to steps is no normal number, and takes two."""


class _BlockEncoder:
    """F4 of one piece after the other; every view of the scratch is made once."""

    def __init__(self, size: int, *, any_scale: bool) -> None:
        """For pieces of ``size`` elements, whole blocks."""

        def blank(dtype: torch.dtype, count: int = size) -> Tensor:
            return torch.empty(count, dtype=dtype, device="cpu")

        self.size, self._any_scale = size, any_scale
        self._magnitude, self._negative = blank(torch.float32), blank(torch.float32)
        self._rows = self._magnitude.view(-1, BLOCK)
        self._row_bits = self._magnitude.view(torch.int32).view(-1, BLOCK)
        self._rounded, self._sign = blank(torch.float16), blank(torch.float16)
        self._codes, self._signs = self._rounded.view(torch.int16), self._sign.view(torch.int16)
        self._pairs = self._codes.view(torch.int32)
        self._inverse = blank(torch.int32, size // BLOCK)
        self._factor = self._inverse.view(torch.float32).view(-1, 1)

    def encode(self, x: Tensor, packed: Tensor, largest: Tensor) -> None:
        """Write the codes of ``x``, and the bits of the largest magnitude of each block."""
        torch.abs(x, out=self._magnitude)
        self._sign.copy_(torch.lt(x, _ZERO, out=self._negative))  # which -0.0 is not
        torch.amax(self._row_bits, dim=1, out=largest)
        self._to_steps(largest)
        self._rounded.copy_(self._magnitude).mul_(_EVEN_OUT)
        self._codes.clamp_max_(_LARGEST_CODE).add_(_HALF_A_CODE).add_(self._signs, alpha=_TO_BIT_12)
        self._pairs.bitwise_and_(_CODES).mul_(_TOGETHER)
        packed.copy_(self._pairs.bitwise_right_shift_(_TO_BYTE))

    def _to_steps(self, largest: Tensor) -> None:
        """Magnitudes over ``2^k``, in steps of 1/509 of 1/2."""
        fields = torch.bitwise_and(largest, _EXPONENT, out=self._inverse)
        if self._any_scale:
            torch.sub(_HALVED, fields.clamp_min_(_LEAST), out=fields)
            self._rows.mul_(self._factor)
            self._magnitude.mul_(_HALVED_TO_STEPS)
        else:
            torch.sub(_IN_STEPS, fields, out=fields)
            self._rows.mul_(self._factor)


def _encode_e2m1(pieces: Pieces, size: int, data: Tensor, scale: Tensor) -> bool:
    if not data.numel():
        return True
    least, largest = _encode_blocks(pieces(), size, data, scale, any_scale=False)
    if largest >= _INFINITE:
        return False
    if least < _LEAST_FIELD or largest >= _TOO_LARGE:
        _encode_blocks(pieces(), size, data, scale, any_scale=True)
    return True


def _encode_blocks(
    pieces: Iterable[Tensor], size: int, data: Tensor, scale: Tensor, *, any_scale: bool
) -> tuple[int, int]:
    """Write codes and scales; the range of the bits of each block's largest magnitude.

    Only with ``any_scale`` are the codes right, too, where that range is wide.
    """
    encoder: _BlockEncoder | None = None
    each, each_packed = iter(pieces), cut(data, size // 2)
    memory, ranges = scratch(scale, torch.int32), list[tuple[int, int]]()
    for (scales,), largest in zip(chunks(scale), again(memory, scale), strict=True):
        for part in largest.split(size // BLOCK):
            piece, packed = next(each), next(each_packed)
            missing = -piece.numel() % BLOCK
            x = torch.cat([piece, piece.new_zeros(missing)]) if missing else piece
            if encoder is None or encoder.size != x.numel():
                encoder = _BlockEncoder(x.numel(), any_scale=any_scale)
            encoder.encode(x, packed, part)
        ranges.append(_write_scales(largest, scales))
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


def _write_scales(largest: Tensor, scales: Tensor) -> tuple[int, int]:
    """The bytes ``k + 127`` of blocks; the range of ``largest``, zeros left out."""
    largest.masked_fill_(largest.eq(0), _ZEROS_FIELD)
    low, high = torch.aminmax(largest)
    scales.copy_(largest.clamp_min(_LEAST_FIELD).bitwise_right_shift_(23).sub_(2))
    return int(low), int(high)


_E2M1 = torch.tensor(  # whatever dtype the user has made the default one
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device="cpu"
)
_E2M1_SIGNED = torch.cat([_E2M1, -_E2M1])
# Both values of a byte as one 64-bit word, so that one look-up gives two elements.
_E2M1_PAIRS = torch.stack([_E2M1_SIGNED.repeat(16), _E2M1_SIGNED.repeat_interleave(16)], 1)
_E2M1_WORDS = _E2M1_PAIRS.view(torch.int64).view(-1)
_E8M0_VALUES = (torch.arange(256, dtype=torch.int32, device="cpu") << 23).view(torch.float32)
_E8M0_VALUES[0], _E8M0_VALUES[255] = 2.0**-127, math.nan


def _decode_e2m1(
    data: Tensor, scale: Tensor, targets: Iterable[Tensor], size: int
) -> Iterator[Tensor]:
    if not data.numel():
        return
    index = fields = factors = torch.empty(0, device="cpu")
    for target, packed, scales in zip(
        targets, cut(data, size // 2), cut(scale, size // BLOCK), strict=True
    ):
        if index.numel() != packed.numel():
            index, fields = packed.int(), scales.int()
            factors = torch.empty_like(fields, dtype=torch.float32)
        torch.index_select(_E8M0_VALUES, 0, fields.copy_(scales), out=factors)
        index.copy_(packed)
        if target.numel() % BLOCK or target.storage_offset() % 2:
            words = torch.index_select(_E2M1_WORDS, 0, index)
            values = words.view(torch.float32).view(-1, BLOCK).mul_(factors.view(-1, 1))
            target.copy_(values.view(-1)[: target.numel()])
        else:  # twice as quick
            torch.index_select(_E2M1_WORDS, 0, index, out=target.view(torch.int64))
            target.view(-1, BLOCK).mul_(factors.view(-1, 1))
        yield target


ENCODERS: dict[str, Callable[[Pieces, int, Tensor, Tensor], bool]] = {
    "F8_E4M3": _encode_e4m3,
    "F4": _encode_e2m1,
}
"""Write the array that pieces of that size make into data and scale; whether all is finite."""

DECODERS: dict[str, Callable[[Tensor, Tensor, Iterable[Tensor], int], Iterator[Tensor]]] = {
    "F8_E4M3": _decode_e4m3,
    "F4": _decode_e2m1,
}
"""Write data and scale, decoded, into F32 pieces of that size; give each when it is done."""
