"""Which tensors a payload holds, and at which precision.

Quantized formats carry their scales beside the data, as ``<name>.scale``; what their bytes mean
is stated at ``Backend.encode``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from gradientmail.backend.base import Array, Backend
from gradientmail.schema import TensorSpec

BLOCK = 32
"""Elements of an ``F4`` tensor that share one scale."""

QUANTIZED = ("F8_E4M3", "F4")
"""The formats that need a scale."""

LARGEST_QUANTIZED = 2.0**127
"""No value up to this rounds up beyond fp32's range when it is quantized."""

LARGEST = {"F32": 3.4028234663852886e38, "F16": 65504.0, "BF16": 3.3895313892515355e38}
"""The largest finite value of each plain format."""

type Take = Callable[[int], memoryview]
"""Gives a writable buffer of exactly that many bytes (``BufferPool.take``)."""


def largest(dtype: str) -> float:
    """The largest magnitude that is finite once it is encoded at ``dtype`` and decoded."""
    return LARGEST.get(dtype, LARGEST_QUANTIZED)


def scale_name(name: str) -> str:
    """The name of the scales of the tensor ``name`` in a payload."""
    return f"{name}.scale"


def delta_specs(specs: Iterable[TensorSpec], dtype: str | None) -> tuple[TensorSpec, ...]:
    """The payload of deltas of these parameters at ``dtype``, ``None`` being each one's own.

    Raises ``ValueError`` when a parameter has the name that another one's scales need.
    """
    found = [part for spec in specs for part in _encoded_specs(spec, dtype)]
    names = [spec.name for spec in found]
    if len(set(names)) != len(names):
        taken = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"the parameter {taken[0]!r} has the name that the scales of another parameter need at "
            f"{dtype}; rename it, or choose F32, F16 or BF16"
        )
    return tuple(found)


def update_specs(specs: Iterable[TensorSpec], dtype: str | None) -> tuple[TensorSpec, ...]:
    """The payload of a commit's update; no tensor when commits carry none (``None``)."""
    return () if dtype is None else delta_specs(specs, dtype)


def theta_is_master(spec: TensorSpec, commit_dtype: str | None) -> bool:
    """Whether the outer step writes Θ itself: of an F32 parameter, and commits carry no update."""
    return spec.dtype == "F32" and commit_dtype is None


def outer_specs(specs: Iterable[TensorSpec], *, commit_dtype: str | None) -> tuple[TensorSpec, ...]:
    """The payload of the outer state: fp32 momentum, and the fp32 master where theta is not it."""
    found = []
    for spec in specs:
        found.append(TensorSpec(f"momentum.{spec.name}", "F32", spec.shape))
        if not theta_is_master(spec, commit_dtype):
            found.append(TensorSpec(f"master.{spec.name}", "F32", spec.shape))
    return tuple(found)


def encode_tensors(
    backend: Backend,
    arrays: Mapping[str, Array],
    specs: Iterable[TensorSpec],
    dtype: str | None,
    out: Mapping[str, Array],
) -> None:
    """Write F32 ``arrays`` at ``dtype`` into ``out``, the arrays of ``delta_specs``."""
    for spec in specs:
        scale = out[scale_name(spec.name)] if dtype in QUANTIZED else None
        backend.encode(arrays[spec.name], dtype or spec.dtype, out[spec.name], scale)


def encode_difference(
    backend: Backend,
    left: Mapping[str, Array],
    right: Mapping[str, Array],
    specs: Iterable[TensorSpec],
    dtype: str | None,
    out: Mapping[str, Array],
    take: Take,
) -> list[str]:
    """Write ``left − right`` at ``dtype`` into ``out``, the arrays of ``delta_specs``.

    ``left`` and ``right`` are F32, F16 or BF16. Without quantization ``out`` may be ``right``.
    Quantized, it returns the names of the tensors whose difference is not finite, and has then
    written nothing that can be read.
    """
    bad = []
    for spec in specs:
        x, y, data = left[spec.name], right[spec.name], out[spec.name]
        if dtype not in QUANTIZED:
            backend.subtract(x, y, data)
            continue
        scale, blank = out[scale_name(spec.name)], partial(fp32_array, backend, spec, take)
        if not backend.encode_difference(x, y, dtype, data, scale, blank):
            bad.append(spec.name)
    return bad


def add_decoded(
    backend: Backend,
    base: Mapping[str, Array],
    encoded: Mapping[str, Array],
    dtype: str | None,
    specs: Iterable[TensorSpec],
    out: Mapping[str, Array],
    take: Take,
) -> None:
    """``out = base + encoded`` in the dtypes of ``out``; ``encoded`` as ``delta_specs`` says."""
    for spec in specs:
        x, data = base[spec.name], encoded[spec.name]
        if dtype not in QUANTIZED:
            backend.add(x, data, out[spec.name])
            continue
        scale, blank = encoded[scale_name(spec.name)], partial(fp32_array, backend, spec, take)
        backend.add_decoded(x, data, dtype, scale, out[spec.name], blank)


def decode_tensors(
    backend: Backend,
    arrays: Mapping[str, Array],
    dtype: str | None,
    specs: Sequence[TensorSpec],
    blank: Callable[[TensorSpec], Array],
) -> dict[str, Array]:
    """The tensors of a payload of ``delta_specs``, as arrays that the arithmetic takes.

    F32, F16 and BF16 are the arrays given, not copied; quantized ones are decoded into F32 ones,
    which ``blank`` gives.
    """
    if dtype not in QUANTIZED:
        return {spec.name: arrays[spec.name] for spec in specs}
    decoded = {}
    for spec in specs:
        decoded[spec.name] = blank(spec)
        scale = arrays[scale_name(spec.name)]
        backend.decode(arrays[spec.name], dtype, scale, decoded[spec.name])
    return decoded


def fp32_array(backend: Backend, spec: TensorSpec, take: Take) -> Array:
    """An F32 array of the parameter's shape in a buffer of ``take``, with whatever content."""
    return backend.array(take(4 * spec.count), "F32", spec.shape)


def _encoded_specs(spec: TensorSpec, dtype: str | None) -> list[TensorSpec]:
    if dtype is None:
        return [spec]
    if dtype == "F8_E4M3":
        scale = TensorSpec(scale_name(spec.name), "F32", ())
        return [TensorSpec(spec.name, dtype, spec.shape), scale]
    if dtype == "F4":
        blocks = -(-spec.count // BLOCK)
        scale = TensorSpec(scale_name(spec.name), "F8_E8M0", (blocks,))
        return [TensorSpec(spec.name, dtype, (blocks * BLOCK,)), scale]
    return [TensorSpec(spec.name, dtype, spec.shape)]
