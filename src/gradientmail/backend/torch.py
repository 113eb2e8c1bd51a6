"""PyTorch: its models, and the arithmetic over host memory in it."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import override

from gradientmail.backend.base import Backend, Combination, fp32_factors
from gradientmail.backend.cuda_copies import pinned_memory
from gradientmail.backend.torch_chunks import CHUNK, Tensor, chunks, constant, scratch, torch
from gradientmail.backend.torch_formats import DECODERS, ENCODERS, convert, pieces_of
from gradientmail.backend.torch_model import TorchParameters
from gradientmail.backend.torch_names import TrainedSet, places
from gradientmail.buffers import HOST, BufferPool

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
        return self._bind(model, averaged=False)

    @override
    def bind_with_buffers(self, model: object) -> "TorchParameters":
        """The same, and the floating-point buffers that ``state_dict`` has."""
        return self._bind(model, averaged=True)

    def _bind(self, model: object, *, averaged: bool) -> "TorchParameters":
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"a model is a torch.nn.Module, not a {type(model).__qualname__}")
        trained = TrainedSet(model)
        if not trained.parameters:
            raise ValueError("the model has no trainable parameter: none has requires_grad=True")
        buffers = [place for place in places(model, "buffer") if place.tensor.is_floating_point()]
        parameters = TorchParameters(
            torch,
            trained.parameters,
            buffers=buffers if averaged else (),
            check=trained.check,
        )
        if not averaged:
            parameters.local_buffers = tuple(sorted(place.name for place in buffers))
        exchanged = (*trained.parameters.values(), *(place.tensor for place in buffers))
        if self._pinned is None and any(p.device.type == "cuda" for p in exchanged):
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

    def on_host(self, array: Tensor) -> Tensor:
        """A tensor on whatever device, on the CPU."""
        return array.detach().to("cpu").contiguous()

    def subtract(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """``out = left − right`` in fp32, rounded to ``out``'s dtype."""
        _elementwise(torch.sub, left, right, out)

    def add(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """``out = left + right`` in fp32, rounded to ``out``'s dtype."""
        _elementwise(torch.add, left, right, out)

    def sum_of_squares(self, x: Tensor) -> float:
        """``Σ x²``: in float64, large tensors by rows in fp32 unless that could lose digits."""
        return self.dot(x, x)

    def is_finite(self, x: Tensor) -> bool:
        """By a sum, which an element that is not finite makes so too; then, if need be, exactly."""
        parts = [piece for (piece,) in chunks(x)]
        if all(math.isfinite(float(piece.sum(dtype=torch.float32))) for piece in parts):
            return True
        return all(bool(piece.isfinite().all()) for piece in parts)

    def clamp(self, x: Tensor, limit: float) -> None:
        """Into [−limit, limit], in place; NaN becomes 0."""
        for (piece,) in chunks(x):
            torch.nan_to_num(piece, nan=0.0, posinf=limit, neginf=-limit, out=piece)
            piece.clamp_(-limit, limit)

    def dot(self, x: Tensor, y: Tensor) -> float:
        """``Σ x·y``: in float64, large tensors by rows in fp32 unless that could lose digits."""
        if x.numel() < ROWS_FROM:
            return _exact_dot(x, y)
        first, second, sums = scratch(x), scratch(y), _RowSums(x)
        for a, b in chunks(x, y):
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
        first, second = scratch(x), scratch(y)
        dots, squares = _RowSums(x), _RowSums(y)
        for a, b in chunks(x, y):
            piece = _fp32(b, second)
            squares.add(piece, piece)
            dots.add(_fp32(a, first), piece)
        total, square = dots.total(), squares.total()
        both_good = total is not None and square is not None
        return (total, square) if both_good else super().dot_squares(x, y)

    def accumulate(self, out: Tensor, x: Tensor, *, keep: float, scale: float) -> None:
        """``out = keep·out + scale·x``, each product rounded to fp32 before the sum."""
        keeps, scales = _factors(keep), _factors(scale)
        product = scratch(out)
        for o, v in chunks(out, x):
            if keep == 0.0:
                _scaled(v, scales, o)
                continue
            if keep != 1.0:
                _scaled(o, keeps, o)
            if scale:
                o.add_(_scaled(v, scales, product[: o.numel()]))

    def combine(self, delta: Combination, out: Tensor) -> None:
        """``out = Σ cᵢ·xᵢ``, each product rounded to fp32 before the sum."""
        factors, product = [_factors(scale) for scale, _ in delta], scratch(out)
        for o, *terms in chunks(out, *(x for _, x in delta)):
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
        product, total = scratch(master), scratch(master)
        old = new_momentum if momentum is None else momentum
        arrays = (master, old, new_momentum, new_master, *(x for _, x in delta))
        for base, m, new_m, new, *terms in chunks(*arrays):
            step = _combined(terms, factors, total[: base.numel()], product)
            if momentum is None:
                new_m.copy_(step)
            else:
                torch.add(step, m, alpha=beta, out=new_m)
            step.add_(new_m, alpha=beta)
            torch.add(_fp32(base, product), step, alpha=-lr, out=new)

    def encode(self, x: Tensor, dtype: str, data: Tensor, scale: Tensor | None) -> None:
        """Write the F32 ``x`` as ``dtype``, rounded to nearest even."""
        if scale is None:
            convert(x, data, dtype)
        else:
            ENCODERS[dtype](pieces_of(x), data, scale)

    def decode(self, data: Tensor, dtype: str, scale: Tensor | None, out: Tensor) -> None:
        """Read what ``encode`` wrote into the F32 ``out``. Not finite where the data is not."""
        if scale is None:
            convert(data, out, dtype)
        else:
            _exhaust(DECODERS[dtype](data, scale, pieces_of(out)()))

    def encode_difference(
        self,
        left: Tensor,
        right: Tensor,
        dtype: str,
        data: Tensor,
        scale: Tensor,
        blank: Callable[[], Tensor],
    ) -> bool:
        """``encode`` of ``left − right``, which exists in pieces only; whether it is finite."""
        del blank
        difference, second = scratch(left), scratch(left)

        def pieces() -> Iterator[Tensor]:
            for x, y in chunks(left, right):
                first = difference[: x.numel()]
                yield torch.sub(_fp32(x, first), _fp32(y, second), out=first)

        return ENCODERS[dtype](pieces, data, scale)

    def add_decoded(
        self,
        base: Tensor,
        data: Tensor,
        dtype: str,
        scale: Tensor,
        out: Tensor,
        blank: Callable[[], Tensor],
    ) -> None:
        """``out = base + decoded``, which exists in pieces only."""
        del blank
        values, first = scratch(out), scratch(out)
        targets = (values[: piece.numel()] for (piece,) in chunks(out))
        decoded = DECODERS[dtype](data, scale, targets)
        for (x, o), y in zip(chunks(base, out), decoded, strict=True):
            o.copy_(torch.add(_fp32(x, first), y, out=y))


def _exhaust(steps: Iterable[object]) -> None:
    """Run a generator for what it does."""
    for _ in steps:
        pass


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
    first, second = scratch(out), scratch(out)
    for x, y, o in chunks(left, right, out):
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
    return [constant(factor) for factor in fp32_factors(scale)]


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
        self._product = scratch(like)
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
    first, second = scratch(x, torch.float64), scratch(x, torch.float64)
    total = 0.0
    for a, b in chunks(x, y):
        left = first[: a.numel()].copy_(a)
        right = left if x is y else second[: b.numel()].copy_(b)
        total += float(left.mul_(right).sum())
    return total
