"""Every format, bit for bit, against its definition in exact fractions."""

import math
import random
import struct
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.backend.arrays import BACKENDS, DTYPES, Placed, blank, put, put_bytes

from gradientmail.backend.base import Backend

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
E2M1 = [Fraction(x) for x in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
E4M3 = [Fraction(m, 8) / 64 for m in range(8)] + [
    Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)
][:-1]
LARGEST = torch.finfo(torch.float32).max
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def nearest_even(x: Fraction, grid: Sequence[Fraction]) -> int:
    """The index of the value of ``grid`` nearest to ``x``, the even one of two equally near."""
    above = min(bisect_left(grid, x), len(grid) - 1)
    below = max(above - 1, 0)
    return min((below, above), key=lambda code: (abs(grid[code] - x), code % 2))


def exponent(values: Sequence[float], below: int) -> int:
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


def e4m3_by_definition(values: Sequence[float]) -> tuple[bytes, float]:
    k = exponent(values, 7)
    codes = [
        nearest_even(abs(Fraction(x)) / Fraction(2) ** k, E4M3)
        + (128 if math.copysign(1.0, x) < 0 else 0)
        for x in values
    ]
    return bytes(codes), 2.0**k


def encoded(backend: Backend, values: torch.Tensor, dtype: str) -> tuple[Placed, Placed]:
    count = values.numel()
    if dtype == "F4":
        blocks = -(-count // 32)
        data, scale = blank(backend, "F4", (blocks * 32,)), blank(backend, "F8_E8M0", (blocks,))
    else:
        data, scale = blank(backend, dtype, tuple(values.shape)), blank(backend, "F32", ())
    backend.encode(put(backend, values).array, dtype, data.array, scale.array)
    return data, scale


def decoded(
    backend: Backend, data: Placed, dtype: str, scale: Placed, shape: tuple[int, ...]
) -> torch.Tensor:
    out = blank(backend, "F32", shape)
    backend.decode(data.array, dtype, scale.array, out.array)
    return out.tensor()


def check_f4(backend: Backend, values: Sequence[float]) -> None:
    data, scale = encoded(backend, torch.tensor(values, dtype=torch.float32), "F4")
    assert (data.bytes(), scale.bytes()) == f4_by_definition(values)


def check_e4m3(backend: Backend, values: Sequence[float]) -> None:
    data, scale = encoded(backend, torch.tensor(values, dtype=torch.float32), "F8_E4M3")
    codes, factor = e4m3_by_definition(values)
    assert (data.bytes(), float(scale.tensor())) == (codes, factor)


def around(values: Sequence[float]) -> list[float]:
    """Each value, its fp32 neighbours, and all of them negative."""
    x = torch.tensor(values, dtype=torch.float32)
    inf = torch.tensor(math.inf)
    near = torch.cat([x, torch.nextafter(x, inf), torch.nextafter(x, -inf)])
    return torch.cat([near, -near]).tolist()


def ties(grid: Sequence[Fraction]) -> list[float]:
    return [float((a + b) / 2) for a, b in pairwise(grid)]


@every_backend
@pytest.mark.parametrize("k", [-126, -125, -20, 0, 1, 60, 124, 125])
def test_f4_rounds_every_tie_to_even(backend: Backend, k: int) -> None:
    values = [x * 2.0**k for x in [*ties(E2M1), *map(float, E2M1), 5.9, 6.5, 7.9]]
    near = [x for x in around(values) if abs(x) < 8 * 2.0**k]
    # One value a block, beside one that sets the scale.
    for x in near:
        check_f4(backend, [x, 4.0 * 2.0**k])
    check_f4(backend, near)


@every_backend
@pytest.mark.parametrize("k", [-126, -100, 0, 3, 119, 120])
def test_e4m3_rounds_every_tie_to_even(backend: Backend, k: int) -> None:
    grid = [x for x in E4M3 if x <= 256]
    values = [x * 2.0**k for x in [*ties(grid), *map(float, grid)] if x * 2.0**k <= LARGEST]
    near = [x for x in around(values) if abs(x) < 256 * 2.0**k]
    check_e4m3(backend, [*near, 128.0 * 2.0**k])


SPECIAL: dict[str, list[float]] = {
    "zeros": [0.0] * 40,
    "negative zeros": [-0.0] * 33,
    "negative zero beside others": [-0.0, 1.0, -1.0, 0.0],
    "largest": [LARGEST, -LARGEST, LARGEST / 2, 1.0],
    "smallest normal": [2.0**-126, -(2.0**-126), 2.0**-127],
    "subnormal": [1e-40, -3e-42, 2.0**-149, 0.0],
    "one": [1.0],
    "rounds to a negative zero": [6.0, -0.1],
    "a block of zeros among others": [1.0] * 32 + [0.0] * 32 + [1e-9] * 3,
    "none": [],
}


@every_backend
@pytest.mark.parametrize("values", SPECIAL.values(), ids=SPECIAL)
def test_special_values(backend: Backend, values: list[float]) -> None:
    check_f4(backend, values)
    check_e4m3(backend, values)


@every_backend
@given(st.lists(finite, max_size=70))
def test_f4_is_its_definition(backend: Backend, values: list[float]) -> None:
    check_f4(backend, values)


@every_backend
@given(st.lists(st.floats(-8.0, 8.0, width=16), min_size=1, max_size=70))
def test_f4_is_its_definition_where_ties_are_common(backend: Backend, values: list[float]) -> None:
    check_f4(backend, values)


@every_backend
@given(st.lists(finite, max_size=30) | st.lists(st.floats(-256, 256, width=16), max_size=30))
def test_e4m3_is_its_definition(backend: Backend, values: list[float]) -> None:
    check_e4m3(backend, values)


@every_backend
@pytest.mark.parametrize("scale", [0, 1, 2, 127, 200, 252, 254])
def test_f4_decodes_every_byte_exactly(backend: Backend, scale: int) -> None:
    data = bytes(range(256))
    found = decoded(
        backend,
        put_bytes(backend, data, "F4", (512,)),
        "F4",
        put_bytes(backend, bytes([scale] * 16), "F8_E8M0", (16,)),
        (512,),
    )
    signed = [float(x) for x in E2M1] + [-float(x) for x in E2M1]
    nibbles = [code for byte in data for code in (byte & 15, byte >> 4)]
    factor = math.ldexp(1.0, scale - 127)
    expected = torch.tensor([signed[code] * factor for code in nibbles], dtype=torch.float64)
    assert torch.equal(found.signbit(), expected.signbit())
    assert torch.equal(found, expected.float())


@every_backend
def test_f4_scale_that_is_no_number_is_not_finite(backend: Backend) -> None:
    data = put_bytes(backend, bytes(16), "F4", (32,))
    scale = put_bytes(backend, b"\xff", "F8_E8M0", (1,))
    assert decoded(backend, data, "F4", scale, (32,)).isnan().all()


@every_backend
@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-20, 1.0, 2.0**119])
def test_e4m3_decodes_every_byte_exactly(backend: Backend, scale: float) -> None:
    data = put_bytes(backend, bytes(range(256)), "F8_E4M3", (256,))
    found = decoded(backend, data, "F8_E4M3", put(backend, torch.tensor(scale)), (256,))
    magnitudes = [float(x) * scale for x in E4M3]
    for code, magnitude in enumerate(magnitudes):
        assert float(found[code]) == magnitude
        assert float(found[code + 128]) == -magnitude
    assert found[[127, 255]].isnan().all()


