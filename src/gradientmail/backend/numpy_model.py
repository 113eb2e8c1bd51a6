"""A dict of NumPy arrays as a model: what of it is exchanged, and how it is read and written.

Every floating array is trained; integers and booleans (counters, tables, masks) are left alone,
as buffers of a module are. Arrays are looked up anew each time, so ``model["w"] = model["w"] - g``
is as good as ``model["w"] -= g``; they are written in place.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal

from gradientmail.backend.base import Array, Parameters
from gradientmail.backend.numpy_chunks import CHUNK, Values, np, quiet
from gradientmail.schema import Schema, TensorSpec

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""By name, so that ``bfloat16`` needs no package until there is one, and byte order is free."""

_MOST_WORK = 100_000
"""How long NumPy may search for an element that two arrays share before they count as sharing."""


class NumpyParameters(Parameters):
    """The floating arrays of one mapping."""

    def __init__(self, model: object) -> None:
        """Check the arrays; ``TypeError`` or ``ValueError`` naming what cannot be exchanged."""
        if not isinstance(model, Mapping):
            raise TypeError(
                f"a model is a dict of NumPy arrays, not a {type(model).__module__}."
                f"{type(model).__qualname__}"
            )
        found = dict(_trained(model))
        if not found:
            raise ValueError(
                "the model has no floating array: train float32, float16 or bfloat16 ones"
            )
        _check_memory(found)
        self._model: Mapping[str, Any] = model
        self.schema: Schema = tuple(_spec(name, found[name]) for name in sorted(found))
        self._specs = {spec.name: spec for spec in self.schema}

    def capture(self, arrays: Mapping[str, Array]) -> Callable[[], None]:
        """Copy arrays of the model into ``arrays``; complete at once."""
        for name, host in arrays.items():
            np.copyto(host, self._array(name))
        return _nothing

    def stage(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """``arrays`` themselves."""
        return arrays

    @quiet
    def apply(self, staged: Mapping[str, Array], *, mixing: float = 0.0) -> None:
        """Write ``mixing·θ + (1−mixing)·Θ`` in place."""
        pairs = [(_writable(name, self._array(name)), source) for name, source in staged.items()]
        for array, source in pairs:
            if mixing:
                _mix(array, source, mixing)
            else:
                np.copyto(array, source)

    @quiet
    def not_finite(self) -> list[str]:
        """Names of arrays with a NaN or an infinity."""
        arrays = {name: self._array(name) for name in self._specs}
        return [name for name, array in arrays.items() if not _is_finite(array)]

    def _array(self, name: str) -> Values:
        """The array that the model holds now; ``ValueError`` when it is another kind of thing."""
        value = self._model.get(name)
        spec = self._specs[name]
        if isinstance(value, np.generic) and isinstance(self._model, MutableMapping):
            # What arithmetic makes of an array without dimensions; that cannot be written in place.
            self._model[name] = value = np.array(value)
        if not isinstance(value, np.ndarray):
            now = "gone" if value is None else f"a {type(value).__qualname__}"
        else:
            dtype = _DTYPES.get(value.dtype.name)
            if dtype == spec.dtype and value.shape == spec.shape:
                return np.asarray(value)
            now = f"{value.dtype.name} {list(value.shape)}"
        raise ValueError(
            f"the array {name!r} was {spec} when the session began and is {now}; keep its dtype "
            "and shape (arithmetic with float64 arrays gives float64 ones: convert what you assign)"
        )


def _nothing() -> None:
    """What is left to wait for after a copy on the host."""


def _trained(model: Mapping[Any, Any]) -> Iterator[tuple[str, Values]]:
    for name in model:
        value = model[name]
        if not isinstance(name, str):
            raise TypeError(
                f"the model has the name {name!r}, a {type(name).__qualname__}; names of arrays "
                "are strings, the same on every node"
            )
        array = _checked_array(name, value)
        if array.dtype.kind in "iub":
            continue
        if model[name] is not value:
            raise TypeError(
                f"the model gives another array {name!r} each time that it is asked, so what is "
                f"written into it is lost; pass a dict: dict({type(model).__qualname__.lower()})"
            )
        yield str(name), _checked_parameter(name, array)


def _checked_array(name: str, value: object) -> Values:
    if isinstance(value, np.generic):
        raise TypeError(
            f"{name!r} is a {type(value).__qualname__}, which cannot be written in place; make it "
            f"an array: np.array(model[{name!r}])"
        )
    if isinstance(value, Mapping):
        raise TypeError(
            f"{name!r} is a {type(value).__qualname__}; a model is one flat dict of arrays: give "
            "nested ones names like 'block.weight'"
        )
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name!r} is a {type(value).__module__}.{type(value).__qualname__}; a model is a dict "
            "of NumPy arrays. Convert it, or keep it outside of the dict"
        )
    return np.asarray(value)


