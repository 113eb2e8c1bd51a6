"""The contract suite of backends finds what is wrong with backends that break one promise each.

Its tables are held against the definitions of the formats in exact fractions.
"""

import inspect
import itertools
import math
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientmail.backend.base import Array, Backend, Parameters
from gradientmail.backend.numpy import NumpyBackend
from gradientmail.backend.numpy_model import NumpyParameters
from gradientmail.testing.backend_contract import BackendContract
from gradientmail.testing.backend_parameters import Tensors
from gradientmail.testing.backend_values import Floats, decoded, encoded, rounded

E2M1 = [Fraction(x) for x in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
E4M3 = [Fraction(m, 8) / 64 for m in range(8)] + [
    Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)
][:-1]
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def nearest_even(x: Fraction, grid: Sequence[Fraction]) -> int:
    """The index of the value of ``grid`` nearest to ``x``, the even one of two equally near."""
    above = min(bisect_left(grid, x), len(grid) - 1)
    below = max(above - 1, 0)
    return min((below, above), key=lambda code: (abs(grid[code] - x), code % 2))


def exponent(values: Sequence[float], below: int) -> int:
    """As SPEC has it: read from the bits of the largest magnitude."""
    largest = max(map(abs, values), default=0.0)
    if not largest:
        return 0
    field = struct.unpack("<I", struct.pack("<f", largest))[0] >> 23
    return min(max(field - 127 - below, -126), 127)


def f4_by_definition(values: Sequence[float]) -> tuple[bytes, bytes]:
    padded = [*values, *[0.0] * (-len(values) % 32)]
    codes: list[int] = []
    scales: list[int] = []
    for start in range(0, len(padded), 32):
        block = padded[start : start + 32]
        k = exponent(block, 2)
        scales.append(k + 127)
        for x in block:
            magnitude = min(abs(Fraction(x)) / Fraction(2) ** k, Fraction(6))
            codes.append(nearest_even(magnitude, E2M1) + (8 if x < 0 else 0))
    packed = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return bytes(packed), bytes(scales)


def e4m3_by_definition(values: Sequence[float]) -> tuple[bytes, bytes]:
    k = exponent(values, 7)
    codes = [
        nearest_even(abs(Fraction(x)) / Fraction(2) ** k, E4M3)
        + (128 if math.copysign(1.0, x) < 0 else 0)
        for x in values
    ]
    return bytes(codes), struct.pack("<f", 2.0**k)


@given(st.lists(finite, max_size=70) | st.lists(st.floats(-8.0, 8.0, width=16), max_size=70))
def test_tables_of_f4_are_its_definition(values: list[float]) -> None:
    assert encoded(np.array(values, np.float32), "F4") == f4_by_definition(values)


@given(st.lists(finite, max_size=30) | st.lists(st.floats(-256, 256, width=16), max_size=30))
def test_tables_of_e4m3_are_its_definition(values: list[float]) -> None:
    assert encoded(np.array(values, np.float32), "F8_E4M3") == e4m3_by_definition(values)


@given(st.lists(finite, max_size=30), st.sampled_from(["F16", "BF16"]))
def test_tables_of_half_formats_are_what_the_packages_say(values: list[float], dtype: str) -> None:
    x = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16 if dtype == "F16" else ml_dtypes.bfloat16)
    assert encoded(x, dtype)[0] == half.tobytes()
    assert rounded(x.astype(np.float64), dtype).tobytes() == half.astype(np.float32).tobytes()
    if np.isfinite(half.astype(np.float32)).all():
        back = decoded(half.tobytes(), dtype, b"", x.shape)
        assert back.tobytes() == half.astype(np.float32).tobytes()


class RoundsF4Ties(NumpyBackend):
    def encode(self, x: Array, dtype: str, data: Array, scale: Array | None) -> None:
        super().encode(np.nextafter(x, x * np.float32(2)), dtype, data, scale)


class RoundsTowardsZero(NumpyBackend):
    def encode(self, x: Array, dtype: str, data: Array, scale: Array | None) -> None:
        super().encode(x, dtype, data, scale)
        if dtype == "BF16":
            words = np.ascontiguousarray(x).view(np.uint32) >> np.uint32(16)
            data.view(np.uint16)[...] = words.reshape(data.shape)