@every_backend
@pytest.mark.parametrize("dtype", ["F4", "F8_E4M3"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (31,), (5, 13), (31744,), (40_001,)], ids=str)
def test_shapes_and_pieces(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    """What is decoded is near, and encoding it again changes nothing."""
    rng = torch.Generator().manual_seed(len(shape) + 7)
    x = torch.randn(shape, generator=rng)
    data, scale = encoded(backend, x, dtype)
    found = decoded(backend, data, dtype, scale, shape)
    block = 32 if dtype == "F4" else max(x.numel(), 1)
    padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % block)).view(-1, block)
    most = padded.abs().amax(1, keepdim=True).expand(-1, block).flatten()[: x.numel()].view(shape)
    bound = most * (0.25 if dtype == "F4" else 2**-4)
    assert ((found - x).abs() <= bound).all()
    again = decoded(backend, *_swap(encoded(backend, found, dtype), dtype), shape)
    assert torch.equal(again, found)


def _swap(parts: tuple[Placed, Placed], dtype: str) -> tuple[Placed, str, Placed]:
    return parts[0], dtype, parts[1]


@every_backend
@pytest.mark.parametrize("dtype", ["F4", "F8_E4M3"])
def test_pieces_are_encoded_as_a_whole(backend: Backend, dtype: str) -> None:
    """A long tensor has the bytes of its definition at every place."""
    print("seed 11")
    rng = random.Random(11)
    values = [rng.gauss(0.0, 1.0) * 10.0 ** rng.randint(-3, 3) for _ in range(33_000)]
    x = torch.tensor(values, dtype=torch.float32)
    data, scale = encoded(backend, x, dtype)
    if dtype == "F4":
        for start in (0, 31_712, 31_744, 32_960):
            packed, scales = f4_by_definition(x[start : start + 64].tolist())
            assert data.bytes()[start // 2 : start // 2 + len(packed)] == packed
            assert scale.bytes()[start // 32 : start // 32 + len(scales)] == scales
    else:
        k = exponent(x.tolist(), 7)
        assert float(scale.tensor()) == 2.0**k
        for place in (0, 31_743, 31_744, 32_999):
            code = nearest_even(abs(Fraction(float(x[place]))) / Fraction(2) ** k, E4M3)
            assert data.bytes()[place] & 127 == code


@every_backend
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_formats_round_every_tie_to_even(backend: Backend, dtype: str) -> None:
    every = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype]).float()
    every = every[every.isfinite()]
    middle = ((every[1:].double() + every[:-1].double()) / 2).float()
    inf = torch.tensor(math.inf)
    x = torch.cat([every, middle, torch.nextafter(middle, inf), torch.nextafter(middle, -inf)])
    x = torch.cat([x, -x])
    out = blank(backend, dtype, tuple(x.shape))
    backend.encode(put(backend, x).array, dtype, out.array, None)
    count = every.numel()
    found = out.tensor()[count : 2 * count - 1].view(torch.int16).to(torch.int32)
    below = torch.arange(count - 1, dtype=torch.int32)
    assert torch.equal(found, below + below % 2)
    above = out.tensor()[2 * count - 1 : 3 * count - 2].view(torch.int16).to(torch.int32)
    assert torch.equal(above, below + 1)
    back = blank(backend, "F32", tuple(x.shape))
    backend.decode(out.array, dtype, None, back.array)
    assert torch.equal(back.tensor(), out.tensor().float())
    assert torch.equal(back.tensor()[:count], every)


@every_backend
def test_f32_is_a_copy(backend: Backend) -> None:
    x = torch.randn(40_000)
    out = blank(backend, "F32", (40_000,))
    backend.encode(put(backend, x).array, "F32", out.array, None)
    assert torch.equal(out.tensor(), x)
