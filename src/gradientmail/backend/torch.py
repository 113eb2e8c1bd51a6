"""PyTorch: its models, and the arithmetic over host memory in it."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import override

from gradientmail.backend.base import Backend, Combination
from gradientmail.backend.cuda_copies import pinned_memory
from gradientmail.backend.torch_chunks import (
    Tensor,
    again,
    chunks,
    factors,
    fp32_pieces,
    piece_size,
    pieces,
    scratch,
    torch,
)
from gradientmail.backend.torch_formats import DECODERS, ENCODERS, convert
from gradientmail.backend.torch_memory import SeparateMemory
from gradientmail.backend.torch_model import TorchParameters
from gradientmail.backend.torch_names import TrainedSet, places
from gradientmail.backend.torch_sums import ROWS_FROM, RowSums, exact_dot
from gradientmail.buffers import HOST, BufferPool

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
        buffers = [place for place in places(model, "buffer") if place.tensor.is_floating_point()]
        exchanged = buffers if averaged else []
        trained = TrainedSet(model, exchanged)
        if not trained.parameters:
            raise ValueError("the model has no trainable parameter: none has requires_grad=True")

        def tensors() -> dict[str, Tensor]:
            there = {place.name: place.tensor for place in exchanged}
            return trained.parameters | {n: one for n, one in there.items() if one is not None}

        def check() -> None:
            trained.check()
            memory.check()

        parameters = TorchParameters(torch, trained.parameters, buffers=exchanged, check=check)
        memory = SeparateMemory(tensors)
        if not averaged:
            parameters.local_buffers = tuple(sorted(place.name for place in buffers))
        if self._pinned is None and any(one.device.type == "cuda" for one in tensors().values()):
            self._pinned = BufferPool(allocate=partial(pinned_memory, torch))
        return parameters

    def pool(self) -> BufferPool:
        """The process's host memory; pinned memory once a model with CUDA parameters is bound."""
        return HOST if self._pinned is None else self._pinned

    def array(self, buffer: memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor over ``buffer``; of bytes for F4 (two elements each) and F8_E8M0."""
        if torch.is_inference_mode_enabled():  # other threads will write into it, which are not
            with torch.inference_mode(mode=False):
                return self.array(buffer, dtype, shape)
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
        _compute(torch.sub, left, right, out)

    def add(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """``out = left + right`` in fp32, rounded to ``out``'s dtype."""
        _compute(torch.add, left, right, out)

    def sum_of_squares(self, x: Tensor) -> float:
        """``Σ x²``: in float64, large tensors by rows in fp32 unless that could lose digits."""
        return self.dot(x, x)

    def is_finite(self, x: Tensor) -> bool:
        """Whether every element is."""
        return all(map(_is_finite, pieces(x, piece_size())))

    def clamp(self, x: Tensor, limit: float) -> None:
        """Into [−limit, limit], in place; NaN becomes 0."""
        for piece in pieces(x, piece_size()):
            torch.nan_to_num(piece, nan=0.0, posinf=limit, neginf=-limit, out=piece)
            piece.clamp_(-limit, limit)

    def dot(self, x: Tensor, y: Tensor) -> float:
        """``Σ x·y``: in float64, large tensors by rows in fp32 unless that could lose digits."""
        if x.numel() < ROWS_FROM:
            return exact_dot(x, y)
        size = piece_size()
        sums, lefts = RowSums(x, size, squares=x is y), fp32_pieces(x, size)
        if x is y:
            for left in lefts:
                sums.add(left, left)
        else:
            for left, right in zip(lefts, fp32_pieces(y, size), strict=True):
                sums.add(left, right)
        total = sums.total()
        return exact_dot(x, y) if total is None else total

    def sum_of_products(self, x: Tensor, y: Tensor) -> float:
        """``Σ x·y`` in fp32, in PyTorch's own order; ``dot`` when that could lose digits."""
        total = float((x.float() * y.float()).sum())
        in_range = math.isfinite(total) and abs(total) > 1e-28 * x.numel()
        return total if in_range else self.dot(x, y)

    def subtract_squares(self, left: Tensor, right: Tensor, out: Tensor) -> float:
        """``subtract`` and ``sum_of_squares`` of the result, piece by piece in the cache."""
        if out.numel() < ROWS_FROM:
            return super().subtract_squares(left, right, out)
        size = piece_size()
        sums = RowSums(out, size, squares=True)
        written: Iterable[Tensor] = _elementwise(torch.sub, left, right, out, size)
        if out.dtype != torch.float32:
            written = map(torch.Tensor.copy_, again(scratch(out, size=size), out), written)
        for piece in written:
            sums.add(piece, piece)
        total = sums.total()
        return exact_dot(out, out) if total is None else total

    def dot_squares(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """``dot`` and ``sum_of_squares`` of ``y``, which is read once."""
        if y.numel() < ROWS_FROM:
            return super().dot_squares(x, y)
        size = piece_size()
        dots, squares = RowSums(x, size), RowSums(y, size, squares=True)
        for left, right in zip(fp32_pieces(x, size), fp32_pieces(y, size), strict=True):
            dots.add(left, right)
            squares.add(right, right)
        total, square = dots.total(), squares.total()
        both_good = total is not None and square is not None
        return (total, square) if both_good else super().dot_squares(x, y)

    def accumulate(self, out: Tensor, x: Tensor, *, keep: float, scale: float) -> None:
        """``out = keep·out + scale·x``, each product rounded to fp32 before the sum."""
        keeps, scales, size = factors(keep), factors(scale), piece_size()
        products = again(scratch(out, size=size), out)
        for (o, v), product in zip(chunks(out, x, size=size), products, strict=True):
            if keep == 0.0:
                _scaled(v, scales, o)
                continue
            if keep != 1.0:
                _scaled(o, keeps, o)
            if scale:
                o.add_(_scaled(v, scales, product))

    def combine(self, delta: Combination, out: Tensor) -> None:
        """``out = Σ cᵢ·xᵢ``, each product rounded to fp32 before the sum."""
        scales, size = [factors(scale) for scale, _ in delta], piece_size()
        products = again(scratch(out, size=size), out)
        others = chunks(out, *(x for _, x in delta), size=size)
        for (o, *terms), product in zip(others, products, strict=True):
            _combined(terms, scales, o, product)

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
    ) -> bool:
        """``m' = β·m + Δ`` and ``master' = master − lr·(Δ + β·m')``, each chunk read once."""
        scales, finite, size = [factors(scale) for scale, _ in delta], True, piece_size()
        products = again(scratch(master, size=size), master)
        steps: Iterable[Tensor] = pieces(new_master, size)  # less to keep in the cache
        read_later = (master, *(x for _, x in delta[1:]))
        if any(x.data_ptr() == new_master.data_ptr() for x in read_later):
            steps = again(scratch(master, size=size), master)
        old = new_momentum if momentum is None else momentum
        others = chunks(old, new_momentum, new_master, *(x for _, x in delta), size=size)
        for base, product, step, (m, new_m, new, *terms) in zip(
            fp32_pieces(master, size), products, steps, others, strict=True
        ):
            _combined(terms, scales, step, product)
            if momentum is None:
                new_m.copy_(step)
            else:
                torch.add(step, m, alpha=beta, out=new_m)
            step.add_(new_m, alpha=beta)
            torch.add(base, step, alpha=-lr, out=new)
            finite = finite and _is_finite(new)
        return finite

    @torch.inference_mode()  # a call costs less in it
    def encode(self, x: Tensor, dtype: str, data: Tensor, scale: Tensor | None) -> None:
        """Write the F32 ``x`` as ``dtype``, rounded to nearest even."""
        if scale is None:
            convert(x, data, dtype)
        else:
            size = piece_size()
            ENCODERS[dtype](lambda: pieces(x, size), size, data, scale)

    @torch.inference_mode()  # a call costs less in it
    def decode(self, data: Tensor, dtype: str, scale: Tensor | None, out: Tensor) -> None:
        """Read what ``encode`` wrote into the F32 ``out``. Not finite where the data is not."""
        if scale is None:
            convert(data, out, dtype)
        else:
            size = piece_size()
            _exhaust(DECODERS[dtype](data, scale, pieces(out, size), size))

    @torch.inference_mode()  # a call costs less in it
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
        size = piece_size()
        memory = scratch(left, size=size)

        def differences() -> Iterator[Tensor]:
            both = zip(fp32_pieces(left, size), fp32_pieces(right, size), strict=True)
            results = zip(both, again(memory, left), strict=True)
            return (torch.sub(x, y, out=difference) for (x, y), difference in results)

        return ENCODERS[dtype](differences, size, data, scale)

    @torch.inference_mode()  # a call costs less in it
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
        size = piece_size()
        decoded = DECODERS[dtype](data, scale, again(scratch(out, size=size), out), size)
        for x, y, o in zip(fp32_pieces(base, size), decoded, pieces(out, size), strict=True):
            if o.dtype == torch.float32:
                torch.add(x, y, out=o)
            else:
                o.copy_(torch.add(x, y, out=y))


def _exhaust(steps: Iterable[object]) -> None:
    """Run a generator for what it does."""
    for _ in steps:
        pass


def _is_finite(piece: Tensor) -> bool:
    """By a sum, which an element that is not finite makes so too; then, if need be, exactly."""
    total = piece.sum(dtype=torch.float32)
    return math.isfinite(total.item()) or bool(piece.isfinite().all())


def _compute(operation: Callable[..., Tensor], left: Tensor, right: Tensor, out: Tensor) -> None:
    """``operation`` in fp32, rounded once."""
    size = piece_size()
    if out.numel() <= size and left.dtype == right.dtype == out.dtype:
        operation(left, right, out=out)  # a small array's views cost more than this
    else:
        _exhaust(_elementwise(operation, left, right, out, size))


def _elementwise(
    operation: Callable[..., Tensor], left: Tensor, right: Tensor, out: Tensor, size: int
) -> Iterator[Tensor]:
    """``operation`` in fp32, rounded once; gives each piece of ``out`` when it is written."""
    if left.dtype == right.dtype == out.dtype:  # PyTorch itself computes in fp32 and rounds once
        for x, y, o in chunks(left, right, out, size=size):
            yield operation(x, y, out=o)
        return
    both = zip(fp32_pieces(left, size), fp32_pieces(right, size), strict=True)
    if out.dtype == torch.float32:
        for (x, y), o in zip(both, pieces(out, size), strict=True):
            yield operation(x, y, out=o)
        return
    results = again(scratch(out, size=size), out)
    for (x, y), o, result in zip(both, pieces(out, size), results, strict=True):
        yield o.copy_(operation(x, y, out=result))


def _scaled(x: Tensor, scales: Sequence[Tensor], out: Tensor) -> Tensor:
    """``out = x`` times all ``scales``, ``out`` being F32."""
    if x.dtype != torch.float32:
        x = out.copy_(x)
    for scale in scales:
        x = torch.mul(x, scale, out=out)
    return x


def _combined(
    terms: Sequence[Tensor], factors_of: Sequence[Sequence[Tensor]], out: Tensor, product: Tensor
) -> Tensor:
    """``out = Σ cᵢ·xᵢ`` of one piece; ``product`` is scratch."""
    total: Tensor | None = None
    for x, scales in zip(terms, factors_of, strict=True):
        if total is None:
            total = _scaled(x, scales, out)
        else:
            total.add_(_scaled(x, scales, product))
    return out.zero_() if total is None else total