class SwapsNibbles(NumpyBackend):
    def encode(self, x: Array, dtype: str, data: Array, scale: Array | None) -> None:
        super().encode(x, dtype, data, scale)
        if dtype == "F4":
            data[...] = data << 4 | data >> 4


class LosesSignOfZero(NumpyBackend):
    def encode(self, x: Array, dtype: str, data: Array, scale: Array | None) -> None:
        super().encode(x + np.float32(0.0), dtype, data, scale)


class FlushesSubnormals(NumpyBackend):
    def encode(self, x: Array, dtype: str, data: Array, scale: Array | None) -> None:
        super().encode(np.where(np.abs(x) < 2.0**-126, np.float32(0), x), dtype, data, scale)


class ScalesZerosByNothing(NumpyBackend):
    def encode(self, x: Array, dtype: str, data: Array, scale: Array | None) -> None:
        super().encode(x, dtype, data, scale)
        if dtype == "F4" and scale is not None and not x.any():
            scale[...] = 1


class DecodesMinusZero(NumpyBackend):
    def decode(self, data: Array, dtype: str, scale: Array | None, out: Array) -> None:
        super().decode(data, dtype, scale, out)
        np.add(out, np.float32(0.0), out=out)


class BelievesAnyScale(NumpyBackend):
    def decode(self, data: Array, dtype: str, scale: Array | None, out: Array) -> None:
        super().decode(data, dtype, scale, out)
        np.nan_to_num(out, copy=False)


class RoundsTwice(NumpyBackend):
    def add(self, left: Array, right: Array, out: Array) -> None:
        half = np.array(right, np.float16)
        super().add(left, half, out)


class ComputesInHalf(NumpyBackend):
    def subtract(self, left: Array, right: Array, out: Array) -> None:
        np.copyto(out, left.astype(out.dtype) - right.astype(out.dtype))


class SumsInFp32(NumpyBackend):
    def sum_of_squares(self, x: Array) -> float:
        with np.errstate(all="ignore"):
            return float((x.astype(np.float32) ** 2).sum())


class DotsInFp32(NumpyBackend):
    def dot(self, x: Array, y: Array) -> float:
        with np.errstate(all="ignore"):
            return float((x.astype(np.float32) * y.astype(np.float32)).sum())


class OverlooksNaN(NumpyBackend):
    def dot_squares(self, x: Array, y: Array) -> tuple[float, float]:
        return self.dot(x, y), float(np.nansum(y.astype(np.float64) ** 2))


class Warns(NumpyBackend):
    def sum_of_squares(self, x: Array) -> float:
        return super().sum_of_squares(x) + float((x.astype(np.float64) * 0.0).sum())


class FusesProducts(NumpyBackend):
    def accumulate(self, out: Array, x: Array, *, keep: float, scale: float) -> None:
        kept = 0.0 if keep == 0.0 else out.astype(np.float64) * keep
        out[...] = kept + x.astype(np.float64) * scale


class ReadsWhatIsNotKept(NumpyBackend):
    def accumulate(self, out: Array, x: Array, *, keep: float, scale: float) -> None:
        with np.errstate(all="ignore"):
            out *= np.float32(keep)
        super().accumulate(out, x, keep=1.0, scale=scale)


class KnowsFp32Alone(NumpyBackend):
    def combine(self, delta: Any, out: Array) -> None:
        with np.errstate(all="ignore"):
            out[...] = sum((x.astype(np.float32) * np.float32(c) for c, x in delta), np.float32(0))


class WritesBeforeItReads(NumpyBackend):
    def nesterov(self, delta: Any, momentum: Any, master: Any, **options: Any) -> bool:
        new = options["new_master"]
        if any(x is new for _, x in delta):
            new.fill(0.0)
        return super().nesterov(delta, momentum, master, **options)


class CopiesBuffers(NumpyBackend):
    def array(self, buffer: memoryview, dtype: str, shape: tuple[int, ...]) -> Array:
        return super().array(buffer, dtype, shape).copy()


class WithParameters(NumpyBackend):
    kind: type[NumpyParameters]

    def bind(self, model: object) -> NumpyParameters:
        return self.kind(model)


class LateParameters(NumpyParameters):
    def capture(self, arrays: Mapping[str, Array]) -> Callable[[], None]:
        late = super().capture

        def wait() -> None:
            late(arrays)

        return wait


class CapturesLate(WithParameters):
    kind = LateParameters


