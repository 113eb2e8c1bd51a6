"""A snapshot's delta: how far a fragment moved from its anchor, at the run's precision."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gradientmail.algorithm.precision import (
    LARGEST_QUANTIZED,
    QUANTIZED,
    Take,
    encode_difference,
    fp32_array,
    scale_name,
)
from gradientmail.backend.base import Array, Backend
from gradientmail.handoff import Outgoing
from gradientmail.run import Fragment, arrays_over


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta payload in its buffer."""

    buffer: memoryview
    squares: Mapping[str, float] | None
    """``Σ x²`` of each tensor as it is in the payload, if that was computed on the way."""
    not_finite: tuple[str, ...]
    """The tensors for which there is no delta; then all of it is zero."""


def make_delta(
    backend: Backend, fragment: Fragment, outgoing: Outgoing, dtype: str | None, take: Take
) -> Delta:
    """``anchor − θ``; at the parameters' own dtypes it is written over the copy of θ.

    A tensor counts as not finite also when its difference is not, at the precision of the payload:
    whoever decodes it would reject it.
    """
    anchor, theta = outgoing.anchor.arrays, outgoing.blank.arrays
    if dtype is not None and dtype in QUANTIZED:
        return _quantized(backend, fragment, anchor, theta, dtype, take)
    buffer, out = outgoing.blank.buffer, theta
    if dtype is not None:
        buffer = fragment.delta.blank(take)
        out = arrays_over(backend, buffer, fragment.delta)
    squares = {name: backend.subtract_squares(anchor[name], theta[name], out[name]) for name in out}
    bad = tuple(name for name, square in squares.items() if not math.isfinite(square))
    if bad:
        for name, array in out.items():
            backend.subtract(anchor[name], anchor[name], array)
    return Delta(buffer, None if bad else squares, bad)


def _quantized(
    backend: Backend,
    fragment: Fragment,
    anchor: Mapping[str, Array],
    theta: Mapping[str, Array],
    dtype: str,
    take: Take,
) -> Delta:
    buffer = fragment.delta.blank(take)
    out = arrays_over(backend, buffer, fragment.delta)
    bad = encode_difference(backend, anchor, theta, fragment.specs, dtype, out, take)
    if dtype == "F8_E4M3":  # a value that rounds up to 2**128 is infinite to whoever decodes it
        for spec in fragment.specs:
            scale = out[scale_name(spec.name)]
            if float(scale) >= LARGEST_QUANTIZED / 2**7:
                decoded = fp32_array(backend, spec, take)
                backend.decode(out[spec.name], dtype, scale, decoded)
                bad += [] if backend.is_finite(decoded) else [spec.name]
    if bad:
        encode_difference(backend, anchor, anchor, fragment.specs, dtype, out, take)
    return Delta(buffer, None, tuple(dict.fromkeys(bad)))
