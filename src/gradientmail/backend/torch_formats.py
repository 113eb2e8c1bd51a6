"""The formats of payloads on CPU tensors, bit by bit as ``Backend.encode`` states them."""

import math
from collections.abc import Callable, Iterator

from gradientmail.backend.torch_chunks import CHUNK, Tensor, chunks, constant, scratch, torch

BLOCK = 32
"""Elements of an F4 tensor that share a scale."""


def _convert(source: Tensor, target: Tensor, _scale: Tensor | None) -> None:
    """F32, F16 and BF16, either way."""
    for x, out in chunks(source, target):
        out.copy_(x)


def _encode_e4m3(x: Tensor, data: Tensor, scale: Tensor) -> None:
    largest, values = 0.0, scratch(x)
    for (piece,) in chunks(x):
        largest = max(largest, float(torch.abs(piece, out=values[: piece.numel()]).amax()))
    # A subnormal's exponent field reads -127; its true exponent is less, and both are clamped.
    exponent = min(max(math.frexp(largest)[1] - 1 - 7, -126), 127) if largest else 0
    scale.fill_(2.0**exponent)
    inverse = constant(2.0**-exponent)
    for piece, target in chunks(x, data):
        # At most 256 after scaling, within the format's 448; the cast rounds to nearest even.
        target.copy_(torch.mul(piece, inverse, out=values[: piece.numel()]))


_E4M3_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


def _decode_e4m3(data: Tensor, out: Tensor, scale: Tensor) -> None:
    index = scratch(out, torch.int32)
    for codes, target in chunks(data.view(torch.uint8), out):
        torch.index_select(_E4M3_VALUES, 0, index[: codes.numel()].copy_(codes), out=target)
        target.mul_(scale)


_ZERO = constant(0.0)
# The fp32 whose unit of rounding is 1, plus what the codes of steps 1/2, 1 and 2 are offset by.
_STEP_1_2, _STEP_1, _STEP_2 = (constant(2.0**23 + offset) for offset in (0, 2, 4))
_LARGEST_CODE = constant(2.0**23 + 7)
_SHIFT_28 = constant(28, torch.int32)
_SHIFT_4, _BIT_3 = constant(4, torch.int16), constant(8, torch.uint8)


def _block_pieces(x: Tensor, data: Tensor, scale: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of an array, of its F4 codes and of their scales: CHUNK is even and whole blocks."""
    if not x.numel():
        return iter(())
    codes, scales = data.split(CHUNK // 2), scale.split(CHUNK // BLOCK)
    return zip(x.view(-1).split(CHUNK), codes, scales, strict=True)


def _encode_e2m1(x: Tensor, data: Tensor, scale: Tensor) -> None:
    for values, packed, scales in _block_pieces(x, data, scale):
        padding = values.new_zeros(-values.numel() % BLOCK)
        whole = torch.cat([values, padding]) if padding.numel() else values
        _encode_blocks(whole, packed, scales)


def _encode_blocks(x: Tensor, packed: Tensor, scales: Tensor) -> None:
    """One piece of whole blocks."""
    signed = x + _ZERO  # turns -0.0 into 0.0: only what is below zero has a sign
    magnitude = signed.abs()
    largest = magnitude.view(-1, BLOCK).amax(dim=1)
    # Exponent fields: 127 + ⌊log2⌋ of the largest, 127 + k of the scale, 127 − k of its inverse.
    field = (largest.view(torch.int32) >> 23).sub_(2).clamp_(min=1)
    field.masked_fill_(largest == 0.0, 127)
    scales.copy_(field)
    inverse = (254 - field).bitwise_left_shift_(23).view(torch.float32)
    magnitude.view(-1, BLOCK).mul_(inverse.view(-1, 1))
    # Codes 0-4 are steps of 1/2, 4-6 of 1, 6-7 of 2: a code is the least of three roundings. From
    # 2**23 on fp32 has steps of 1, so a sum there rounds to nearest even, once, to a whole number.
    code = torch.add(_STEP_1_2, magnitude, alpha=2.0)
    other = magnitude + _STEP_1
    torch.minimum(code, other, out=code)
    torch.add(_STEP_2, magnitude, alpha=0.5, out=other)
    torch.minimum(code, other, out=code)
    codes = torch.minimum(code, _LARGEST_CODE, out=code).view(torch.int32).to(torch.uint8)
    signs = other.view(torch.int32)
    torch.bitwise_right_shift(signed.view(torch.int32), _SHIFT_28, out=signs)
    codes.bitwise_or_(signs.to(torch.uint8).bitwise_and_(_BIT_3))
    pairs = codes.view(torch.int16)
    packed.copy_((pairs >> _SHIFT_4).bitwise_or_(pairs))


_E2M1 = torch.tensor(  # whatever dtype the user has made the default one
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device="cpu"
)
_E2M1_SIGNED = torch.cat([_E2M1, -_E2M1])
# Both values of a byte as one 64-bit word, so that one look-up gives two elements.
_E2M1_PAIRS = torch.stack([_E2M1_SIGNED.repeat(16), _E2M1_SIGNED.repeat_interleave(16)], 1)
_E2M1_WORDS = _E2M1_PAIRS.view(torch.int64).view(-1)
_E8M0_VALUES = (torch.arange(256, dtype=torch.int32, device="cpu") << 23).view(torch.float32)
_E8M0_VALUES[0], _E8M0_VALUES[255] = 2.0**-127, math.nan


def _decode_e2m1(data: Tensor, out: Tensor, scale: Tensor) -> None:
    for target, packed, scales in _block_pieces(out, data, scale):
        words = torch.index_select(_E2M1_WORDS, 0, packed.int())
        factors = torch.index_select(_E8M0_VALUES, 0, scales.int()).view(-1, 1)
        values = words.view(torch.float32).view(-1, BLOCK)
        if target.numel() % BLOCK:
            target.copy_(values.mul_(factors).view(-1)[: target.numel()])
        else:
            torch.mul(values, factors, out=target.view(-1, BLOCK))


CODECS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    **dict.fromkeys(("F32", "F16", "BF16"), (_convert, _convert)),
    "F8_E4M3": (_encode_e4m3, _decode_e4m3),
    "F4": (_encode_e2m1, _decode_e2m1),
}
"""How each format is written and read."""