class RebindingParameters(NumpyParameters):
    def apply(self, staged: Mapping[str, Array], *, mixing: float = 0.0) -> None:
        super().apply(staged, mixing=mixing)
        if not mixing:
            model: Any = self._model
            model.update(staged)


class KeepsTheCallersBuffers(WithParameters):
    kind = RebindingParameters


class UnmixedParameters(NumpyParameters):
    def apply(self, staged: Mapping[str, Array], *, mixing: float = 0.0) -> None:
        super().apply(staged)


class IgnoresMixing(WithParameters):
    kind = UnmixedParameters


class HastyParameters(NumpyParameters):
    def not_finite(self) -> list[str]:
        return [name for name in super().not_finite() if self._array(name).dtype == np.float32]


class LooksAtFp32Alone(WithParameters):
    kind = HastyParameters


class UnsortedParameters(NumpyParameters):
    def __init__(self, model: object) -> None:
        super().__init__(model)
        self.schema = self.schema[::-1]


class SortsBackwards(WithParameters):
    kind = UnsortedParameters


BROKEN: dict[type[NumpyBackend], str] = {
    RoundsF4Ties: "f4_rounds_every_tie",
    RoundsTowardsZero: "half_formats_round_every_tie",
    SwapsNibbles: "every_byte",
    LosesSignOfZero: "every_byte",
    FlushesSubnormals: "every_byte",
    ScalesZerosByNothing: "every_byte",
    DecodesMinusZero: "f4_decodes_every_byte",
    BelievesAnyScale: "scale_that_is_no_number",
    RoundsTwice: "sum_and_difference",
    ComputesInHalf: "sum_and_difference",
    SumsInFp32: "neither_overflow",
    DotsInFp32: "neither_overflow",
    OverlooksNaN: "not_finite",
    Warns: "squares_show",
    FusesProducts: "exact_opposites",
    ReadsWhatIsNotKept: "accumulate",
    KnowsFp32Alone: "coefficients_outside",
    WritesBeforeItReads: "over_what_it_uses_up",
    CopiesBuffers: "combine",
    CapturesLate: "of_that_moment",
    KeepsTheCallersBuffers: "callers_again",
    IgnoresMixing: "apply_mixes",
    LooksAtFp32Alone: "not_finite_names",
    SortsBackwards: "schema",
}
"""Each with a part of the name of the test that finds it."""


def contract_of(backend: type[Backend]) -> BackendContract:
    class Contract(BackendContract):
        def make_backend(self) -> Backend:
            return backend()

        def make_model(self, tensors: Tensors) -> Any:
            kinds = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
            return {name: values.astype(kinds[d]) for name, (d, values) in tensors.items()}

        def read_model(self, model: Any) -> Mapping[str, Floats]:
            return {name: array.astype(np.float32) for name, array in model.items()}

    return Contract()


def cases(test: Any) -> Iterator[dict[str, Any]]:
    """The arguments of each run of a parametrized test."""
    marks = [m.args for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
    for values in itertools.product(*(each for _, each in marks)):
        arguments: dict[str, Any] = {}
        for (names, _), value in zip(marks, values, strict=True):
            several = isinstance(names, tuple)
            arguments.update(zip(names, value, strict=True) if several else {names: value})
        yield arguments


def fails(backend: type[Backend], part: str) -> bool:
    """Whether a test with this part of a name finds fault with the backend."""
    suite = contract_of(backend)
    tests = [test for name, test in inspect.getmembers(suite, inspect.ismethod) if part in name]
    assert tests, part
    for test in tests:
        for arguments in cases(test):
            try:
                test(**arguments)
            except (Exception, pytest.fail.Exception):
                return True
    return False


@pytest.mark.parametrize(
    ("broken", "part"), BROKEN.items(), ids=lambda x: getattr(x, "__name__", x)
)
def test_a_wrong_one_is_found(broken: type[Backend], part: str) -> None:
    assert fails(broken, part)


def test_a_right_one_passes_the_tests_that_find_them() -> None:
    for part in ("f4_decodes", "no_number", "opposites", "outside", "moment", "mixes", "schema"):
        assert not fails(NumpyBackend, part), part


def test_parameters_are_abstract() -> None:
    """Both halves of a backend are interfaces; a contract without a backend is none."""
    for kind in (Backend, Parameters, BackendContract):
        assert inspect.isabstract(kind)
