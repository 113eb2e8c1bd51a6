"""The names of a PyTorch model's parameters, the same on every node.

A learner may wrap the model (``torch.compile``, ``DistributedDataParallel``, activation
checkpointing) and another may not: wrappers leave no trace in the names. A wrapper is known by its
class alone, so that an attribute that a user called ``module`` keeps its place in the names.

Works on the modules' own tables and imports nothing: a wrapper whose class was never imported
cannot be part of a model.
"""

import sys
from collections.abc import Iterator
from typing import Any

_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
"""Where a wrapper's class is defined, its name, and the attribute that holds the wrapped module."""


def named_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Each parameter of a ``torch.nn.Module`` once, under its first name, in torch's order.

    Raises ``ValueError`` when two parameters have the same name once wrappers are left out.
    """
    names: set[str] = set()
    parameters: set[int] = set()
    for prefix, module in _modules("", model, _loaded_wrappers(), set()):
        for own, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is None or id(parameter) in parameters:
                continue
            name = prefix + own
            if name in names:
                raise ValueError(
                    f"two parameters are both called {name!r} once the wrappers around the model "
                    "are left out; rename one"
                )
            names.add(name)
            parameters.add(id(parameter))
            yield name, parameter


def _loaded_wrappers() -> list[tuple[type, str]]:
    found = []
    for module, name, attribute in _WRAPPERS:
        wrapper = getattr(sys.modules.get(module), name, None)
        if isinstance(wrapper, type):
            found.append((wrapper, attribute))
    return found


def _modules(
    prefix: str,
    module: Any,
    wrappers: list[tuple[type, str]],
    seen: set[int],
) -> Iterator[tuple[str, Any]]:
    """Each module once, with the prefix of its parameters' names, parents first."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    inner = next((attribute for kind, attribute in wrappers if isinstance(module, kind)), None)
    for name, child in module._modules.items():  # noqa: SLF001
        if child is not None:
            below = prefix if name == inner else f"{prefix}{name}."
            yield from _modules(below, child, wrappers, seen)
