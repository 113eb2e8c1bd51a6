"""A PyTorch model as the exchange reads and writes it."""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import starmap
from typing import Any

from gradientmail.backend.base import Array, Parameters
from gradientmail.backend.cuda_copies import DeviceCopies
from gradientmail.backend.torch_names import Kind, Place, tensor_spec
from gradientmail.schema import Schema


class TorchParameters(Parameters):
    """Parameters, and buffers, on the CPU, on CUDA devices, or on both; on others as on the CPU.

    They are read and written through ``parameter.data``, taken anew each time: ``model.to(...)``
    replaces it. A write through it leaves the version counters of autograd alone, so a graph that
    is still to be run backward does not fail because the exchange came between.
    """

    def __init__(
        self,
        torch: Any,
        parameters: Mapping[str, Array],
        *,
        buffers: Iterable[Place] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Check the tensors; ``ValueError`` naming one that cannot be exchanged.

        ``torch`` is the module, or a test's stand-in for one on a machine with a CUDA device.
        ``buffers`` are looked up anew each time: a module may put another tensor in their place.
        ``check`` is called before each snapshot and raises when the model is not what it was.
        """
        self._torch = torch
        self._parameters = dict(parameters)
        self._buffers = {place.name: place for place in buffers}
        self._check = check
        self.identity = frozenset(map(id, self._parameters.values()))
        self.averaged = frozenset(self._buffers)
        kinds: dict[str, Kind] = dict.fromkeys(self._buffers, "buffer")
        names = sorted(self._parameters.keys() | self._buffers.keys())
        self.schema: Schema = tuple(
            tensor_spec(name, self._tensor(name), kinds.get(name, "parameter")) for name in names
        )
        self._copies: dict[Any, DeviceCopies] = {}
        self._lock = threading.Lock()

    def capture(self, arrays: Mapping[str, Array]) -> Callable[[], None]:
        """Copy parameters into ``arrays``; on CUDA the copies run on beside the training.

        ``ValueError`` when the model is no more what it was when the session began.
        """
        self._check()
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
        """``arrays`` themselves, or copies on the device of a CUDA parameter if it has room."""
        staged = dict(arrays)
        moved: dict[Any, list[str]] = defaultdict(list)
        for name in arrays:
            moved[self._tensor(name).device].append(name)
        for device, names in moved.items():
            if device.type == "cuda":
                uploaded = self._copies_of(device).upload([arrays[name] for name in names])
                staged.update(zip(names, uploaded, strict=True))
        return staged

    def apply(self, staged: Mapping[str, Array], *, mixing: float = 0.0) -> None:
        """Write ``mixing·θ + (1−mixing)·Θ`` in place."""
        for device, pairs in self._by_device(staged).items():
            self._keep_until_read(source for _, source in pairs)
            written, sources = map(list, zip(*starmap(stored_once, pairs), strict=True))
            if not mixing:
                self._torch._foreach_copy_(written, sources)
                continue
            for target, source in zip(written, sources, strict=True):
                # Unlike a copy, not across devices; and memory for one at a time may be had.
                target.lerp_(source.to(device), 1.0 - mixing)

    def _keep_until_read(self, staged: Iterable[Array]) -> None:
        """What lies on a CUDA device is read by its stream there, be the model there or not.

        It may have been moved since, to another device, from the host or there.
        """
        by_device: dict[Any, list[Array]] = defaultdict(list)
        for array in staged:
            by_device[array.device].append(array)
        for device, arrays in by_device.items():
            if device.type == "cuda":
                self._copies_of(device).use(arrays)

    def not_finite(self) -> list[str]:
        """Names of parameters with a NaN or an infinity; one wait for each device."""
        found: list[str] = []
        by_device: dict[Any, dict[str, Array]] = defaultdict(dict)
        for spec in self.schema:
            tensor = self._tensor(spec.name)
            if tensor.numel():
                by_device[tensor.device][spec.name] = tensor.data
        for named in by_device.values():
            norms = self._torch._foreach_norm(list(named.values()), math.inf)  # noqa: SLF001
            finite = self._torch.stack([norm.float() for norm in norms]).isfinite().tolist()
            found += [name for name, good in zip(named, finite, strict=True) if not good]
        return sorted(found)

    def _by_device(self, arrays: Mapping[str, Array]) -> dict[Any, list[tuple[Array, Array]]]:
        """Pairs of a parameter and its array, by the parameters' device."""
        pairs: dict[Any, list[tuple[Array, Array]]] = defaultdict(list)
        for name, array in arrays.items():
            data = self._tensor(name).data
            if data.dtype != array.dtype or data.shape != array.shape:
                kind = "buffer" if name in self._buffers else "parameter"
                raise ValueError(
                    f"the {kind} {name!r} is {data.dtype} {tuple(data.shape)} and was "
                    f"{array.dtype} {tuple(array.shape)} when the session began; change dtypes "
                    "and shapes before that"
                )
            pairs[data.device].append((data, array))
        return pairs

    def _tensor(self, name: str) -> Any:
        place = self._buffers.get(name)
        if place is None:
            return self._parameters[name]
        tensor = place.tensor
        if tensor is None:
            raise ValueError(
                f"the buffer {name!r} is None and was a tensor when the session began; change the "
                "model before that"
            )
        return tensor

    def _copies_of(self, device: Any) -> DeviceCopies:
        with self._lock:
            if device not in self._copies:
                self._copies[device] = DeviceCopies(self._torch.cuda, device)
            return self._copies[device]


def stored_once(x: Any, source: Any) -> tuple[Any, Any]:
    """``x`` and ``source`` without the repetitions of an expanded ``x``, so that it can be written.

    Many elements of an expanded tensor are one place in memory; a copy into it is refused.
    """
    for dim, stride in enumerate(x.stride()):
        if not stride and x.shape[dim] > 1:
            x, source = x.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    return x, source
