"""Frameworks: each reads and writes its models and does the arithmetic of the exchange in them.

Each lives in a module of its own that is imported when a model of that framework is met.
"""

from importlib import import_module

from gradientmail.backend.base import Backend

_BACKENDS = {"torch": ("gradientmail.backend.torch", "TorchBackend")}
"""The package that a model's class comes from, and the backend for it."""


def backend_for(model: object) -> Backend:
    """A backend for ``model``, chosen by where its class and its bases are defined.

    Imports no framework that the model does not use. ``TypeError`` for any other object.
    """
    for base in type(model).__mro__:
        found = _BACKENDS.get(base.__module__.partition(".")[0])
        if found:
            module, name = found
            return getattr(import_module(module), name)()
    raise TypeError(
        f"a model is a torch.nn.Module, not a {type(model).__module__}.{type(model).__qualname__}"
    )
