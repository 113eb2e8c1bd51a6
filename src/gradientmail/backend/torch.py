"""PyTorch: its models, and the arithmetic over host memory in it. The only file that imports torch.

The arithmetic runs in chunks of ``CHUNK`` elements. Several of them stay in the second-level cache,
and under 32,768 elements PyTorch stays on the calling thread, whatever its number of threads.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gradientmail.backend.base import Backend, Combination, fp32_factors
from gradientmail.backend.cuda_copies import pinned_memory
from gradientmail.backend.torch_model import TorchParameters, named_parameters
from gradientmail.buffers import HOST, BufferPool
from gradientmail.errors import MissingExtra

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise MissingExtra("torch", "torch") from error

BLOCK = 32  # elements of an F4 tensor that share a scale
CHUNK = 31 * 1024
"""Elements worked on at a time: under PyTorch's 32,768, whole F4 blocks, whole rows of ``ROW``."""

ROW = 256
"""Elements of a large tensor that are summed in fp32 before the sum goes on in float64. The error
of the whole is some 1e-10, and 3e-8 for values of a few bits, whose sums all round one way."""

ROWS_FROM = 2**20
"""Tensors of fewer elements are summed in float64 throughout."""

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "F4": torch.uint8,
}

with warnings.catch_warnings():
    # PyTorch warns once a process about a buffer that is read-only. Ours are only read.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class TorchBackend(Backend):
    """Arithmetic on CPU tensors over buffers of host memory."""

    name = "torch"

    def __init__(self) -> None:
        """Bound to no model yet."""
        self._pinned: BufferPool | None = None

    def bind(self, model: object) -> "TorchParameters":
        """The trainable F32, F16 and BF16 parameters of a ``torch.nn.Module``.

        ``TypeError`` for another object, ``ValueError`` naming what cannot be exchanged.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"a model is a torch.nn.Module, not a {type(model).__qualname__}")
        found = {n: p for n, p in named_parameters(model) if p.requires_grad}
        if not found:
            raise ValueError("the model has no trainable parameter: none has requires_grad=True")
        parameters = TorchParameters(torch, found)
        if self._pinned is None and any(p.device.type == "cuda" for p in found.values()):
            self._pinned = BufferPool(allocate=partial(pinned_memory, torch))
        return parameters

    def pool(self) -> BufferPool:
        """The process's host memory; pinned memory once a model with CUDA parameters is bound."""
        return HOST if self._pinned is None else self._pinned

    def array(self, buffer: memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor over ``buffer``; of bytes for F4 (two elements each) and F8_E8M0."""
        if dtype == "F4":
            shape = (math.prod(shape) // 2,)
        if not math.prod(shape):
            return torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")
        return torch.frombuffer(buffer, dtype=_DTYPES[dtype]).view(shape)

    def subtract(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """``out = left − right`` in fp32, rounded to ``out``'s dtype."""
        _elementwise(torch.sub, left, right, out)

    def add(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """``out = left + right`` in fp32, rounded to ``out``'s dtype."""
        _elementwise(torch.add, left, right, out)

    def sum_of_squares(self, x: Tensor) -> float:
        """``Σ x²``: in float64, large tensors by rows in fp32 unless that could lose digits."""
        return self.dot(x, x)

    def dot(self, x: Tensor, y: Tensor) -> float:
        """``Σ x·y``: in float64, large tensors by rows in fp32 unless that could lose digits."""
        if x.numel() < ROWS_FROM:
            return _exact_dot(x, y)
        first, second, sums = _scratch(x), _scratch(y), _RowSums(x)
        for a, b in _chunks(x, y):
            left = _fp32(a, first)
            sums.add(left, left if x is y else _fp32(b, second))
        total = sums.total()
        return _exact_dot(x, y) if total is None else total

    def sum_of_products(self, x: Tensor, y: Tensor) -> float:
        """``Σ x·y`` in fp32, in PyTorch's own order; ``dot`` when that could lose digits."""
        total = float((x.float() * y.float()).sum())
        in_range = math.isfinite(total) and abs(total) > 1e-28 * x.numel()
        return total if in_range else self.dot(x, y)

    def subtract_squares(self, left: Tensor, right: Tensor, out: Tensor) -> float:
        """``subtract`` and ``sum_of_squares`` of the result, piece by piece in the cache."""
        if out.numel() < ROWS_FROM:
            return super().subtract_squares(left, right, out)
        sums = _RowSums(out)
        _elementwise(torch.sub, left, right, out, sums)
        total = sums.total()
        return _exact_dot(out, out) if total is None else total

    def dot_squares(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """``dot`` and ``sum_of_squares`` of ``y``, which is read once."""
        if y.numel() < ROWS_FROM:
            return super().dot_squares(x, y)
        first, second = _scratch(x), _scratch(y)
        dots, squares = _RowSums(x), _RowSums(y)
        for a, b in _chunks(x, y):
            piece = _fp32(b, second)
            squares.add(piece, piece)
            dots.add(_fp32(a, first), piece)
        total, square = dots.total(), squares.total()
        both_good = total is not None and square is not None
        return (total, square) if both_good else super().dot_squares(x, y)

    def accumulate(self, out: Tensor, x: Tensor, *, keep: float, scale: float) -> None:
        """``out = keep·out + scale·x``, each product rounded to fp32 before the sum."""
        keeps, scales = _factors(keep), _factors(scale)
        product = _scratch(out)
        for o, v in _chunks(out, x):
            if keep == 0.0:
                _scaled(v, scales, o)
                continue
            if keep != 1.0:
                _scaled(o, keeps, o)
            if scale:
                o.add_(_scaled(v, scales, product[: o.numel()]))

    def combine(self, delta: Combination, out: Tensor) -> None:
        """``out = Σ cᵢ·xᵢ``, each product rounded to fp32 before the sum."""
        factors, product = [_factors(scale) for scale, _ in delta], _scratch(out)
        for o, *terms in _chunks(out, *(x for _, x in delta)):
            _combined(terms, factors, o, product)

    def nesterov(
        self,
        delta: Combination,
        momentum: Tensor | None,
        master: Tensor,
        *,
        beta: float,
        lr: float,
        new_momentum: Tensor,
        new_master: Tensor,
    ) -> None:
        """``m' = β·m + Δ`` and ``master' = master − lr·(Δ + β·m')``, each chunk read once."""
        factors = [_factors(scale) for scale, _ in delta]
        product, total = _scratch(master), _scratch(master)
        old = new_momentum if momentum is None else momentum
        arrays = (master, old, new_momentum, new_master, *(x for _, x in delta))
        for base, m, new_m, new, *terms in _chunks(*arrays):
            step = _combined(terms, factors, total[: base.numel()], product)
            if momentum is None:
                new_m.copy_(step)
            else:
                torch.add(step, m, alpha=beta, out=new_m)
            step.add_(new_m, alpha=beta)
            torch.add(_fp32(base, product), step, alpha=-lr, out=new)

    def encode(self, x: Tensor, dtype: str, data: Tensor, scale: Tensor | None) -> None:
        """Write the F32 ``x`` as ``dtype``, rounded to nearest even."""
        _CODECS[dtype][0](x, data, scale)

    def decode(self, data: Tensor, dtype: str, scale: Tensor | None, out: Tensor) -> None:
        """Read what ``encode`` wrote into the F32 ``out``. Not finite where the data is not."""
        _CODECS[dtype][1](data, out, scale)


def _chunks(*arrays: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat pieces of contiguous arrays of one size, in step."""
    if not arrays[0].numel():
        return iter(())
    return zip(*(array.view(-1).split(CHUNK) for array in arrays), strict=True)


def _scratch(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for one piece of ``like``."""
    return torch.empty(min(like.numel(), CHUNK), dtype=dtype, device="cpu")


def _constant(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """An operand for many chunks; a Python number would be converted anew for each of them."""
    return torch.tensor(value, dtype=dtype, device="cpu")


def _fp32(x: Tensor, scratch: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else scratch[: x.numel()].copy_(x)


def _elementwise(
    operation: Callable[..., Tensor],
    left: Tensor,
    right: Tensor,
    out: Tensor,
    squares: "_RowSums | None" = None,
) -> None:
    """``operation`` in fp32, rounded once; ``squares`` takes in the squares of what was written."""
    one_dtype = left.dtype == right.dtype == out.dtype
    first, second = _scratch(out), _scratch(out)
    for x, y, o in _chunks(left, right, out):
        if one_dtype:  # then PyTorch itself computes in fp32 and rounds once
            operation(x, y, out=o)
        elif o.dtype == torch.float32:
            operation(_fp32(x, first), _fp32(y, second), out=o)
        else:
            o.copy_(operation(_fp32(x, first), _fp32(y, second), out=first[: o.numel()]))
        if squares:
            written = _fp32(o, first)
            squares.add(written, written)


def _factors(scale: float) -> list[Tensor]:
    return [_constant(factor) for factor in fp32_factors(scale)]


def _scaled(x: Tensor, factors: Sequence[Tensor], out: Tensor) -> Tensor:
    """``out = x`` times all factors, ``out`` being F32."""
    if x.dtype != torch.float32:
        x = out.copy_(x)
    for factor in factors:
        x = torch.mul(x, factor, out=out)
    return x


def _combined(
    terms: Sequence[Tensor], factors: Sequence[Sequence[Tensor]], out: Tensor, product: Tensor
) -> Tensor:
    """``out = Σ cᵢ·xᵢ`` of one piece; ``product`` is scratch."""
    if not terms:
        return out.zero_()
    _scaled(terms[0], factors[0], out)
    for x, scales in zip(terms[1:], factors[1:], strict=True):
        out.add_(_scaled(x, scales, product[: out.numel()]))
    return out


class _RowSums:
    """``Σ x·y`` over pieces of large tensors: each row in fp32, their sum in float64."""

    def __init__(self, like: Tensor) -> None:
        self._product = _scratch(like)
        self._rows = torch.empty(like.numel() // ROW, dtype=torch.float32, device="cpu")
        self._count, self._filled, self._tail = like.numel(), 0, 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in the next piece of both, F32."""
        count = x.numel() // ROW
        whole, rows = count * ROW, self._rows[self._filled : self._filled + count]
        product = torch.mul(x[:whole], y[:whole], out=self._product[:whole])
        torch.sum(product.view(count, ROW), dim=1, out=rows)
        self._filled += count
        if whole < x.numel():  # only the last piece has less than a row left
            self._tail += _exact_dot(x[whole:], y[whole:])

    def total(self) -> float | None:
        """The sum; None when overflow or underflow in fp32 can matter in it.

        Underflow loses less than 2e-38 an element, so a larger sum has lost no digit that counts.
        """
        total = self._tail + sum(float(part.double().sum()) for part in self._rows.split(CHUNK))
        return total if math.isfinite(total) and abs(total) > 1e-28 * self._count else None


def _exact_dot(x: Tensor, y: Tensor) -> float:
    """``Σ x·y`` in float64."""
    first, second = _scratch(x, torch.float64), _scratch(x, torch.float64)
    total = 0.0
    for a, b in _chunks(x, y):
        left = first[: a.numel()].copy_(a)
        right = left if x is y else second[: b.numel()].copy_(b)
        total += float(left.mul_(right).sum())
    return total


def _convert(source: Tensor, target: Tensor, _scale: Tensor | None) -> None:
    """F32, F16 and BF16, either way."""
    for x, out in _chunks(source, target):
        out.copy_(x)


def _encode_e4m3(x: Tensor, data: Tensor, scale: Tensor) -> None:
    largest, values = 0.0, _scratch(x)
    for (piece,) in _chunks(x):
        largest = max(largest, float(torch.abs(piece, out=values[: piece.numel()]).amax()))
    # A subnormal's exponent field reads -127; its true exponent is less, and both are clamped.
    exponent = min(max(math.frexp(largest)[1] - 1 - 7, -126), 127) if largest else 0
    scale.fill_(2.0**exponent)
    inverse = _constant(2.0**-exponent)
    for piece, target in _chunks(x, data):
        # At most 256 after scaling, within the format's 448; the cast rounds to nearest even.
        target.copy_(torch.mul(piece, inverse, out=values[: piece.numel()]))


_E4M3_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


def _decode_e4m3(data: Tensor, out: Tensor, scale: Tensor) -> None:
    index = _scratch(out, torch.int32)
    for codes, target in _chunks(data.view(torch.uint8), out):
        torch.index_select(_E4M3_VALUES, 0, index[: codes.numel()].copy_(codes), out=target)
        target.mul_(scale)


_ZERO = _constant(0.0)
# The fp32 whose unit of rounding is 1, plus what the codes of steps 1/2, 1 and 2 are offset by.
_STEP_1_2, _STEP_1, _STEP_2 = (_constant(2.0**23 + offset) for offset in (0, 2, 4))
_LARGEST_CODE = _constant(2.0**23 + 7)
_SHIFT_28 = _constant(28, torch.int32)
_SHIFT_4, _BIT_3 = _constant(4, torch.int16), _constant(8, torch.uint8)


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


_CODECS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    **dict.fromkeys(("F32", "F16", "BF16"), (_convert, _convert)),
    "F8_E4M3": (_encode_e4m3, _decode_e4m3),
    "F4": (_encode_e2m1, _decode_e2m1),
}
"""How each format is written and read."""