def _checked_parameter(name: str, array: Values) -> Values:
    if array.dtype.name not in _DTYPES:
        raise ValueError(
            f"the array {name!r} is {array.dtype.name}; trained arrays can be float32, float16 or "
            f"bfloat16. Convert it (model[{name!r}].astype('float32')), or keep it outside of the "
            "dict"
        )
    if _overlaps_itself(array):
        raise ValueError(
            f"several elements of the array {name!r} are one place in memory (a broadcast or a "
            f"sliding view); copy it: model[{name!r}] = model[{name!r}].copy()"
        )
    return _writable(name, array)


def _writable(name: str, array: Values) -> Values:
    if not array.flags.writeable:
        raise ValueError(
            f"the array {name!r} is read-only, and parameters are written in place; copy it: "
            f"model[{name!r}] = model[{name!r}].copy()"
        )
    return array


def _overlaps_itself(array: Values) -> bool:
    """Whether two elements may be one place. Never for what slicing and transposing give."""
    steps = sorted(
        (abs(stride), size)
        for stride, size in zip(array.strides, array.shape, strict=True)
        if size != 1
    )
    reached = array.itemsize
    for stride, size in steps:
        if stride < reached and array.size:
            return True
        reached += stride * (size - 1)
    return False


def _check_memory(arrays: Mapping[str, Values]) -> None:
    """``ValueError`` when two names stand for the same elements, or for some of them."""
    bounds = sorted((*_bounds(array), name) for name, array in arrays.items() if array.size)
    reaching: list[tuple[int, str]] = []
    for start, stop, name in bounds:
        reaching = [(end, other) for end, other in reaching if end > start]
        for _, other in reaching:
            if _share(arrays[name], arrays[other]):
                first, second = sorted((name, other))
                raise ValueError(
                    f"the arrays {first!r} and {second!r} share memory, so that each commit would "
                    f"write one over the other; leave one out of the dict, or copy it: "
                    f"model[{second!r}] = model[{second!r}].copy()"
                )
        reaching.append((stop, name))


def _bounds(array: Values) -> tuple[int, int]:
    """The first address of the elements of an array, and the first behind them."""
    start = array.__array_interface__["data"][0]
    reach = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    low, high = (sum(filter(sign, reach)) for sign in ((0).__gt__, (0).__lt__))
    return start + low, start + high + array.itemsize


def _share(x: Values, y: Values) -> bool:
    try:
        return np.shares_memory(x, y, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def _spec(name: str, array: Values) -> TensorSpec:
    return TensorSpec(name, _DTYPES[array.dtype.name], array.shape)


def _pieces(access: Sequence[Literal["readonly", "readwrite"]], *arrays: Values) -> Iterator[Any]:
    """Pieces of arrays of any layout in step, as fp32; written back where that is the access."""
    pieces: Any = np.nditer(
        arrays,
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[[each] for each in access],
        op_dtypes=[np.float32] * len(arrays),
        casting="unsafe",
        buffersize=CHUNK,
    )
    with pieces:
        yield from pieces


def _mix(array: Values, source: Values, mixing: float) -> None:
    """``array = mixing·array + (1−mixing)·source``, from the nearer end: equals stay equal.

    Half the difference, so that it is in range whatever the two are.
    """
    half, share = np.float32(0.5), np.float32(2.0 * min(mixing, 1.0 - mixing))
    for x, y in _pieces(["readwrite", "readonly"], array, source):
        near, far = (y, x) if mixing < 0.5 else (x, y)
        difference = np.multiply(far, half)
        np.subtract(difference, np.multiply(near, half), out=difference)
        np.multiply(difference, share, out=difference)
        np.add(near, difference, out=x)


def _is_finite(array: Values) -> bool:
    return all(bool(np.isfinite(x).all()) for x in _pieces(["readonly"], array))
