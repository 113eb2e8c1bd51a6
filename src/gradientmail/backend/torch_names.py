"""Where the tensors of a PyTorch model hang, and under which names they are exchanged.

A learner may wrap the model (``torch.compile``, ``DistributedDataParallel``, activation
checkpointing) and another may not: wrappers leave no trace in the names. A wrapper is known by its
class alone, so that an attribute that a user called ``module`` keeps its place in the names.

Works on the modules' own tables and imports no framework: a wrapper whose class was never imported
cannot be part of a model.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Literal

from gradientmail.schema import TensorSpec

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

_SHARDING = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
"""The class whose parameters are pieces, though they may look whole."""

type Kind = Literal["parameter", "buffer"]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A tensor's place in the model: ``table[key]``, which may hold another tensor later."""

    name: str
    table: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Any:
        """What is there now, None when it was removed."""
        return self.table.get(self.key)


def places(model: Any, kind: Kind) -> Iterator[Place]:
    """Each tensor of a ``torch.nn.Module`` once, under its first name, in torch's order.

    Buffers that ``state_dict`` leaves out (``persistent=False``) are left out here, too. Raises
    ``ValueError`` when two tensors have the same name once wrappers are left out, and for FSDP.
    """
    names: set[str] = set()
    tensors: set[int] = set()
    for prefix, module in modules(model):
        table = module._parameters if kind == "parameter" else module._buffers  # noqa: SLF001
        skipped = () if kind == "parameter" else module._non_persistent_buffers_set  # noqa: SLF001
        for key, tensor in table.items():
            if tensor is None or key in skipped or id(tensor) in tensors:
                continue
            name = prefix + key
            if name in names:
                raise ValueError(
                    f"two {kind}s are both called {name!r} once the wrappers around the model "
                    "are left out; rename one"
                )
            names.add(name)
            tensors.add(id(tensor))
            yield Place(name, table, key)


def modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Each module once, with the prefix of its tensors' names, parents first."""
    return _modules("", model, _loaded_wrappers(), _loaded(*_SHARDING), set())


def _loaded(module: str, name: str) -> type | None:
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def _loaded_wrappers() -> list[tuple[type, str]]:
    found = ((_loaded(module, name), attribute) for module, name, attribute in _WRAPPERS)
    return [(wrapper, attribute) for wrapper, attribute in found if wrapper is not None]


