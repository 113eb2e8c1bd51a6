"""NumPy: the reference for the arithmetic of the exchange, and dicts of arrays as models.

A node needs no other framework to close rounds, to train arrays of its own and to read a run.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gradientmail.backend.base import Backend, Combination, fp32_factors
from gradientmail.backend.numpy_chunks import Values, bfloat16, chunks, np, quiet, scratch
from gradientmail.backend.numpy_formats import DECODERS, ENCODERS, convert, pieces_of
from gradientmail.backend.numpy_model import NumpyParameters

_DTYPES: dict[str, Callable[[], Any]] = {
    "F32": lambda: np.float32,
    "F16": lambda: np.float16,
    "BF16": bfloat16,
    "F8_E4M3": lambda: np.uint8,
    "F8_E8M0": lambda: np.uint8,
    "F4": lambda: np.uint8,
}


class HostArithmetic(Backend):
    """Arithmetic on NumPy arrays over buffers of host memory; sums are float64 throughout.

    For whatever framework the models are of: ``bind`` is left to its backend.
    """

    def array(self, buffer: memoryview, dtype: str, shape: tuple[int, ...]) -> Values:
        """An array over ``buffer``; of bytes for F8_E4M3, F8_E8M0 and F4 (two elements each)."""
        if dtype == "F4":
            shape = (math.prod(shape) // 2,)
        kind = np.dtype(_DTYPES[dtype]())
        if not math.prod(shape):
            return np.empty(shape, kind)
        return np.frombuffer(buffer, kind).reshape(shape)

    @quiet
    def subtract(self, left: Values, right: Values, out: Values) -> None:
        """``out = left − right`` in fp32, rounded to ``out``'s dtype."""
        operate = _Elementwise(np.subtract, out)
        for pieces in chunks(left, right, out):
            operate(*pieces)

    @quiet
    def add(self, left: Values, right: Values, out: Values) -> None:
        """``out = left + right`` in fp32, rounded to ``out``'s dtype."""
        operate = _Elementwise(np.add, out)
        for pieces in chunks(left, right, out):
            operate(*pieces)

    def is_finite(self, x: Values) -> bool:
        """Whether every element is."""
        return all(bool(np.isfinite(piece).all()) for (piece,) in chunks(x))

    def clamp(self, x: Values, limit: float) -> None:
        """Into [−limit, limit], in place; NaN becomes 0."""
        low, high = x.dtype.type(-limit), x.dtype.type(limit)
        for (piece,) in chunks(x):
            piece[np.isnan(piece)] = 0
            np.minimum(np.maximum(piece, low, out=piece), high, out=piece)

    @quiet
    def sum_of_squares(self, x: Values) -> float:
        """``Σ x²`` in float64."""
        product = _Product(x)
        return sum((product(piece, piece) for (piece,) in chunks(x)), 0.0)

    @quiet
    def dot(self, x: Values, y: Values) -> float:
        """``Σ x·y`` in float64."""
        product = _Product(x)
        return sum((product(a, b) for a, b in chunks(x, y)), 0.0)

    @quiet
    def subtract_squares(self, left: Values, right: Values, out: Values) -> float:
        """``subtract`` and ``sum_of_squares`` of the result, piece by piece in the cache."""
        operate, product, total = _Elementwise(np.subtract, out), _Product(out), 0.0
        for x, y, o in chunks(left, right, out):
            operate(x, y, o)
            total += product(o, o)
        return total

    @quiet
    def dot_squares(self, x: Values, y: Values) -> tuple[float, float]:
        """``dot`` and ``sum_of_squares`` of ``y``, piece by piece in the cache."""
        product, dot, squares = _Product(x), 0.0, 0.0
        for a, b in chunks(x, y):
            squares += product(b, b)
            dot += product(a, b)
        return dot, squares

    @quiet
    def accumulate(self, out: Values, x: Values, *, keep: float, scale: float) -> None:
        """``out = keep·out + scale·x``, each product rounded to fp32 before the sum."""
        keeps, scales, product = _factors(keep), _factors(scale), scratch(out)
        for o, v in chunks(out, x):
            if keep == 0.0:
                _scaled(v, scales, o)
                continue
            if keep != 1.0:
                _scaled(o, keeps, o)
            if scale:
                np.add(o, _scaled(v, scales, product[: o.size]), out=o)

    @quiet
    def combine(self, delta: Combination, out: Values) -> None:
        """``out = Σ cᵢ·xᵢ``, each product rounded to fp32 before the sum."""
        factors, product = [_factors(scale) for scale, _ in delta], scratch(out)
        for o, *terms in chunks(out, *(x for _, x in delta)):
            _combined(terms, factors, o, product)

    @quiet
    def nesterov(
        self,
        delta: Combination,
        momentum: Values | None,
        master: Values,
        *,
        beta: float,
        lr: float,
        new_momentum: Values,
        new_master: Values,
    ) -> bool:
        """``m' = β·m + Δ`` and ``master' = master − lr·(Δ + β·m')``, each chunk read once."""
        factors = [_factors(scale) for scale, _ in delta]
        decay, rate = np.float32(beta), np.float32(lr)
        products, steps, finite = scratch(master), scratch(master), True
        old = new_momentum if momentum is None else momentum
        arrays = (master, old, new_momentum, new_master, *(x for _, x in delta))
        for base, m, new_m, new, *terms in chunks(*arrays):
            product = products[: base.size]
            step = _combined(terms, factors, steps[: base.size], product)
            if momentum is None:
                np.copyto(new_m, step)
            else:
                np.add(step, np.multiply(m, decay, out=product), out=new_m)
            np.add(step, np.multiply(new_m, decay, out=product), out=step)
            np.multiply(step, rate, out=step)
            np.subtract(_fp32(base, product), step, out=new)
            finite = finite and bool(np.isfinite(new).all())
        return finite

    @quiet
    def encode(self, x: Values, dtype: str, data: Values, scale: Values | None) -> None:
        """Write the F32 ``x`` as ``dtype``, rounded to nearest even."""
        if scale is None:
            convert(x, data, dtype)
        else:
            ENCODERS[dtype](pieces_of(x), data, scale)

    @quiet
    def decode(self, data: Values, dtype: str, scale: Values | None, out: Values) -> None:
        """Read what ``encode`` wrote into the F32 ``out``. Not finite where the data is not."""
        if scale is None:
            convert(data, out, dtype)
        else:
            deque(DECODERS[dtype](data, scale, pieces_of(out)()), maxlen=0)

    @quiet
    def encode_difference(
        self,
        left: Values,
        right: Values,
        dtype: str,
        data: Values,
        scale: Values,
        blank: Callable[[], Values],
    ) -> bool:
        """``encode`` of ``left − right``, which exists in pieces only; whether it is finite."""
        del blank
        operate, difference = _Elementwise(np.subtract, left), scratch(left)

        def pieces() -> Iterator[Values]:
            for x, y in chunks(left, right):
                piece = difference[: x.size]
                operate(x, y, piece)
                yield piece

        return ENCODERS[dtype](pieces, data, scale)

    @quiet
    def add_decoded(
        self,
        base: Values,
        data: Values,
        dtype: str,
        scale: Values,
        out: Values,
        blank: Callable[[], Values],
    ) -> None:
        """``out = base + decoded``, which exists in pieces only."""
        del blank
        operate, values = _Elementwise(np.add, out), scratch(out)
        targets = (values[: piece.size] for (piece,) in chunks(out))
        decoded = DECODERS[dtype](data, scale, targets)
        for (x, o), y in zip(chunks(base, out), decoded, strict=True):
            operate(x, y, o)


