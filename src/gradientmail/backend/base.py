"""What a framework does for GradientMail: reads and writes a model, and does the arithmetic.

Two halves. ``Parameters`` is one model, touched by its training thread. ``Backend`` is arithmetic
over host memory, called from any thread, one call at a time on the same arrays; its arrays are
views of buffers that the caller owns, and every result is written into an array that the caller
passes, so that a tensor has one place in memory from the model to the store.

Arrays are contiguous. Large ones are worked on in chunks that stay in the processor's cache, on
the calling thread alone: the exchange leaves the other cores to the training. Sums are float64.
Equal inputs give equal bytes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradientmail.buffers import HOST, BufferPool
from gradientmail.schema import Schema

type Array = Any
"""A tensor of the backend's framework (``torch.Tensor``, ``numpy.ndarray``, …)."""

type Combination = Sequence[tuple[float, Array]]
"""The tensor ``Σ cᵢ·xᵢ``, one or two terms; no term is the zero tensor."""


class Parameters(ABC):
    """The exchanged parameters of one model: trainable ones, tied ones once."""

    schema: Schema
    identity: frozenset[int] = frozenset()
    """Ids of objects that are this model's alone, whatever it is wrapped in; they are held here."""
    averaged: frozenset[str] = frozenset()
    """Names in ``schema`` of buffers, which are averaged and not trained."""
    local_buffers: tuple[str, ...] = ()
    """Names of floating-point buffers that a checkpoint holds and the exchange does not."""

    @abstractmethod
    def capture(self, arrays: Mapping[str, Array]) -> Callable[[], None]:
        """Copy the parameters named by ``arrays`` into them (same dtypes and shapes).

        Training thread. The copy is of this moment whatever the caller does to the parameters
        afterwards. It is complete when the returned function has returned, which may be called
        from any thread (on CUDA the copy runs on; on the CPU it is complete at once).
        """

    @abstractmethod
    def stage(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Bring host ``arrays`` to where ``apply`` needs them. Any thread; may take a while."""

    @abstractmethod
    def apply(self, staged: Mapping[str, Array], *, mixing: float = 0.0) -> None:
        """Write ``mixing·θ + (1−mixing)·Θ`` into the parameters, Θ being what was staged.

        Training thread. In place: storage, ``requires_grad`` and optimizer state stay as they
        are, and autograd does not notice. Does not wait for the device.
        """

    @abstractmethod
    def not_finite(self) -> list[str]:
        """Names of the parameters that hold a NaN or an infinity. Training thread."""


class Backend(ABC):
    """Arithmetic over host memory in one framework."""

    name: str

    @abstractmethod
    def bind(self, model: object) -> Parameters:
        """The exchanged parameters of ``model``.

        ``ValueError`` or ``TypeError`` naming what is wrong.
        """

    def bind_with_buffers(self, model: object) -> Parameters:
        """As ``bind``, and its floating-point buffers beside them, named in ``averaged``."""
        raise ValueError(
            f'buffers="average" is for the buffers of PyTorch models; a {type(model).__name__} has '
            f"none that the {self.name} backend knows of. Leave the option out"
        )

    def pool(self) -> BufferPool:
        """Host memory that copies to and from the bound model's device are fast with."""
        return HOST

    @abstractmethod
    def array(self, buffer: memoryview, dtype: str, shape: tuple[int, ...]) -> Array:
        """A view of ``buffer``, which is exactly the data of a tensor of this dtype and shape.

        It keeps ``buffer`` alive. For ``F4`` the shape counts elements, two a byte, and the array
        is one of bytes. The buffer may be read-only; then the array is only read.
        """

    def part(self, array: Array, start: int, stop: int) -> Array:
        """Its elements from ``start`` to ``stop``, flat, in the same memory; not of ``F4``.

        As here for arrays that know ``reshape``.
        """
        return array.reshape(-1)[start:stop]

    def on_host(self, array: Array) -> Array:
        """An array that a user kept, as a contiguous one in host memory."""
        return array

    @abstractmethod
    def subtract(self, left: Array, right: Array, out: Array) -> None:
        """``out = left − right``, computed in fp32 and rounded to ``out``'s dtype (nearest even).

        All of one shape, F32, F16 or BF16 each; ``out`` may be ``right``.
        """

    @abstractmethod
    def add(self, left: Array, right: Array, out: Array) -> None:
        """``out = left + right``, as ``subtract`` computes it."""

    @abstractmethod
    def sum_of_squares(self, x: Array) -> float:
        """``Σ x²`` in float64 of an F32, F16 or BF16 array.

        Not finite exactly when an element is not.
        """

    def is_finite(self, x: Array) -> bool:
        """Whether every element of an F32, F16 or BF16 array is; a backend may have a quick way."""
        return math.isfinite(self.sum_of_squares(x))

    @abstractmethod
    def clamp(self, x: Array, limit: float) -> None:
        """Bring an F32, F16 or BF16 array into [−limit, limit], in place; NaN becomes 0.

        ``limit`` is positive and a value of the array's dtype.
        """

    @abstractmethod
    def dot(self, x: Array, y: Array) -> float:
        """``Σ x·y`` in float64 of two F32, F16 or BF16 arrays with finite elements."""

    def sum_of_products(self, x: Array, y: Array) -> float:
        """``Σ x·y`` for statistics: products and sum may be fp32 where that is in range."""
        return self.dot(x, y)

    def subtract_squares(self, left: Array, right: Array, out: Array) -> float:
        """``subtract``, and ``sum_of_squares`` of what it wrote; possibly in one pass."""
        self.subtract(left, right, out)
        return self.sum_of_squares(out)

    def dot_squares(self, x: Array, y: Array) -> tuple[float, float]:
        """``dot`` of both and ``sum_of_squares`` of ``y``; a backend may do it in one pass.

        ``x`` is finite. When ``y`` is not, nor is the second, and the first means nothing.
        """
        squares = self.sum_of_squares(y)
        return (self.dot(x, y) if math.isfinite(squares) else math.nan), squares

    @abstractmethod
    def accumulate(self, out: Array, x: Array, *, keep: float, scale: float) -> None:
        """``out = keep·out + scale·x`` for an F32 ``out``; with ``keep == 0`` out is not read.

        With ``keep == 0`` an F32 ``x`` may be ``out``; otherwise they share no memory.
        ``keep``, ``scale`` and each product are rounded to fp32 before the sum, so that exact
        opposites cancel exactly.
        ``scale`` may lie outside fp32's range; the result must be right as long as it is in it.
        """

    @abstractmethod
    def combine(self, delta: Combination, out: Array) -> None:
        """``out = Σ cᵢ·xᵢ`` (F32 ``out``), each product rounded before the sum.

        Zero with no term. The ``cᵢ`` may lie outside fp32's range, here and in ``nesterov``.
        """

    @abstractmethod
    def nesterov(
        self,
        delta: Combination,
        momentum: Array | None,
        master: Array,
        *,
        beta: float,
        lr: float,
        new_momentum: Array,
        new_master: Array,
    ) -> bool:
        """``m' = β·m + Δ`` and ``master' = master − lr·(Δ + β·m')``, in fp32, in one pass.

        Returns whether all of ``master'`` is finite.
        ``momentum=None`` is zero. ``master`` may be F32, F16 or BF16 (read as fp32); the outputs
        are F32. ``new_momentum`` may be ``momentum``, and ``new_master`` an F32 ``master`` or one
        of the F32 arrays of ``delta``: of each element all is read before that is written. They
        share no other memory.
        """

    @abstractmethod
    def encode(self, x: Array, dtype: str, data: Array, scale: Array | None) -> None:
        """Write the F32 array ``x`` as ``dtype`` into ``data``, rounded to nearest even.

        ``F32``, ``F16``, ``BF16``: no ``scale``. The others store ``x / 2^k``. ``F8_E4M3``:
        ``scale`` is ``2^k``, F32 of shape (), with ``k = ⌊log2 max|x|⌋ − 7``. ``F4`` (E2M1, as in
        the OCP Microscaling formats): ``x`` is flattened and zero-padded to blocks of 32, each
        with its ``k = ⌊log2 max|x|⌋ − 2`` as the byte ``k + 127`` in ``scale``; ``data`` holds two
        elements a byte, the first in the low half, as codes 0 to 7 for 0, ½, 1, 1½, 2, 3, 4, 6
        (more counts as 6) plus 8 when ``x < 0``. ``k`` is 0 for zeros, else from −126 to 127.
        """

    @abstractmethod
    def decode(self, data: Array, dtype: str, scale: Array | None, out: Array) -> None:
        """The exact inverse reading of ``encode``, into the F32 array ``out``."""

    def encode_difference(
        self,
        left: Array,
        right: Array,
        dtype: str,
        data: Array,
        scale: Array,
        blank: Callable[[], Array],
    ) -> bool:
        """``encode`` of ``left − right`` in a quantized ``dtype``; possibly in one pass.

        ``blank`` gives an F32 array of their shape to work in. False when an element of the
        difference is not finite: then ``data`` and ``scale`` mean nothing.
        """
        difference = blank()
        self.subtract(left, right, difference)
        self.encode(difference, dtype, data, scale)
        return math.isfinite(self.sum_of_squares(difference))

    def add_decoded(
        self,
        base: Array,
        data: Array,
        dtype: str,
        scale: Array,
        out: Array,
        blank: Callable[[], Array],
    ) -> None:
        """``out = base + decoded``, of a quantized ``dtype``; ``blank`` as above."""
        decoded = blank()
        self.decode(data, dtype, scale, decoded)
        self.add(base, decoded, out)


def fp32_factors(scale: float) -> list[float]:
    """Fp32 factors with the product ``scale``; multiplying by each in turn stays in range.

    For a coefficient outside fp32's range whose products are in it. ``ValueError`` for one that
    is not finite.
    """
    if not math.isfinite(scale):
        raise ValueError(f"a coefficient must be finite, not {scale!r}")
    factors: list[float] = []
    while abs(scale) > 2.0**127:
        factors.append(2.0**100)
        scale *= 2.0**-100
    while 0.0 < abs(scale) < 2.0**-126:
        factors.append(2.0**-100)
        scale *= 2.0**100
    return [*factors, scale]
