"""A model of a few numbers, and a backend for it in plain Python.

For worlds of many nodes, where a tensor has a handful of elements and a framework's call costs more
than its arithmetic; and as a second opinion, since it shares no line with any other backend.
Everything is F32: sums and products are made in float64 and rounded once, as the contract asks.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import override

from gradientmail.backend.base import Array, Backend, Combination, Parameters, fp32_factors
from gradientmail.schema import Schema, TensorSpec


class Vector:
    """Parameters by name, each a row of F32 numbers."""

    def __init__(self, values: Mapping[str, Iterable[float]]) -> None:
        """``values`` are rounded to F32."""
        self.values = {name: memoryview(array("f", row)) for name, row in values.items()}

    def shift(self, amount: float) -> None:
        """Add ``amount`` to every number: a step of a training that costs nothing."""
        for row in self.values.values():
            row[:] = memoryview(array("f", [value + amount for value in row]))

    def numbers(self) -> dict[str, list[float]]:
        """A copy, as lists."""
        return {name: list(map(float, row)) for name, row in self.values.items()}


class VectorParameters(Parameters):
    """The parameters of one ``Vector``."""

    def __init__(self, model: Vector) -> None:
        """Bind ``model``."""
        self._values = model.values
        self.schema: Schema = tuple(
            TensorSpec(name, "F32", (len(row),)) for name, row in sorted(model.values.items())
        )

    @override
    def capture(self, arrays: Mapping[str, Array]) -> Callable[[], None]:
        for name, out in arrays.items():
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
                for index, value in enumerate(committed):
                    row[index] = mixing * row[index] + (1 - mixing) * value
            else:
                row[:] = committed

    @override
    def not_finite(self) -> list[str]:
        return [name for name, row in self._values.items() if not all(map(math.isfinite, row))]


class VectorBackend(Backend):
    """Arithmetic over F32 arrays, one number after the other."""

    name = "vector"

    @override
    def bind(self, model: object) -> Parameters:
        if not isinstance(model, Vector):
            raise TypeError(f"a model of this backend is a Vector, not a {type(model).__name__}")
        return VectorParameters(model)

    @override
    def array(self, buffer: memoryview, dtype: str, shape: tuple[int, ...]) -> Array:
        if dtype != "F32":
            raise ValueError(f"vectors are F32, not {dtype}; use another backend for it")
        return buffer.cast("f")

    @override
    def part(self, array: Array, start: int, stop: int) -> Array:
        return array[start:stop]

    @override
    def subtract(self, left: Array, right: Array, out: Array) -> None:
        for index, (x, y) in enumerate(zip(left, right, strict=True)):
            out[index] = x - y

    @override
    def add(self, left: Array, right: Array, out: Array) -> None:
        for index, (x, y) in enumerate(zip(left, right, strict=True)):
            out[index] = x + y

    @override
    def sum_of_squares(self, x: Array) -> float:
        return math.sumprod(x, x)

    @override
    def clamp(self, x: Array, limit: float) -> None:
        kept = [0.0 if math.isnan(value) else min(max(value, -limit), limit) for value in x]
        x[:] = memoryview(array("f", kept))

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
        for index, change in enumerate(merged):
            # Read before it is written: both outputs may lie over what is read here.
            place = master[index]
            force = beta * kept[index] + change
            new_momentum[index] = force
            new_master[index] = place - lr * (change + beta * force)
        return all(map(math.isfinite, new_master))

    @override
    def encode(self, x: Array, dtype: str, data: Array, scale: Array | None) -> None:
        data[:] = x

    @override
    def decode(self, data: Array, dtype: str, scale: Array | None, out: Array) -> None:
        out[:] = data


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
