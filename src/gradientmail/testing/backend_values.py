"""Values for the backend contract: memory that a test can see, and every format by its table.

The formats are computed from their definition alone (SPEC of a format: exponent and mantissa bits,
and the bias), in float64, by searching tables of all values: slow, and independent of how any
backend does it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradientmail.backend.base import Backend
from gradientmail.errors import MissingExtra
from gradientmail.schema import BITS, TensorSpec

try:
    import numpy as np
    from numpy.typing import NDArray
except ModuleNotFoundError as error:
    raise MissingExtra("numpy", "numpy") from error

type Floats = NDArray[np.float32]
type Doubles = NDArray[np.float64]
type Numbers = NDArray[np.floating[Any]]
type Codes = NDArray[np.int64]

LARGEST = float(np.finfo(np.float32).max)
BLOCK = 32
"""Elements of an F4 tensor that share a scale."""


def _magnitudes(mantissa_bits: int, bias: int, count: int) -> Doubles:
    """The values of the codes 0 to ``count − 1`` of a binary format, without the sign."""
    code = np.arange(count)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    leading = np.where(exponent > 0, 1 << mantissa_bits, 0)
    scale = np.maximum(exponent, 1) - bias - mantissa_bits
    return np.ldexp((leading + mantissa).astype(np.float64), scale)


TABLES: dict[str, Doubles] = {
    # Of F16 and BF16 also the code of infinity, as the value that rounding up would come to.
    "F16": _magnitudes(10, 15, 0x7C00 + 1),
    "BF16": _magnitudes(7, 127, 0x7F80 + 1),
    "F8_E4M3": _magnitudes(3, 7, 0x7E + 1),
    "F4": _magnitudes(1, 1, 8),
}
"""The values of the codes of each format, in order."""


def nearest(x: Doubles, table: Doubles) -> Codes:
    """The code of the value of ``table`` nearest to each ``x``, of two equally near the even."""
    middle = (table[1:] + table[:-1]) / 2.0
    code = np.searchsorted(middle, x, side="left")
    tie = np.append(middle, np.inf)[code] == x
    return code + (tie & (code % 2 == 1))


def rounded(x: Doubles, dtype: str) -> Floats:
    """``x`` rounded to ``dtype`` (F32, F16, BF16), to nearest even, as fp32."""
    if dtype == "F32":
        with np.errstate(over="ignore"):
            return x.astype(np.float32)
    table = TABLES[dtype].copy()
    codes = nearest(np.abs(x), table)
    table[-1] = np.inf
    return np.copysign(table[codes], x).astype(np.float32)


def exponents(largest: Doubles, below: int) -> Codes:
    """``k`` for the largest magnitudes of tensors or blocks."""
    exact = np.frexp(largest)[1] - 1 - below
    return np.where(largest > 0.0, np.clip(exact, -126, 127), 0).astype(np.int64)


def encoded(values: Floats, dtype: str) -> tuple[bytes, bytes]:
    """What ``Backend.encode`` must write for ``values``: data and scales (none: no bytes)."""
    x = values.astype(np.float64).reshape(-1)
    if dtype == "F32":
        return values.tobytes(), b""
    if dtype in ("F16", "BF16"):
        return (nearest(np.abs(x), TABLES[dtype]) | _sign(x, 15)).astype("<u2").tobytes(), b""
    if dtype == "F8_E4M3":
        k = exponents(np.max(np.abs(x), initial=0.0), 7)
        codes = nearest(np.ldexp(np.abs(x), -k), TABLES[dtype]) | _sign(x, 7)
        return codes.astype(np.uint8).tobytes(), np.ldexp(1.0, k).astype("<f4").tobytes()
    blocks = np.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    k = exponents(np.max(np.abs(blocks), axis=1, initial=0.0), 2)
    scaled = np.minimum(np.ldexp(np.abs(blocks), -k[:, None]), 6.0)
    codes = (nearest(scaled, TABLES["F4"]) | np.where(blocks < 0.0, 8, 0)).reshape(-1)
    packed = codes[::2] | codes[1::2] << 4
    return packed.astype(np.uint8).tobytes(), (k + 127).astype(np.uint8).tobytes()


def decoded(data: bytes, dtype: str, scale: bytes, shape: tuple[int, ...]) -> Floats:
    """What ``Backend.decode`` must read from these bytes.

    Of the largest values in fp32 E4M3 gives infinity. Codes that are no number are left out.
    """
    if dtype == "F32":
        return np.frombuffer(data, "<f4").reshape(shape)
    if dtype == "F4":
        pairs = np.frombuffer(data, np.uint8).astype(np.int64)
        codes = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)
        k = np.frombuffer(scale, np.uint8).astype(np.int64).repeat(BLOCK) - 127
        found = np.ldexp(_signed(TABLES["F4"], codes, 3), k)[: int(np.prod(shape))]
    elif dtype == "F8_E4M3":
        codes = np.frombuffer(data, np.uint8).astype(np.int64)
        found = _signed(TABLES[dtype], codes, 7) * float(np.frombuffer(scale, "<f4")[0])
    else:
        found = _signed(TABLES[dtype], np.frombuffer(data, "<u2").astype(np.int64), 15)
    with np.errstate(over="ignore"):
        return found.astype(np.float32).reshape(shape)


def _sign(x: Doubles, bit: int) -> Codes:
    return np.signbit(x).astype(np.int64) << bit


def _signed(table: Doubles, codes: Codes, bit: int) -> Doubles:
    magnitude = table[codes & ((1 << bit) - 1)]
    return np.where(codes >> bit, -magnitude, magnitude)


@dataclass(frozen=True)
class Placed:
    """A backend's array and the memory under it."""

    array: Any
    memory: memoryview
    spec: TensorSpec

    def bytes(self) -> bytes:
        """What the memory holds now."""
        return bytes(self.memory)

    def values(self) -> Floats:
        """What an F32, F16 or BF16 array holds now, as fp32; infinities and NaN too."""
        if self.spec.dtype == "F32":
            found = np.frombuffer(self.bytes(), "<f4")
        elif self.spec.dtype == "F16":
            found = np.frombuffer(self.bytes(), "<f2").astype(np.float32)
        else:
            words = np.frombuffer(self.bytes(), "<u2").astype(np.uint32) << np.uint32(16)
            found = words.view(np.float32)
        return found.reshape(self.spec.shape)


