"""Frameworks: each reads and writes its models and does the arithmetic of the exchange in them.

Each lives in a module of its own that is imported when a model of that framework is met, or when
its backend is named here: ``from gradientmail.backend import NumpyBackend``. A backend serves as
``backend=`` of a ``Session`` whatever framework the model is of.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradientmail.backend.base import Backend, Parameters

if TYPE_CHECKING:
    from gradientmail.backend.mlx import MlxBackend
    from gradientmail.backend.numpy import NumpyBackend
    from gradientmail.backend.torch import TorchBackend
    from gradientmail.backend.torch_device import TorchDeviceBackend

__all__ = [
    "Backend",
    "MlxBackend",
    "NumpyBackend",
    "Parameters",
    "TorchBackend",
    "TorchDeviceBackend",
    "backend_for",
]

_NAMES = {
    "MlxBackend": "gradientmail.backend.mlx",
    "NumpyBackend": "gradientmail.backend.numpy",
    "TorchBackend": "gradientmail.backend.torch",
    "TorchDeviceBackend": "gradientmail.backend.torch_device",
}
"""Where each backend is."""

_BACKENDS = {"torch": "TorchBackend", "mlx": "MlxBackend"}
"""The package that a model's class comes from, and the backend for it."""


def __getattr__(name: str) -> Any:
    """A backend, its framework imported now. ``MissingExtra`` when that is not installed."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)


def backend_for(model: object) -> Backend:
    """A backend for ``model``, chosen by where its class and its bases are defined.

    A mapping with a NumPy array in it is NumPy's. Imports no framework that the model does not
    use. ``TypeError`` for any other object.
    """
    for base in type(model).__mro__:
        found = _BACKENDS.get(base.__module__.partition(".")[0])
        if found:
            return __getattr__(found)()
    if isinstance(model, Mapping) and any(map(_is_numpys, model.values())):
        return __getattr__("NumpyBackend")()
    raise TypeError(
        "a model is a torch.nn.Module, an mlx.nn.Module or a dict of NumPy arrays, not a "
        f"{_class_of(model)}{_held_by(model)}"
    )


def _is_numpys(value: object) -> bool:
    """Whether it is an array or a scalar of NumPy; there is none before NumPy is imported."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def _held_by(model: object) -> str:
    """What a mapping holds instead of arrays, for an error."""
    if not isinstance(model, Mapping):
        return ""
    kinds = sorted({_class_of(value) for value in model.values()})
    return f" of {', '.join(kinds[:3])}" if kinds else " that is empty"


def _class_of(value: object) -> str:
    """Its class as one writes it: ``dict``, ``torch.Tensor``."""
    kind = type(value)
    within = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{within}{kind.__qualname__}"
