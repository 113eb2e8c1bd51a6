"""A model of a few numbers, and a backend for it in plain Python.

For worlds of many nodes, where a tensor has a handful of elements and a framework's call costs more
than its arithmetic; and as a second opinion, since it shares no line with any other backend.
Sums and products are made in float64 and rounded once, as the contract asks.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import override

from gradientmail.backend.base import Array, Backend, Combination, Parameters, fp32_factors
from gradientmail.schema import Schema, TensorSpec
from gradientmail.testing.vector_formats import (
    Packed,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack,
)

type Row = memoryview | Packed
"""Numbers: F32 ones as a ``memoryview``, others packed."""


def put(row: Row, values: Iterable[float]) -> None:
    """Write all numbers of a row, rounded to its format."""
    if isinstance(row, Packed):
        row.put(values)
    else:
        row[:] = memoryview(array("f", values))


class Vector:
    """Parameters by name, each a row of numbers."""

    def __init__(
        self,
        values: Mapping[str, Iterable[float]],
        *,
        dtypes: Mapping[str, str] = MappingProxyType({}),
        buffers: Iterable[str] = (),
    ) -> None:
        """``values`` are rounded to F32, or to F16 or BF16 if ``dtypes`` says so.

        ``buffers`` are names of rows that are statistics of the training, and not trained.
        """
        self.dtypes = {name: dtypes.get(name, "F32") for name in values}
        self.buffers = frozenset(buffers)
        self.values: dict[str, Row] = {
            name: _row(row, self.dtypes[name]) for name, row in values.items()
        }

    def shift(self, amount: float) -> None:
        """Add ``amount`` to every number: a step of a training that costs nothing."""
        for row in self.values.values():
            put(row, [value + amount for value in row])

    def numbers(self) -> dict[str, list[float]]:
        """A copy, as lists."""
        return {name: list(map(float, row)) for name, row in self.values.items()}


def _row(values: Iterable[float], dtype: str) -> Row:
    if dtype == "F32":
        return memoryview(array("f", values))
    return Packed(memoryview(bytearray(pack(values, dtype))), dtype)


class VectorParameters(Parameters):
    """The parameters of one ``Vector``."""

    def __init__(self, model: Vector, *, averaged: frozenset[str] = frozenset()) -> None:
        """Bind ``model``; of its buffers those that are ``averaged``."""
        left = model.buffers - averaged
        self._values = {name: row for name, row in model.values.items() if name not in left}
        self.averaged = averaged
        self.local_buffers = tuple(sorted(left))
        self.schema: Schema = tuple(
            TensorSpec(name, model.dtypes[name], (len(row),))
            for name, row in sorted(self._values.items())
        )

    @override
    def capture(self, arrays: Mapping[str, Array]) -> Callable[[], None]:
        for name, out in arrays.items():
            if isinstance(out, Packed):
                out.put(self._values[name])
            else:
                out[:] = self._values[name]
        return _nothing

    @override
    def stage(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return arrays

    @override
    def apply(self, staged: Mapping[str, Array], *, mixing: float = 0.0) -> None:
        for name, committed in staged.items():
            row = self._values[name]
            if mixing:
                pairs = zip(row.tolist(), committed, strict=True)
                put(row, [mixing * x + (1 - mixing) * y for x, y in pairs])
            else:
                put(row, committed)

    @override
    def not_finite(self) -> list[str]:
        return [name for name, row in self._values.items() if not all(map(math.isfinite, row))]


class VectorBackend(Backend):
    """Arithmetic over rows, one number after the other."""

    name = "vector"

    @override
    def bind(self, model: object) -> Parameters:
        return VectorParameters(_checked(model))

    @override
    def bind_with_buffers(self, model: object) -> Parameters:
        vector = _checked(model)
        return VectorParameters(vector, averaged=vector.buffers)

    @override
    def array(self, buffer: memoryview, dtype: str, shape: tuple[int, ...]) -> Array:
        if dtype == "F32" and shape:
            return buffer.cast("f")
        if dtype in ("F32", "F16", "BF16"):
            return Packed(buffer, dtype)
        if dtype in ("F8_E4M3", "F8_E8M0", "F4"):
            return buffer
        raise ValueError(f"{dtype!r} is no format of a payload")

    @override
    def part(self, array: Array, start: int, stop: int) -> Array:
        return array[start:stop]

    @override
    def subtract(self, left: Array, right: Array, out: Array) -> None:
        put(out, [x - y for x, y in zip(left, right, strict=True)])

    @override
    def add(self, left: Array, right: Array, out: Array) -> None:
        put(out, [x + y for x, y in zip(left, right, strict=True)])

    @override
    def sum_of_squares(self, x: Array) -> float:
        return math.sumprod(x, x)

    @override
    def clamp(self, x: Array, limit: float) -> None:
        kept = [0.0 if math.isnan(value) else min(max(value, -limit), limit) for value in x]
        put(x, kept)

    @override
    def dot(self, x: Array, y: Array) -> float:
        return math.sumprod(x, y)

    @override
    def accumulate(self, out: Array, x: Array, *, keep: float, scale: float) -> None:
        added = _scaled(scale, x)
        if keep == 0:
            out[:] = memoryview(added)
            return
        kept = _scaled(keep, out)
        for index, (old, new) in enumerate(zip(kept, added, strict=True)):
            out[index] = old + new

    @override
    def combine(self, delta: Combination, out: Array) -> None:
        out[:] = memoryview(_sum(delta, len(out)))

    @override
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
        merged = _sum(delta, len(master))
        kept = [0.0] * len(master) if momentum is None else momentum.tolist()
        # Read before it is written: both outputs may lie over what is read here.
        places = master.tolist()
        for index, (place, change) in enumerate(zip(places, merged, strict=True)):
            force = beta * kept[index] + change
            new_momentum[index] = force
            new_master[index] = place - lr * (change + beta * force)
        return all(map(math.isfinite, new_master))

    @override
    def encode(self, x: Array, dtype: str, data: Array, scale: Array | None) -> None:
        if scale is None:
            put(data, x)
        elif dtype == "F8_E4M3":
            data[:], factor = encode_e4m3(x.tolist())
            put(scale, [factor])
        else:
            data[:], scale[:] = encode_e2m1(x.tolist())

    @override
    def decode(self, data: Array, dtype: str, scale: Array | None, out: Array) -> None:
        if scale is None:
            put(out, data)
        elif dtype == "F8_E4M3":
            put(out, decode_e4m3(data, float(scale)))
        else:
            put(out, decode_e2m1(data, scale, len(out)))


def _checked(model: object) -> Vector:
    if not isinstance(model, Vector):
        raise TypeError(f"a model of this backend is a Vector, not a {type(model).__name__}")
    return model


def _scaled(scale: float, x: Array) -> "array[float]":
    """``scale·x``, the factors and each product rounded to F32."""
    products = array("f", x)
    for factor in array("f", fp32_factors(scale)):
        products = array("f", [factor * value for value in products])
    return products


def _sum(delta: Combination, count: int) -> "array[float]":
    if not delta:
        return array("f", bytes(4 * count))
    first, *others = (_scaled(scale, x) for scale, x in delta)
    for other in others:
        first = array("f", [x + y for x, y in zip(first, other, strict=True)])
    return first


def _nothing() -> None:
    """The copy is complete at once."""