def blank(backend: Backend, dtype: str, shape: tuple[int, ...]) -> Placed:
    """An array with old content: 0xff is NaN in every float format."""
    spec = TensorSpec("x", dtype, shape)
    memory = memoryview(bytearray(b"\xff" * (spec.count * BITS[dtype] // 8)))
    return Placed(backend.array(memory, dtype, shape), memory, spec)


def put(backend: Backend, values: Floats, dtype: str = "F32") -> Placed:
    """An array of these values, which ``dtype`` (F32, F16, BF16) can represent."""
    return put_bytes(backend, bytearray(raw(values, dtype)), dtype, values.shape)


def raw(values: Floats, dtype: str) -> bytes:
    """The bytes of values that ``dtype`` (F32, F16, BF16) can represent; NaN is one too."""
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    return (bits >> np.uint32(16)).astype("<u2").tobytes()


def put_bytes(
    backend: Backend, data: bytes | bytearray, dtype: str, shape: tuple[int, ...]
) -> Placed:
    """An array over these bytes; over ``bytes`` it is read-only, as a fetched payload is."""
    memory = memoryview(data)
    return Placed(backend.array(memory, dtype, shape), memory, TensorSpec("x", dtype, shape))


@functools.lru_cache(maxsize=512)
def draw(shape: tuple[int, ...], seed: int, dtype: str = "F32", scale: float = 1.0) -> Floats:
    """Normal random values of ``dtype``; the same for the same seed. Read-only."""
    normal = np.array(np.random.default_rng(seed).standard_normal(shape)) * scale
    values = np.array(rounded(normal, dtype))
    values.flags.writeable = False
    return values


def around(values: Sequence[float]) -> Floats:
    """Each value, its fp32 neighbours, and all of them negative."""
    x = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        near = np.concatenate(
            [x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))]
        )
    return np.concatenate([near, -near])
