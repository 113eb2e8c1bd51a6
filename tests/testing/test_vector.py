"""The backend of simulated worlds: every format bit by bit, and arithmetic as NumPy's.

``BackendContract`` as a whole is for frameworks: its tensors would take plain Python minutes.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from gradientmail.backend.base import Backend
from gradientmail.backend.numpy import NumpyBackend
from gradientmail.testing.backend_formats import INPUTS, BackendFormats, ties
from gradientmail.testing.backend_values import LARGEST, Floats, around, blank, draw, put, put_bytes
from gradientmail.testing.vector import Vector, VectorBackend

SMALL = {name: values for name, values in INPUTS.items() if values().size <= 500}
PLAIN = ("F32", "F16", "BF16")


class Checked(BackendFormats):
    """For its ``check``."""

    __test__ = False

    def make_backend(self) -> VectorBackend:
        return VectorBackend()


@pytest.mark.parametrize("dtype", [*PLAIN, "F8_E4M3", "F4"])
@pytest.mark.parametrize("values", SMALL.values(), ids=SMALL)
def test_every_byte_is_the_tables(dtype: str, values: Callable[[], Floats]) -> None:
    Checked().check(values(), dtype)


@pytest.mark.parametrize("k", [-126, 0, 119])
def test_ties_go_to_even(k: int) -> None:
    values = around([x * 2.0**k for x in ties("F8_E4M3")])
    near = values[np.abs(values).astype(np.float64) < 256.0 * 2.0**k]
    Checked().check(np.append(near, np.float32(128.0 * 2.0**k)), "F8_E4M3")
    values = around([x * 2.0**k for x in [*ties("F4"), 5.9, 6.5, 7.0, 7.9]])
    near = values[np.abs(values).astype(np.float64) < 8.0 * 2.0**k]
    Checked().check(near, "F4")


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_formats_round_to_even_and_to_infinity(dtype: str) -> None:
    values = around([x for x in ties(dtype)[::37] if x <= LARGEST])
    Checked().check(values[np.isfinite(values)], dtype)
    Checked().check(np.array([LARGEST, -LARGEST, 65519.0, 65520.0], np.float32), dtype)


@pytest.mark.parametrize("code", [127, 255])
def test_codes_that_are_no_number(code: int) -> None:
    backend = VectorBackend()
    out = blank(backend, "F32", (2,))
    data = put_bytes(backend, bytes([code, 0x38]), "F8_E4M3", (2,))
    backend.decode(data.array, "F8_E4M3", put(backend, np.array(1.0, np.float32)).array, out.array)
    assert math.isnan(out.values()[0])
    assert out.values()[1] == 1.0
    data = put_bytes(backend, bytes(16), "F4", (32,))
    scale = put_bytes(backend, b"\xff", "F8_E8M0", (1,))
    backend.decode(data.array, "F4", scale.array, out.array)
    assert np.isnan(out.values()).all()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_difference_that_is_not_finite_is_found(dtype: str, value: float) -> None:
    backend = VectorBackend()
    x, y = (put(backend, np.array([v, 1.0], np.float32)).array for v in (value, 0.5))
    data = blank(backend, dtype, (32,) if dtype == "F4" else (2,))
    scale = blank(backend, "F8_E8M0", (1,)) if dtype == "F4" else blank(backend, "F32", ())
    work = blank(backend, "F32", (2,)).array
    assert not backend.encode_difference(x, y, dtype, data.array, scale.array, lambda: work)


def moved(backend: Backend, dtypes: tuple[str, ...]) -> list[bytes]:
    """What each operation writes, over arrays of these dtypes."""
    first, second, result = dtypes
    x, y = (put(backend, draw((7,), n, d), d).array for n, d in ((1, first), (2, second)))
    written = [blank(backend, result, (7,)) for _ in range(2)]
    backend.subtract(x, y, written[0].array)
    backend.add(x, y, written[1].array)
    momentum, master, total = (blank(backend, "F32", (7,)) for _ in range(3))
    backend.nesterov(
        [(0.3, x)],
        None,
        y,
        beta=0.9,
        lr=0.7,
        new_momentum=momentum.array,
        new_master=master.array,
    )
    backend.accumulate(total.array, x, keep=0.0, scale=0.3)
    backend.accumulate(total.array, y, keep=1.0, scale=-1.7)
    return [one.bytes() for one in (*written, momentum, total)]


@pytest.mark.parametrize("dtypes", list(itertools.product(PLAIN, repeat=3)), ids="-".join)
def test_its_arithmetic_has_numpys_bytes(dtypes: tuple[str, ...]) -> None:
    assert moved(VectorBackend(), dtypes) == moved(NumpyBackend(), dtypes)


def test_buffers_are_left_local_or_averaged() -> None:
    model = Vector(
        {"w": [1.0, 2.0], "mean": [3.0], "n": [1 / 3]}, dtypes={"n": "BF16"}, buffers=("mean",)
    )
    local, averaged = VectorBackend().bind(model), VectorBackend().bind_with_buffers(model)
    assert [(one.name, one.dtype) for one in local.schema] == [("n", "BF16"), ("w", "F32")]
    assert (local.averaged, local.local_buffers) == (frozenset(), ("mean",))
    assert [one.name for one in averaged.schema] == ["mean", "n", "w"]
    assert (averaged.averaged, averaged.local_buffers) == ({"mean"}, ())
    assert model.numbers()["n"] == [0.333984375]
