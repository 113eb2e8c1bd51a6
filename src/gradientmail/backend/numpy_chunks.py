"""NumPy arrays in pieces that stay in the processor's second-level cache.

The one place that imports NumPy and ``ml_dtypes``; the latter only where something is bfloat16,
which NumPy does not know by itself.
"""

from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

from gradientmail.errors import MissingExtra

try:
    import numpy as np
    from numpy.typing import NDArray
except ModuleNotFoundError as error:
    raise MissingExtra("numpy", "numpy") from error

__all__ = ["CHUNK", "NDArray", "Values", "bfloat16", "chunks", "np", "quiet", "scratch"]

type Values = NDArray[Any]

CHUNK = 2**15
"""Elements worked on at a time: whole F4 blocks, and a quarter of a megabyte in float64."""


@cache
def bfloat16() -> np.dtype[Any]:
    """The dtype of bfloat16 arrays. ``MissingExtra`` without the package that defines it."""
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise MissingExtra("numpy", "ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


def chunks(*arrays: Values) -> Iterator[tuple[Values, ...]]:
    """Flat pieces of contiguous arrays of one size, in step. Nothing for empty ones."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, CHUNK):
        yield tuple(array[start : start + CHUNK] for array in flat)


def scratch(like: Values, dtype: Any = np.float32) -> Values:
    """Memory for one piece of ``like``."""
    return np.empty(min(like.size, CHUNK), dtype)


def quiet[**P, T](call: Callable[P, T]) -> Callable[P, T]:
    """``call`` without NumPy's warnings: overflow and NaN are results here, and looked for.

    The state is the calling thread's own, and that which it was afterwards.
    """

    @wraps(call)
    def silent(*args: P.args, **kwargs: P.kwargs) -> T:
        with np.errstate(all="ignore"):
            return call(*args, **kwargs)

    return silent
