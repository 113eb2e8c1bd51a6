"""The part of the backend contract about formats: every bit, against their tables."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradientmail.backend.base import Backend
from gradientmail.testing.backend_values import (
    BLOCK,
    LARGEST,
    TABLES,
    Floats,
    Placed,
    around,
    blank,
    decoded,
    draw,
    encoded,
    put,
    put_bytes,
    rounded,
)

DTYPES = ("F32", "F16", "BF16")
FORMATS = ("F32", "F16", "BF16", "F8_E4M3", "F4")
every_format = pytest.mark.parametrize("dtype", FORMATS)
quantized = pytest.mark.parametrize("dtype", ["F8_E4M3", "F4"])


def _wide(count: int, seed: int) -> Floats:
    """Values over all of fp32's exponents, so that every block has another scale."""
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.standard_normal(count), rng.integers(-150, 125, count))
    return rounded(x, "F32")


def _bit_patterns(count: int, seed: int) -> Floats:
    """Every finite bit pattern is as likely as another."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    x = bits.view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(1.0))


def _block_by_block(seed: int) -> Floats:
    """Blocks of 32 of very different size, and one of zeros."""
    x = draw((20, BLOCK), seed).astype(np.float64) * 10.0 ** np.arange(-38, 22, 3)[:, None]
    x[7] = 0.0
    return rounded(x.reshape(-1), "F32")


def _listed(*values: float) -> Callable[[], Floats]:
    return lambda: np.array(values, np.float32)


INPUTS: dict[str, Callable[[], Floats]] = {
    "none": _listed(),
    "empty": lambda: np.zeros((3, 0, 2), np.float32),
    "0-d": lambda: np.array(-1.7, np.float32),
    "one": _listed(1.0),
    "one tiny": _listed(2.0**-149),
    "zeros": lambda: np.zeros(40, np.float32),
    "negative zeros": lambda: -np.zeros(33, np.float32),
    "negative zero beside others": _listed(-0.0, 1.0, -1.0, 0.0),
    "rounds to a negative zero": _listed(6.0, -0.1, -1e-30),
    "largest": _listed(LARGEST, -LARGEST, LARGEST / 2, 1.0),
    "largest alone": lambda: np.full(70, -LARGEST, np.float32),
    "smallest normal": _listed(2.0**-126, -(2.0**-126), 2.0**-127),
    "subnormal": _listed(1e-40, -3e-42, 2.0**-149, 0.0),
    "subnormal beside zeros": _listed(*[0.0] * 31, 2.0**-149),
    "many subnormal": lambda: draw((300,), 1) * np.float32(1e-41),
    "huge": lambda: draw((300,), 2) * np.float32(5e37),
    "a block of zeros": _listed(*[1.0] * 32, *[0.0] * 32, *[1e-9] * 3),
    "blocks": lambda: _block_by_block(3),
    "small integers": lambda: np.round(draw((500,), 4) * 4).astype(np.float32),
    "31": lambda: draw((31,), 5),
    "33": lambda: draw((33,), 6),
    "65 in rows": lambda: draw((13, 5), 7),
    "three axes": lambda: draw((5, 7, 11), 8),
    "bit patterns": lambda: _bit_patterns(20_000, 9),
    "all exponents": lambda: _wide(20_000, 10),
    # Around the sizes at which an implementation may cut tensors into pieces.
    "31744": lambda: draw((31744,), 11),
    "31745": lambda: draw((31745,), 12),
    "32768": lambda: draw((32768,), 13),
    "32769": lambda: draw((32769,), 14),
    "65567": lambda: draw((3, 21845), 15),
    "70001": lambda: _wide(70_001, 16),
    "131103": lambda: draw((131_103,), 17),
}
every_input = pytest.mark.parametrize("values", INPUTS.values(), ids=INPUTS)


def ties(dtype: str) -> list[float]:
    """What lies in the middle of two values of a format, and the values."""
    table = TABLES[dtype]
    return [*((table[1:] + table[:-1]) / 2.0).tolist(), *table.tolist()]


class BackendFormats(ABC):
    """``encode`` and ``decode`` of every format, bit by bit."""

    @abstractmethod
    def make_backend(self) -> Backend:
        """The backend under test."""

    def encode(self, x: Placed, dtype: str) -> tuple[Placed, Placed | None]:
        """Data and scales that the backend writes for the F32 array ``x``."""
        backend, scale = self.make_backend(), None
        shape = x.spec.shape
        if dtype == "F4":
            blocks = -(-x.spec.count // BLOCK)
            shape, scale = (blocks * BLOCK,), blank(backend, "F8_E8M0", (blocks,))
        elif dtype == "F8_E4M3":
            scale = blank(backend, "F32", ())
        data = blank(backend, dtype, shape)
        backend.encode(x.array, dtype, data.array, scale.array if scale else None)
        return data, scale

    def decode(
        self, data: Placed, dtype: str, scale: Placed | None, shape: tuple[int, ...]
    ) -> Placed:
        """The F32 array that the backend reads."""
        out = blank(self.make_backend(), "F32", shape)
        self.make_backend().decode(data.array, dtype, scale.array if scale else None, out.array)
        return out

    def check(self, values: Floats, dtype: str) -> None:
        """Encode and decode ``values``, and compare every byte."""
        source = put(self.make_backend(), values)
        data, scale = self.encode(source, dtype)
        scales = scale.bytes() if scale else b""
        expected, expected_scales = encoded(values, dtype)
        assert scales == expected_scales
        same = data.bytes() == expected
        assert same, _first_difference(values, data.bytes(), expected)
        assert source.bytes() == put(self.make_backend(), values).bytes()  # only read
        if dtype in ("F16", "BF16") and not np.isfinite(data.values()).all():
            return
        found = self.decode(data, dtype, scale, values.shape)
        back = decoded(expected, dtype, expected_scales, values.shape)
        same = found.bytes() == back.tobytes()
        assert same, _first_difference(values, found.bytes(), back.tobytes())

    @every_format
    @every_input
    def test_every_byte_is_the_tables(self, dtype: str, values: Callable[[], Floats]) -> None:
        """What is written, and what is read from it, is what the tables of the format say."""
        self.check(values(), dtype)

    @pytest.mark.parametrize("k", [-126, -125, -20, 0, 1, 60, 124, 125])
    def test_f4_rounds_every_tie_to_even(self, k: int) -> None:
        """Each value, each middle and their neighbours, each in a block of its own and together."""
        values = around([x * 2.0**k for x in [*ties("F4"), 5.9, 6.5, 7.0, 7.9]])
        near = values[np.abs(values).astype(np.float64) < 8.0 * 2.0**k]
        blocks = np.zeros((near.size, BLOCK), np.float32)
        blocks[:, 3], blocks[:, 20] = near, 4.0 * 2.0**k
        self.check(blocks.reshape(-1), "F4")
        self.check(near, "F4")

    @pytest.mark.parametrize("k", [-126, -100, 0, 3, 119, 120])
    def test_e4m3_rounds_every_tie_to_even(self, k: int) -> None:
        """Each value up to the largest that is used, each middle, and their neighbours."""
        values = around([x * 2.0**k for x in ties("F8_E4M3") if x * 2.0**k <= LARGEST])
        near = values[np.abs(values).astype(np.float64) < 256.0 * 2.0**k]
        self.check(np.append(near, np.float32(128.0 * 2.0**k)), "F8_E4M3")

    @pytest.mark.parametrize("dtype", ["F16", "BF16"])
    def test_half_formats_round_every_tie_to_even(self, dtype: str) -> None:
        """Every value of the format, every middle of two, and their neighbours."""
        values = around([x for x in ties(dtype) if x <= LARGEST])
        self.check(values[np.isfinite(values)], dtype)

    @pytest.mark.parametrize("scale", [0, 1, 2, 127, 200, 252])
    def test_f4_decodes_every_byte(self, scale: int) -> None:
        """Also subnormal results, and minus zero."""
        data, scales = bytes(range(256)), bytes([scale] * 16)
        placed = put_bytes(self.make_backend(), data, "F4", (512,))
        factors = put_bytes(self.make_backend(), scales, "F8_E8M0", (16,))
        found = self.decode(placed, "F4", factors, (512,))
        assert found.bytes() == decoded(data, "F4", scales, (512,)).tobytes()

    @pytest.mark.parametrize("k", [-126, -20, 0, 119])
    def test_e4m3_decodes_every_byte(self, k: int) -> None:
        """Also minus zero; the two codes that are no number give NaN."""
        data = bytes(range(256))
        scale = put(self.make_backend(), np.array(2.0**k, np.float32))
        placed = put_bytes(self.make_backend(), data, "F8_E4M3", (256,))
        found = self.decode(placed, "F8_E4M3", scale, (256,)).values()
        numbers = np.delete(np.arange(256), [127, 255])
        expected = decoded(bytes(numbers.tolist()), "F8_E4M3", scale.bytes(), (254,))
        assert found[numbers].tobytes() == expected.tobytes()
        assert np.isnan(found[[127, 255]]).all()

    def test_f4_scale_that_is_no_number(self) -> None:
        """The byte 255 of E8M0 makes its block NaN, so that a hostile payload is found out."""
        data = put_bytes(self.make_backend(), bytes(32), "F4", (64,))
        scale = put_bytes(self.make_backend(), b"\x7f\xff", "F8_E8M0", (2,))
        found = self.decode(data, "F4", scale, (64,)).values()
        assert np.isnan(found[32:]).all()
        assert (found[:32] == 0.0).all()

    @every_format
    def test_what_was_encoded_once_stays(self, dtype: str) -> None:
        """Encoding what was decoded loses no value more, from read-only memory either."""
        for seed, shape in enumerate([(), (31,), (5, 13), (40_001,)]):
            first = self.encode(put(self.make_backend(), draw(shape, seed)), dtype)
            found = self.decode(first[0], dtype, first[1], shape)
            fixed = put_bytes(self.make_backend(), found.bytes(), "F32", shape)
            again = self.decode(*_swap(self.encode(fixed, dtype), dtype), shape)
            assert (again.values() == found.values()).all()

    @quantized
    def test_error_is_bounded(self, dtype: str) -> None:
        """Against the largest of a tensor (E4M3) or a block (F4)."""
        x = draw((33_000,), 21)
        data, scale = self.encode(put(self.make_backend(), x), dtype)
        found = self.decode(data, dtype, scale, x.shape).values()
        block = BLOCK if dtype == "F4" else x.size
        padded = np.pad(np.abs(x), (0, -x.size % block)).reshape(-1, block)
        most = padded.max(axis=1).repeat(block)[: x.size]
        bound = most * np.float32(0.25 if dtype == "F4" else 2.0**-4)
        assert (np.abs(found - x) <= bound).all()

    @quantized
    @pytest.mark.parametrize("shape", [(), (0,), (33,), (13, 5), (70_001,)], ids=str)
    @pytest.mark.parametrize("left", DTYPES)
    @pytest.mark.parametrize("right", DTYPES)
    def test_fused_codecs_are_their_parts(
        self, dtype: str, shape: tuple[int, ...], left: str, right: str
    ) -> None:
        """``encode_difference`` and ``add_decoded``, whatever the dtypes of what they are given."""
        backend = self.make_backend()
        x, y = (
            put(backend, draw(shape, 31, left), left),
            put(backend, draw(shape, 32, right), right),
        )
        difference = blank(backend, "F32", shape)
        backend.subtract(x.array, y.array, difference.array)
        expected, scales = self.encode(difference, dtype)
        data, scale = self.encode(put(backend, np.ones(shape, np.float32)), dtype)
        assert scale is not None
        assert scales is not None

        def memory() -> Any:
            return blank(backend, "F32", shape).array

        found = backend.encode_difference(x.array, y.array, dtype, data.array, scale.array, memory)
        assert found is True
        assert data.bytes() == expected.bytes()
        assert scale.bytes() == scales.bytes()
        whole, out = blank(backend, right, shape), blank(backend, right, shape)
        decoded = self.decode(data, dtype, scale, shape)
        backend.add(x.array, decoded.array, whole.array)
        backend.add_decoded(x.array, data.array, dtype, scale.array, out.array, memory)
        assert out.bytes() == whole.bytes()

    @quantized
    @pytest.mark.parametrize("count", [1, 50_000])
    @pytest.mark.parametrize(
        ("x", "y"), [(np.nan, 0.0), (0.0, np.inf), (np.inf, np.inf), (LARGEST, -LARGEST)]
    )
    def test_difference_that_is_not_finite_is_found(
        self, dtype: str, count: int, x: float, y: float
    ) -> None:
        """Wherever it is; also one of finite values that overflows."""
        backend = self.make_backend()
        data, scale = self.encode(put(backend, np.zeros(count, np.float32)), dtype)
        assert scale is not None
        for place in {0, count // 2, count - 1}:
            left, right = draw((count,), 33).copy(), draw((count,), 34).copy()
            left[place], right[place] = x, y
            found = backend.encode_difference(
                put(backend, left).array,
                put(backend, right).array,
                dtype,
                data.array,
                scale.array,
                lambda: blank(backend, "F32", (count,)).array,
            )
            assert found is False

    def test_unknown_formats_are_errors(self) -> None:
        """``KeyError`` or ``ValueError``."""
        backend = self.make_backend()
        x, out = put(backend, draw((2,), 22)), blank(backend, "F32", (2,))
        with pytest.raises((KeyError, ValueError)):
            backend.encode(x.array, "F64", out.array, None)
        with pytest.raises((KeyError, ValueError)):
            backend.decode(x.array, "I8", None, out.array)


def _swap(parts: tuple[Placed, Placed | None], dtype: str) -> tuple[Placed, str, Placed | None]:
    return parts[0], dtype, parts[1]


def _first_difference(values: Floats, found: bytes, expected: bytes) -> str:
    if len(found) != len(expected):
        return f"{len(found)} bytes instead of {len(expected)}"
    place = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    element = place * values.size // max(len(expected), 1)
    near = values.reshape(-1)[max(element - 1, 0) : element + 2].tolist()
    return f"byte {place} is {found[place]:#x}, not {expected[place]:#x}, for values near {near}"
