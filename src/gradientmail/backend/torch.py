"""PyTorch: its models, and the arithmetic over host memory in it. The only file that imports torch.

The arithmetic runs in chunks of ``CHUNK`` elements: three or four of them stay in the second-level
cache, and PyTorch runs an operation over fewer than 32,768 elements on the calling thread, so no
process-wide thread count has to be touched.
"""

import ctypes
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any

from gradientmail.backend.base import Backend, Combination, Parameters
from gradientmail.backend.cuda_copies import DeviceCopies
from gradientmail.backend.parameter_names import named_parameters
from gradientmail.buffers import host_memory
from gradientmail.errors import MissingExtra
from gradientmail.schema import Schema, TensorSpec

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise MissingExtra("torch", "torch") from error

CHUNK = 31 * 1024
"""Elements worked on at a time: under PyTorch's 32,768, whole F4 blocks, whole rows of ``ROW``."""

ROW = 1024
"""Elements of a large tensor that are summed in fp32 before the sum goes on in float64."""

ROWS_FROM = 2**20
"""Tensors of fewer elements are summed in float64 throughout."""

BLOCK = 32
"""Elements of an F4 tensor that share a scale."""

_PARAMETER_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _PARAMETER_DTYPES.items()} | {
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
        """Allocate plain memory until a model with CUDA parameters is bound, then pinned memory."""
        self._pinned = False

    def bind(self, model: object) -> "TorchParameters":
        """The trainable parameters of a ``torch.nn.Module``, of F32, F16 or BF16.

        ``TypeError`` for another object; ``ValueError`` naming a parameter that cannot be
        exchanged, or for a model without a trainable one.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"a model is a torch.nn.Module, not a {type(model).__qualname__}")
        found = {n: p for n, p in named_parameters(model) if p.requires_grad}
        if not found:
            raise ValueError("the model has no trainable parameter: none has requires_grad=True")
        for name, parameter in found.items():
            _check_exchangeable(name, parameter)
        self._pinned |= any(p.device.type == "cuda" for p in found.values())
        return TorchParameters(found)

    def allocate(self, nbytes: int) -> memoryview:
        """Fresh host memory, pinned once a model with CUDA parameters is bound."""
        if not self._pinned:
            return host_memory(nbytes)
        block = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cpu", pin_memory=True)
        memory: Any = (ctypes.c_ubyte * block.numel()).from_address(block.data_ptr())
        memory.block = block  # the view keeps the ctypes array alive, and that the tensor
        return memoryview(memory).cast("B")

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
        total = _row_sums(x, x) if x.numel() >= ROWS_FROM else math.nan
        return total if _trustworthy(total, x.numel()) else _exact_dot(x, x)

    def dot(self, x: Tensor, y: Tensor) -> float:
        """``Σ x·y``: in float64, large tensors by rows in fp32 unless that could lose digits."""
        total = _row_sums(x, y) if x.numel() >= ROWS_FROM else math.nan
        return total if _trustworthy(total, x.numel()) else _exact_dot(x, y)

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
        factors, product, total = (
            [_factors(c) for c, _ in delta],
            _scratch(master),
            _scratch(master),
        )
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
        _CODECS.get(dtype, (_convert, _convert))[0](x, data, scale)

    def decode(self, data: Tensor, dtype: str, scale: Tensor | None, out: Tensor) -> None:
        """Read what ``encode`` wrote into the F32 ``out``. Not finite where the data is not."""
        _CODECS.get(dtype, (_convert, _convert))[1](data, out, scale)


class TorchParameters(Parameters):
    """Parameters on the CPU, on CUDA devices, or on both.

    They are read and written through ``parameter.data``, taken anew each time: ``model.to(...)``
    replaces it. A write through it leaves the version counters of autograd alone, so a graph that
    is still to be run backward does not fail because the exchange came between.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """The parameters by name, already checked."""
        self._parameters = dict(parameters)
        self.schema: Schema = tuple(
            TensorSpec(name, _PARAMETER_DTYPES[p.dtype], tuple(p.shape))
            for name, p in sorted(self._parameters.items())
        )
        self._expanded = any(_repeated_dims(p) for p in self._parameters.values())
        self._copies: dict[torch.device, DeviceCopies] = {}
        self._lock = threading.Lock()

    def capture(self, arrays: Mapping[str, Tensor]) -> Callable[[], None]:
        """Copy parameters into ``arrays``; on CUDA the copies run on beside the training."""
        waits = []
        for device, (parameters, hosts) in self._by_device(arrays).items():
            if device.type == "cuda":
                waits.append(self._copies_of(device).download(parameters, hosts))
            else:
                torch._foreach_copy_(hosts, parameters)

        def wait_for_all() -> None:
            for wait in waits:
                wait()

        return wait_for_all

    def stage(self, arrays: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """``arrays`` themselves, or their copies on the device of a CUDA parameter."""
        staged = dict(arrays)
        names: dict[torch.device, list[str]] = {}
        for name in arrays:
            names.setdefault(self._parameters[name].device, []).append(name)
        for device, moved in names.items():
            if device.type == "cuda":
                uploaded = self._copies_of(device).upload([arrays[name] for name in moved])
                staged.update(zip(moved, uploaded, strict=True))
        return staged

    def apply(self, staged: Mapping[str, Tensor], *, mixing: float = 0.0) -> None:
        """Write ``mixing·θ + (1−mixing)·Θ`` in place."""
        for device, (parameters, sources) in self._by_device(staged).items():
            if device.type == "cuda":
                self._copies_of(device).use(sources)
            pairs = [(data, source) for data, source in zip(parameters, sources, strict=True)]

    def not_finite(self) -> list[str]:
        """Names of parameters with a NaN or an infinity; one wait for each device."""
        found: list[str] = []
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, parameter in self._parameters.items():
            if parameter.numel():
                by_device.setdefault(parameter.device, []).append((name, parameter.data))
        for named in by_device.values():
            norms = torch._foreach_norm([data for _, data in named], math.inf)
            finite = torch.stack([norm.float() for norm in norms]).isfinite().tolist()
            found += [name for (name, _), good in zip(named, finite, strict=True) if not good]
        return sorted(found)

    def _by_device(
        self, arrays: Mapping[str, Tensor]
    ) -> dict[torch.device, tuple[list[Tensor], list[Tensor]]]:
        """Lists of parameters and of their arrays, of one shape each, by the parameters' device."""
        groups: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for name, array in arrays.items():
            data = self._parameters[name].data
            if data.dtype != array.dtype or data.shape != array.shape:
                raise ValueError(
                    f"the parameter {name!r} is {data.dtype} {tuple(data.shape)} and was "
                    f"{array.dtype} {tuple(array.shape)} when the session began; change dtypes "
                    "and shapes before that"
                )
            parameters, others = groups.setdefault(data.device, ([], []))
            parameters.append(data)
            others.append(array)
        return groups

    def _copies_of(self, device: torch.device) -> DeviceCopies:
        with self._lock:
            if device not in self._copies:
                self._copies[device] = DeviceCopies(torch.cuda, device)
            return self._copies[device]


def _chunks(*arrays: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat pieces of contiguous arrays of one size, in step."""
    if not arrays[0].numel():
        return iter(())
    return zip(*(array.view(-1).split(CHUNK) for array in arrays), strict=True)


def _scratch(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for one piece of ``like``."""
    return torch.empty(min(like.numel(), CHUNK), dtype=dtype, device="cpu")


def _fp32(x: Tensor, scratch: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else scratch[: x.numel()].copy_(x)


def _elementwise(
    operation: Callable[..., Tensor],
    left: Tensor,
    right: Tensor,
    out: Tensor,
) -> None:
    """``operation`` in fp32, rounded once. PyTorch does just that itself when all dtypes agree."""
    one_dtype = left.dtype == right.dtype == out.dtype
    first, second = _scratch(out), _scratch(out)
    for x, y, o in _chunks(left, right, out):
        if one_dtype:
            operation(x, y, out=o)
        elif o.dtype == torch.float32:
            operation(_fp32(x, first), _fp32(y, second), out=o)
        else:
            o.copy_(operation(_fp32(x, first), _fp32(y, second), out=first[: o.numel()]))


def _factors(scale: float) -> list[float]:
    """Fp32 factors whose product is ``scale``, the steps first that keep every product in range."""
    factors = []
    while abs(scale) > 2.0**127:
        factors.append(2.0**100)
        scale *= 2.0**-100
    while 0.0 < abs(scale) < 2.0**-126:
        factors.append(2.0**-100)
        scale *= 2.0**100
    return [*factors, scale]


def _scaled(x: Tensor, factors: Sequence[float], out: Tensor) -> Tensor:
    """``out = x`` times all factors, ``out`` being F32."""
    if x.dtype != torch.float32:
        x = out.copy_(x)
    for factor in factors:
        x = torch.mul(x, factor, out=out)
    return x


def _combined(
    terms: Sequence[Tensor],
    factors: Sequence[Sequence[float]],
    out: Tensor,
    product: Tensor,
) -> Tensor:
    """``out = Σ cᵢ·xᵢ`` of one piece; ``product`` is scratch."""
    if not terms:
        return out.zero_()
    _scaled(terms[0], factors[0], out)
    for x, scales in zip(terms[1:], factors[1:], strict=True):
        out.add_(_scaled(x, scales, product[: out.numel()]))
    return out


def _trustworthy(total: float, count: int) -> bool:
    """Whether neither overflow nor underflow of fp32 squares or products can matter in ``total``.

    Underflow loses less than 2e-38 an element, so a larger total has lost no digit that counts.
    """
    return math.isfinite(total) and abs(total) > 1e-28 * count


def _row_sums(x: Tensor, y: Tensor) -> float:
    """``Σ x·y``, each row in fp32 (for ``y is x`` its norm, which is faster), the rest in float64."""
    whole = x.numel() // ROW * ROW
    first, second = _scratch(x), _scratch(x)
    tail = _exact_dot(x.view(-1)[whole:], y.view(-1)[whole:])
    found = torch.empty(whole // ROW, dtype=torch.float32, device="cpu")
    pieces = _chunks(x.view(-1)[:whole], y.view(-1)[:whole])
    for (a, b), sums in zip(pieces, found.split(CHUNK // ROW), strict=True):
        rows = _fp32(a, first).view(-1, ROW)
        if x is y:
            torch.linalg.vector_norm(rows, dim=1, out=sums)
        else:
            product = first[: a.numel()].view(-1, ROW)
            torch.mul(rows, _fp32(b, second).view(-1, ROW), out=product)
            torch.sum(product, dim=1, out=sums)
    exact = [part.double() for part in found.split(CHUNK)]
    return tail + math.fsum(float((e.square_() if x is y else e).sum()) for e in exact)


def _exact_dot(x: Tensor, y: Tensor) -> float:
    """``Σ x·y`` in float64."""
    first, second = _scratch(x, torch.float64), _scratch(x, torch.float64)
    total = 0.0
    for a, b in _chunks(x, y):
        left = first[: a.numel()].copy_(a)
        right = left if x is y else second[: b.numel()].copy_(b)
        total += float(left.mul_(right).sum())
    return total


def _convert(source: Tensor, target: Tensor, scale: Tensor | None) -> None:
    """F32, F16 and BF16, either way."""
    del scale
    for x, out in _chunks(source, target):
        out.copy_(x)


def _encode_e4m3(x: Tensor, data: Tensor, scale: Tensor) -> None:
    largest, values = 0.0, _scratch(x)
    for (piece,) in _chunks(x):
        largest = max(largest, float(torch.abs(piece, out=values[: piece.numel()]).amax()))
    # A subnormal's exponent field reads -127; its true exponent is less, and both are clamped.
    exponent = min(max(math.frexp(largest)[1] - 1 - 7, -126), 127) if largest else 0
    scale.fill_(2.0**exponent)
    for piece, target in _chunks(x, data):
        # At most 256 after scaling, within the format's 448; the cast rounds to nearest even.
        target.copy_(torch.mul(piece, 2.0**-exponent, out=values[: piece.numel()]))


_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _decode_e4m3(data: Tensor, out: Tensor, scale: Tensor) -> None:
    index, factor = _scratch(out, torch.int32), float(scale)
    for codes, target in _chunks(data.view(torch.uint8), out):
        torch.index_select(_E4M3_VALUES, 0, index[: codes.numel()].copy_(codes), out=target)
        target.mul_(factor)


def _encode_e2m1(x: Tensor, data: Tensor, scale: Tensor) -> None:
    # CHUNK is even and whole blocks: the pieces of data and scale are those of x.
    pieces = x.view(-1).split(CHUNK) if x.numel() else ()
    targets = zip(data.split(CHUNK // 2), scale.split(CHUNK // BLOCK), strict=True)
    for piece, (packed, scales) in zip(pieces, targets, strict=bool(pieces)):
        if piece.numel() % BLOCK:
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % BLOCK))  # noqa: PLW2901
        _encode_blocks(piece, packed, scales)


def _encode_blocks(x: Tensor, packed: Tensor, scales: Tensor) -> None:
    """One piece of whole blocks."""
    signed = torch.add(x, 0.0)  # turns -0.0 into 0.0: only what is below zero has a sign
    magnitude = signed.abs()
    largest = magnitude.view(-1, BLOCK).amax(dim=1)
    # Exponent fields: 127 + ⌊log2⌋ of the largest, 127 + k of the scale, 127 − k of its inverse.
    field = (largest.view(torch.int32) >> 23).sub_(2).clamp_(min=1)
    field.masked_fill_(largest == 0.0, 127)
    scales.copy_(field)
    inverse = (254 - field).bitwise_left_shift_(23).view(torch.float32)
    magnitude.view(-1, BLOCK).mul_(inverse.view(-1, 1))
    # The codes 0-4 are steps of 1/2, 4-6 of 1, 6-7 of 2: the code is the least of three roundings.
    # Fp32 has steps of 1 from 2**23 on, so adding that rounds to nearest even, once.
    code = torch.add(_TWO_23, magnitude, alpha=2.0)
    torch.minimum(code, magnitude + (2.0**23 + 2), out=code)
    torch.minimum(code, torch.add(_TWO_23 + 4, magnitude, alpha=0.5), out=code)
    codes = code.clamp_(max=2.0**23 + 7).view(torch.int32).to(torch.uint8)
    signs = (signed.view(torch.int32) >> 28).to(torch.uint8).bitwise_and_(8)
    pairs = codes.bitwise_or_(signs).view(torch.int16)
    packed.copy_(torch.bitwise_right_shift(pairs, 4).bitwise_or_(pairs))


_TWO_23 = torch.tensor(2.0**23)
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_SIGNED = torch.cat([_E2M1, -_E2M1])
# Both values of a byte as one 64-bit word, so that one look-up gives two elements.
_E2M1_PAIRS = torch.stack([_E2M1_SIGNED.repeat(16), _E2M1_SIGNED.repeat_interleave(16)], 1)
_E2M1_WORDS = _E2M1_PAIRS.view(torch.int64).view(-1)
_E8M0_VALUES = (torch.arange(256, dtype=torch.int32) << 23).view(torch.float32)
_E8M0_VALUES[0], _E8M0_VALUES[255] = 2.0**-127, math.nan


def _decode_e2m1(data: Tensor, out: Tensor, scale: Tensor) -> None:
    targets = out.view(-1).split(CHUNK) if out.numel() else ()
    sources = zip(data.split(CHUNK // 2), scale.split(CHUNK // BLOCK), strict=True)
    for target, (packed, scales) in zip(targets, sources, strict=bool(targets)):
        words = torch.index_select(_E2M1_WORDS, 0, packed.int())
        factors = torch.index_select(_E8M0_VALUES, 0, scales.int()).view(-1, 1)
        values = words.view(torch.float32).view(-1, BLOCK)
        if target.numel() % BLOCK:
            target.copy_(values.mul_(factors).view(-1)[: target.numel()])
        else:
            torch.mul(values, factors, out=target.view(-1, BLOCK))


_CODECS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "F8_E4M3": (_encode_e4m3, _decode_e4m3),
    "F4": (_encode_e2m1, _decode_e2m1),
}
"""How the quantized formats are written and read."""
