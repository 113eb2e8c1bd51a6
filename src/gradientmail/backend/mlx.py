"""MLX: its models. The arithmetic over host memory is NumPy's, which the same extra installs.

MLX arrays are values: nothing writes into one, and to change a model is to put another array in its
place. So a snapshot is no copy on the training thread but a second reference, and "in place" means
that each parameter's place in the tree of modules gets a new array.

Its rules for threads (version 0.31.2 and later): a thread computes on streams of its own; an array
that has not been evaluated can be evaluated only by the thread that made it; looking at one that
another thread is still computing is a race; and a thread that has computed leaves a worker thread
behind for good. Hence nothing is computed in MLX off the training thread. What leaves that thread
has been evaluated there, and what comes to it is copied from the host into arrays that are complete
at once.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gradientmail.backend.base import Array, Parameters
from gradientmail.backend.numpy import HostArithmetic
from gradientmail.backend.numpy_chunks import np
from gradientmail.errors import MissingExtra
from gradientmail.schema import Schema, TensorSpec

try:
    import mlx.core as mx
    from mlx import nn
except ModuleNotFoundError as error:
    raise MissingExtra("mlx", "mlx") from error

_DTYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}

type Path = tuple[Any, ...]
"""The keys and indices that lead from a model to one of its arrays."""


class MlxBackend(HostArithmetic):
    """Parameters of MLX modules; arithmetic in NumPy over buffers of host memory."""

    name = "mlx"

    def bind(self, model: object) -> "MlxParameters":
        """The trainable float32, float16 and bfloat16 parameters of an ``mlx.nn.Module``.

        Named as MLX names them, by their dotted place: ``layers.0.weight``. ``TypeError`` for
        another object, ``ValueError`` naming what cannot be exchanged.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"a model is an mlx.nn.Module, not a {type(model).__qualname__}")
        return MlxParameters(model)


class MlxParameters(Parameters):
    """The parameters that are trainable now; ``freeze`` and ``unfreeze`` later change nothing."""

    def __init__(self, model: nn.Module) -> None:
        """Check the parameters; ``ValueError`` naming one that cannot be exchanged."""
        self._model = model
        self._paths: dict[str, Path] = {}
        self._specs: dict[str, TensorSpec] = {}
        names: dict[int, str] = {}
        for path, array in _arrays(model.trainable_parameters(), ()):
            name = ".".join(map(str, path))
            if name in self._paths:
                raise ValueError(f"two parameters are both called {name!r}; rename one")
            _refuse_tie(names.setdefault(id(array), name), name)
            self._paths[name] = path
            self._specs[name] = _spec(name, array)
        if not self._paths:
            raise ValueError(
                "the model has no trainable parameter: it has no arrays, or all are frozen"
            )
        self.schema: Schema = tuple(self._specs[name] for name in sorted(self._specs))

    def capture(self, arrays: Mapping[str, Array]) -> Callable[[], None]:
        """Take hold of the parameters as they are now; the returned function copies them.

        Evaluates what the training has not evaluated yet. An update that follows makes new arrays
        and leaves these alone, in memory of their own until they are copied.
        """
        # Row-contiguous ones are shared, not copied, by an array object that `+=` does not reach.
        held = {name: mx.contiguous(self._leaf(name)) for name in arrays}
        _evaluate(list(held.values()))

        def copy() -> None:
            for name in tuple(held):
                host = arrays[name]
                if host.size:
                    flat = np.frombuffer(held[name], host.dtype, host.size)
                    np.copyto(host, flat.reshape(host.shape))
                del held[name]

        return copy

    def stage(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """MLX arrays with the values of ``arrays``; on any thread, as nothing is computed."""
        return {name: mx.array(array) for name, array in arrays.items()}

    def apply(self, staged: Mapping[str, Array], *, mixing: float = 0.0) -> None:
        """Put ``mixing·θ + (1−mixing)·Θ`` in the parameters' places."""
        old = {name: self._leaf(name) for name in staged}
        new = dict(staged)
        if mixing:
            new = {name: _mixed(old[name], array, mixing) for name, array in new.items()}
        mx.async_eval(list(new.values()))  # another thread may read the model afterwards
        for name, array in new.items():
            *above, key = self._paths[name]
            self._at(above)[key] = array

    def not_finite(self) -> list[str]:
        """Names of the parameters with a NaN or an infinity; evaluates all of them."""
        finite = {name: mx.isfinite(self._leaf(name)).all() for name in self._paths}
        _evaluate(list(finite.values()))
        return sorted(name for name, good in finite.items() if not good.item())

    def _at(self, path: Path | list[Any]) -> Any:
        found: Any = self._model
        for key in path:
            found = found[key]
        return found

    def _leaf(self, name: str) -> Any:
        """The array that is the parameter ``name`` now; ``ValueError`` when it is another kind."""
        spec = self._specs[name]
        try:
            array = self._at(self._paths[name])
        except (KeyError, IndexError, TypeError):  # a module or a list is another one now
            array = None
        if isinstance(array, mx.array):
            if (_DTYPES.get(array.dtype), array.shape) == (spec.dtype, spec.shape):
                return array
            now = f"{array.dtype} {list(array.shape)}"
        else:
            now = "gone"
        raise ValueError(
            f"the parameter {name!r} was {spec} when the session began and is {now}; change "
            "modules, dtypes and shapes before that"
        )


def _arrays(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Every array of nested dicts and lists, with its place."""
    if isinstance(tree, mx.array):
        yield path, tree
        return
    parts: Any = ()
    if isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, list):
        parts = enumerate(tree)
    for key, value in parts:
        yield from _arrays(value, (*path, key))


def _refuse_tie(first: str, second: str) -> None:
    if first != second:
        raise ValueError(
            f"the parameters {first!r} and {second!r} are one array. MLX cannot keep them so: the "
            "first update makes two of it. Keep one, and use its module in both places (an "
            "embedding that is also the output layer: embedding.as_linear(x)); MLX does not look "
            "at attributes whose names begin with an underscore"
        )


def _spec(name: str, array: Any) -> TensorSpec:
    dtype = _DTYPES.get(array.dtype)
    if dtype is None:
        raise ValueError(
            f"the parameter {name!r} is {array.dtype}; trainable parameters can be float32, "
            "float16 or bfloat16. Convert it, or leave it out: freeze its module, or let its name "
            "begin with an underscore"
        )
    return TensorSpec(name, dtype, tuple(array.shape))


def _mixed(theta: Any, committed: Any, mixing: float) -> Any:
    """``mixing·θ + (1−mixing)·Θ`` in fp32, then θ's dtype. Where both are equal, that value."""
    old, new = theta.astype(mx.float32), committed.astype(mx.float32)
    mean = mixing * old + (1.0 - mixing) * new
    return mx.where(old == new, new, mean).astype(theta.dtype)


def _evaluate(arrays: list[Any]) -> None:
    try:
        mx.eval(arrays)
    except RuntimeError as error:
        error.add_note(
            "GradientMail reads the model on the thread that makes the session and calls step. "
            "Parameters made on another thread must be evaluated there: mx.eval(model.parameters())"
        )
        raise