def _modules(
    prefix: str,
    module: Any,
    wrappers: list[tuple[type, str]],
    sharding: type | None,
    seen: set[int],
) -> Iterator[tuple[str, Any]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if sharding is not None and isinstance(module, sharding):
        raise ValueError(
            f"the module {prefix.removesuffix('.') or 'itself'} is sharded by "
            f"FullyShardedDataParallel. {WHOLE}"
        )
    yield prefix, module
    inner = next((attribute for kind, attribute in wrappers if isinstance(module, kind)), None)
    for name, child in module._modules.items():  # noqa: SLF001
        if child is not None:
            below = prefix if name == inner else f"{prefix}{name}."
            yield from _modules(below, child, wrappers, sharding, seen)


WHOLE = (
    "A node of a run holds the whole model: use DistributedDataParallel over the GPUs of a node, "
    "or make each GPU a node of its own"
)


def tensor_spec(name: str, tensor: Any, kind: Kind = "parameter") -> TensorSpec:
    """Name, dtype and shape of a tensor; ``ValueError`` naming one that cannot be exchanged."""
    of_class = type(tensor)
    if of_class.__name__.startswith("Uninitialized"):
        raise ValueError(
            f"the {kind} {name!r} has no shape yet; run the model once before the session"
        )
    dtype = _DTYPES.get(str(tensor.dtype))
    if dtype is None and kind == "buffer":
        raise ValueError(
            f"the buffer {name!r} is {tensor.dtype}; those that are averaged can be float32, "
            "float16 or bfloat16. Convert it, or register it with persistent=False, which leaves "
            "it out"
        )
    if dtype is None:
        raise ValueError(
            f"the parameter {name!r} is {tensor.dtype}; trainable parameters can be float32, "
            "float16 or bfloat16. Convert it, or leave it out with requires_grad=False"
        )
    if of_class.__module__.startswith("torch.distributed."):
        raise ValueError(
            f"the {kind} {name!r} is a {of_class.__name__}, a piece of a tensor that is sharded "
            f"over several processes (FSDP, tensor parallelism). {WHOLE}"
        )
    if str(tensor.layout) != "torch.strided" or tensor.device.type == "meta":
        raise ValueError(
            f"the {kind} {name!r} ({of_class.__name__}, {tensor.layout}, {tensor.device}) is "
            "not one whole dense tensor in memory, and cannot be exchanged"
        )
    if tensor.is_neg():
        raise ValueError(
            f"the {kind} {name!r} is a view that negates what is in memory (part of a conjugate), "
            "and cannot be exchanged. Give the model a copy: tensor.resolve_neg()"
        )
    return TensorSpec(name, dtype, tuple(tensor.shape))


class TrainedSet:
    """Which parameters of a model are trained, and whether that has changed since.

    ``check`` is called with every snapshot, so it compares what it noted, some 0.3 µs a tensor
    and a module, and walks the modules again only when one of them has other children than before.
    """

    def __init__(self, model: Any, buffers: Sequence[Place] = ()) -> None:
        """Note what is there now; ``buffers`` are the places of those that are exchanged, too."""
        self._model = model
        self._buffers = {place.name: place for place in buffers}
        self._places = [
            (place, place.table, place.key, place.tensor, bool(place.tensor.requires_grad))
            for place in places(model, "parameter")
        ]
        self.parameters = {place.name: p for place, _, _, p, trained in self._places if trained}
        """The trained ones by name."""
        self._note_tables()

    def check(self) -> None:
        """Raise ``ValueError`` naming a parameter that was frozen, unfrozen, replaced or added.

        Also one that is no longer in the model, be it with the module that held it, and a buffer
        that is in another module now.
        """
        for place, table, key, parameter, trained in self._places:
            now = table.get(key)
            if now is not parameter:
                raise ValueError(_replaced("parameter", place.name, now))
            if now.requires_grad is not trained:
                raise ValueError(_switched(place.name, now.requires_grad))
        sizes = [list(map(len, tables)) for tables in self._tables]
        held = chain.from_iterable(map(dict.values, chain(*self._tables)))
        if (
            sizes != self._sizes
            or not all(map(is_, held, self._held))
            or any(parameter.requires_grad is not trained for parameter, trained in self._later)
        ):
            self._check_modules()

    def _check_modules(self) -> None:
        """Other modules may hold the same tensors: one was wrapped, or taken apart."""
        known = {id(parameter) for _, _, _, parameter, _ in self._places}
        found: set[int] = set()
        for place in places(self._model, "parameter"):
            found.add(id(place.tensor))
            if id(place.tensor) not in known and place.tensor.requires_grad:
                if place.name in self.parameters:
                    raise ValueError(_replaced("parameter", place.name, place.tensor))
                raise ValueError(
                    f"the trainable parameter {place.name!r} was added since the session began, "
                    f"and would not be exchanged. {_BEFORE}"
                )
        for name, parameter in self.parameters.items():
            if id(parameter) not in found:
                raise ValueError(_replaced("parameter", name, None))
        self._check_buffers()
        self._note_tables()

    def _check_buffers(self) -> None:
        tables = {id(module._buffers) for _, module in modules(self._model)}  # noqa: SLF001
        now = {place.name: place.tensor for place in places(self._model, "buffer")}
        for name, place in self._buffers.items():
            if id(place.table) not in tables:
                raise ValueError(_replaced("buffer", name, now.get(name)))

    def _note_tables(self) -> None:
        """Of all modules: the tables of parameters and of children, how full, and what is there.

        Also where no parameter is, or one hangs once more; and which came later, all frozen.
        """
        found = [module for _, module in modules(self._model)]
        self._tables: tuple[list[dict[str, Any]], list[dict[str, Any]]] = (
            [module._parameters for module in found],  # noqa: SLF001
            [module._modules for module in found],  # noqa: SLF001
        )
        self._sizes = [list(map(len, tables)) for tables in self._tables]
        self._held = list(chain.from_iterable(map(dict.values, chain(*self._tables))))
        known = {id(parameter) for _, _, _, parameter, _ in self._places}
        self._later = [
            (parameter, parameter.requires_grad)
            for parameter in chain.from_iterable(map(dict.values, self._tables[0]))
            if parameter is not None and id(parameter) not in known
        ]


_BEFORE = (
    "All nodes of a run exchange the same parameters from its beginning to its end: change the "
    "model before the session, or close it and begin another run"
)


def _switched(name: str, trained: bool) -> str:
    how = "unfrozen (requires_grad=True)" if trained else "frozen (requires_grad=False)"
    return f"the parameter {name!r} was {how} since the session began. {_BEFORE}"


def _replaced(kind: Kind, name: str, now: Any) -> str:
    how = "removed from the model" if now is None else "replaced by another tensor"
    return (
        f"the {kind} {name!r} was {how} since the session began, and the exchange would go on "
        "with the old one. Copy values in place instead (model.load_state_dict without "
        "assign=True). " + _BEFORE
    )
