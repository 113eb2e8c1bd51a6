"""What of a PyTorch model is exchanged, under which names, and how it is read and written.

A learner may wrap the model (``torch.compile``, ``DistributedDataParallel``, activation
checkpointing) and another may not: wrappers leave no trace in the names. A wrapper is known by its
class alone, so that an attribute that a user called ``module`` keeps its place in the names.

Works on the modules' own tables and imports no framework: a wrapper whose class was never imported
cannot be part of a model.
"""

import math
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import starmap
from typing import Any

from gradientmail.backend.base import Array, Parameters
from gradientmail.backend.cuda_copies import DeviceCopies
from gradientmail.schema import Schema, TensorSpec

_DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}

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


class TorchParameters(Parameters):
    """Parameters on the CPU, on CUDA devices, or on both.

    They are read and written through ``parameter.data``, taken anew each time: ``model.to(...)``
    replaces it. A write through it leaves the version counters of autograd alone, so a graph that
    is still to be run backward does not fail because the exchange came between.
    """

    def __init__(self, torch: Any, parameters: Mapping[str, Array]) -> None:
        """Check the parameters; ``ValueError`` naming one that cannot be exchanged.

        ``torch`` is the module, or a test's stand-in for one on a machine with a CUDA device.
        """
        self._torch = torch
        self._parameters = dict(parameters)
        named = sorted(self._parameters.items())
        self.schema: Schema = tuple(parameter_spec(name, p) for name, p in named)
        self._copies: dict[Any, DeviceCopies] = {}
        self._lock = threading.Lock()

    def capture(self, arrays: Mapping[str, Array]) -> Callable[[], None]:
        """Copy parameters into ``arrays``; on CUDA the copies run on beside the training."""
        waits = []
        for device, pairs in self._by_device(arrays).items():
            parameters, hosts = map(list, zip(*pairs, strict=True))
            if device.type == "cuda":
                waits.append(self._copies_of(device).download(parameters, hosts))
            else:
                self._torch._foreach_copy_(hosts, parameters)

        def wait_for_all() -> None:
            for wait in waits:
                wait()

        return wait_for_all

    def stage(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """``arrays`` themselves, or their copies on the device of a CUDA parameter."""
        staged = dict(arrays)
        moved: dict[Any, list[str]] = defaultdict(list)
        for name in arrays:
            moved[self._parameters[name].device].append(name)
        for device, names in moved.items():
            if device.type == "cuda":
                uploaded = self._copies_of(device).upload([arrays[name] for name in names])
                staged.update(zip(names, uploaded, strict=True))
        return staged

    def apply(self, staged: Mapping[str, Array], *, mixing: float = 0.0) -> None:
        """Write ``mixing·θ + (1−mixing)·Θ`` in place."""
        for device, pairs in self._by_device(staged).items():
            if device.type == "cuda":
                self._copies_of(device).use([source for _, source in pairs])
            written, sources = map(list, zip(*starmap(stored_once, pairs), strict=True))
            if mixing:
                self._torch._foreach_lerp_(written, sources, 1.0 - mixing)
            else:
                self._torch._foreach_copy_(written, sources)

    def not_finite(self) -> list[str]:
        """Names of parameters with a NaN or an infinity; one wait for each device."""
        found: list[str] = []
        by_device: dict[Any, dict[str, Array]] = defaultdict(dict)
        for name, parameter in self._parameters.items():
            if parameter.numel():
                by_device[parameter.device][name] = parameter.data
        for named in by_device.values():
            norms = self._torch._foreach_norm(list(named.values()), math.inf)  # noqa: SLF001
            finite = self._torch.stack([norm.float() for norm in norms]).isfinite().tolist()
            found += [name for name, good in zip(named, finite, strict=True) if not good]
        return sorted(found)

    def _by_device(self, arrays: Mapping[str, Array]) -> dict[Any, list[tuple[Array, Array]]]:
        """Pairs of a parameter and its array, by the parameters' device."""
        pairs: dict[Any, list[tuple[Array, Array]]] = defaultdict(list)
        for name, array in arrays.items():
            data = self._parameters[name].data
            if data.dtype != array.dtype or data.shape != array.shape:
                raise ValueError(
                    f"the parameter {name!r} is {data.dtype} {tuple(data.shape)} and was "
                    f"{array.dtype} {tuple(array.shape)} when the session began; change dtypes "
                    "and shapes before that"
                )
            pairs[data.device].append((data, array))
        return pairs

    def _copies_of(self, device: Any) -> DeviceCopies:
        with self._lock:
            if device not in self._copies:
                self._copies[device] = DeviceCopies(self._torch.cuda, device)
            return self._copies[device]


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


def parameter_spec(name: str, parameter: Any) -> TensorSpec:
    """Name, dtype and shape of a parameter; ``ValueError`` naming one that cannot be exchanged."""
    kind = type(parameter)
    if kind.__name__.startswith("Uninitialized"):
        raise ValueError(
            f"the parameter {name!r} has no shape yet; run the model once before the session"
        )
    dtype = _DTYPES.get(str(parameter.dtype))
    if dtype is None:
        raise ValueError(
            f"the parameter {name!r} is {parameter.dtype}; trainable parameters can be float32, "
            "float16 or bfloat16. Convert it, or leave it out with requires_grad=False"
        )
    sharded = kind.__module__.startswith("torch.distributed.")
    if sharded or str(parameter.layout) != "torch.strided" or parameter.device.type == "meta":
        raise ValueError(
            f"the parameter {name!r} ({kind.__name__}, {parameter.layout}, {parameter.device}) is "
            "not one whole dense tensor in memory, and cannot be exchanged"
        )
    return TensorSpec(name, dtype, tuple(parameter.shape))


def stored_once(x: Any, source: Any) -> tuple[Any, Any]:
    """``x`` and ``source`` without the repetitions of an expanded ``x``, so that it can be written.

    Many elements of an expanded tensor are one place in memory; a copy into it is refused.
    """
    for dim, stride in enumerate(x.stride()):
        if not stride and x.shape[dim] > 1:
            x, source = x.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    return x, source