class NumpyBackend(HostArithmetic):
    """Models are dicts of NumPy arrays."""

    name = "numpy"

    def bind(self, model: object) -> NumpyParameters:
        """The floating arrays of a dict (or another mapping) of NumPy arrays by name.

        ``TypeError`` or ``ValueError`` naming what cannot be exchanged, and what to do.
        """
        return NumpyParameters(model)


class _Elementwise:
    """``operation`` on pieces, in fp32 and rounded once."""

    def __init__(self, operation: np.ufunc, like: Values) -> None:
        self._operation = operation
        self._scratch = [scratch(like) for _ in range(2)]

    def __call__(self, x: Values, y: Values, out: Values) -> None:
        first, second = (memory[: out.size] for memory in self._scratch)
        left, right = _fp32(x, first), _fp32(y, second)
        if out.dtype == np.float32:
            self._operation(left, right, out=out)
        else:
            np.copyto(out, self._operation(left, right, out=first), casting="unsafe")


class _Product:
    """``Σ x·y`` of pieces in float64, on the calling thread alone: no BLAS."""

    def __init__(self, like: Values) -> None:
        self._scratch = [scratch(like, np.float64) for _ in range(2)]

    def __call__(self, x: Values, y: Values) -> float:
        first, second = (memory[: x.size] for memory in self._scratch)
        np.copyto(first, x)
        if y is not x:
            np.copyto(second, y)
        return float(np.multiply(first, first if y is x else second, out=first).sum())


def _factors(scale: float) -> list[np.float32]:
    return [np.float32(factor) for factor in fp32_factors(scale)]


def _fp32(x: Values, memory: Values) -> Values:
    if x.dtype == np.float32:
        return x
    np.copyto(memory, x)
    return memory


def _scaled(x: Values, factors: Sequence[np.float32], out: Values) -> Values:
    """``out = x`` times all factors, ``out`` being F32."""
    x = _fp32(x, out)
    for factor in factors:
        x = np.multiply(x, factor, out=out)
    return x


def _combined(
    terms: Sequence[Values], factors: Sequence[Sequence[np.float32]], out: Values, product: Values
) -> Values:
    """``out = Σ cᵢ·xᵢ`` of one piece; ``product`` is scratch."""
    if not terms:
        out.fill(0.0)
        return out
    _scaled(terms[0], factors[0], out)
    for x, scales in zip(terms[1:], factors[1:], strict=True):
        np.add(out, _scaled(x, scales, product[: out.size]), out=out)
    return out
