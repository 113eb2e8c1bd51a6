"""Merging on a CUDA device: norms, sums and the outer step are computed there, piece by piece."""

import math
from collections.abc import Callable, Sequence
from typing import Any, override

from gradientmail.backend.base import Combination
from gradientmail.backend.torch import TorchBackend
from gradientmail.backend.torch_chunks import Tensor, chunks, factors, torch
from gradientmail.backend.torch_sums import exact_dot

PIECE = 2**22
"""Elements on the device at a time: some 100 MB there, with all that is computed of them."""

type Found = Tensor | list[float]
"""What a piece comes to, on the device or on the host."""


class TorchDeviceBackend(TorchBackend):
    """``TorchBackend`` that merges on a CUDA device, for ``backend=`` of a session.

    Spares the processor of a node that closes rounds, and costs transfers: arrays stay in host
    memory, and each piece of them goes to the device and back. All is queued on a stream of its
    own, so the training waits for none of it. A piece that finds no room beside the training is
    computed on the host. Formats are encoded and decoded on the host. Results may differ from the
    host's in the last bit of fp32; sums are float64 throughout.
    """

    def __init__(self, device: str | torch.device = "cuda", *, cuda: Any = torch.cuda) -> None:
        """Merge on ``device``; ``ValueError`` where PyTorch sees no CUDA device.

        ``cuda`` is ``torch.cuda`` or stands in for it.
        """
        super().__init__()
        if not cuda.is_available():
            raise ValueError(f"cannot merge on {str(device)!r}: PyTorch sees no CUDA device here")
        found = torch.device(device)
        # By its number: another thread may have another device as the current one.
        index = cuda.current_device() if found.index is None else found.index
        self._device = torch.device(found.type, index)
        self._cuda = cuda
        self._stream = cuda.Stream(self._device)
        self._host = TorchBackend()

    @override
    def dot(self, x: Tensor, y: Tensor) -> float:
        """``Σ x·y`` in float64."""
        (total,) = self._sums((x,), ((0, 0),)) if x is y else self._sums((x, y), ((0, 1),))
        return total

    @override
    def sum_of_products(self, x: Tensor, y: Tensor) -> float:
        """``Σ x·y`` in float64."""
        return self.dot(x, y)

    @override
    def subtract_squares(self, left: Tensor, right: Tensor, out: Tensor) -> float:
        """``subtract``, on the host, and ``sum_of_squares`` of the result."""
        self.subtract(left, right, out)
        return self.sum_of_squares(out)

    @override
    def dot_squares(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """``dot`` of both and ``sum_of_squares`` of ``y``; each is moved once."""
        dot, square = self._sums((x, y), ((0, 1), (1, 1)))
        return (dot if math.isfinite(square) else math.nan), square

    @override
    def accumulate(self, out: Tensor, x: Tensor, *, keep: float, scale: float) -> None:
        """``out = keep·out + scale·x``, each product rounded to fp32 before the sum."""
        keeps, scales = factors(keep), factors(scale)

        def there(o: Tensor, v: Tensor) -> Found:
            new = self._product(v, scales)
            if keep:
                old = self._product(o, keeps)
                new = old.add_(new) if scale else old
            o.copy_(new, non_blocking=True)
            return []

        def here(o: Tensor, v: Tensor) -> Found:
            self._host.accumulate(o, v, keep=keep, scale=scale)
            return []

        self._in_pieces(there, here, out, x)

    @override
    def combine(self, delta: Combination, out: Tensor) -> None:
        """``out = Σ cᵢ·xᵢ``, each product rounded to fp32 before the sum."""
        scales = [scale for scale, _ in delta]

        def there(o: Tensor, *terms: Tensor) -> Found:
            o.copy_(self._combined(scales, terms, o), non_blocking=True)
            return []

        def here(o: Tensor, *terms: Tensor) -> Found:
            self._host.combine(tuple(zip(scales, terms, strict=True)), o)
            return []

        self._in_pieces(there, here, out, *(x for _, x in delta))

    @override
    def nesterov(
        self,
        delta: Combination,
        momentum: Tensor | None,
        master: Tensor,
        *,
        beta: float,
        lr: float,
        new_momentum: Tensor,
        new_master: Tensor,
    ) -> bool:
        """``m' = β·m + Δ`` and ``master' = master − lr·(Δ + β·m')``; each is moved once."""
        scales = [scale for scale, _ in delta]

        def there(m: Tensor, base: Tensor, new_m: Tensor, new: Tensor, *terms: Tensor) -> Found:
            step = self._combined(scales, terms, new)
            moved = step if momentum is None else step.add(self._there(m), alpha=beta)
            result = self._there(base).float().add_(step.add(moved, alpha=beta), alpha=-lr)
            finite = result.isfinite().all().view(1)
            new_m.copy_(moved, non_blocking=True)
            new.copy_(result, non_blocking=True)
            return finite

        def here(m: Tensor, base: Tensor, new_m: Tensor, new: Tensor, *terms: Tensor) -> Found:
            finite = self._host.nesterov(
                tuple(zip(scales, terms, strict=True)),
                None if momentum is None else m,
                base,
                beta=beta,
                lr=lr,
                new_momentum=new_m,
                new_master=new,
            )
            return [finite]

        old = new_momentum if momentum is None else momentum
        arrays = (old, master, new_momentum, new_master, *(x for _, x in delta))
        return all(finite for (finite,) in self._in_pieces(there, here, *arrays))

    def _sums(self, arrays: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> list[float]:
        """``Σ x·y`` for ``pairs`` of places in ``arrays``; each is moved once."""

        def there(*parts: Tensor) -> Found:
            moved = [self._there(part).double() for part in parts]
            return torch.stack([(moved[i] * moved[j]).sum() for i, j in pairs])

        def here(*parts: Tensor) -> Found:
            return [exact_dot(parts[i], parts[j]) for i, j in pairs]

        found = self._in_pieces(there, here, *arrays)
        return [sum(total) for total in zip([0.0] * len(pairs), *found, strict=True)]

    def _in_pieces(
        self, there: Callable[..., Found], here: Callable[..., Found], *arrays: Tensor
    ) -> list[list[float]]:
        """``there`` with each piece of ``arrays``, or ``here`` if the device has no room for it.

        What they return, and all that they write, is in host memory when this returns. ``there``
        writes nothing before all of its piece is computed.
        """
        found: list[Found] = []
        done = self._cuda.Event(blocking=True)  # whoever waits does not spin
        with self._cuda.device(self._device), self._cuda.stream(self._stream):
            try:
                for parts in chunks(*arrays, size=PIECE):
                    try:
                        found.append(there(*parts))
                    except self._cuda.OutOfMemoryError:
                        found.append(here(*parts))
            finally:  # copies under way write into memory that others get when an error is told
                done.record(self._stream)
                done.synchronize()
            # On this stream, too: on the training's a read would wait for the training.
            return [one if isinstance(one, list) else one.tolist() for one in found]

    def _there(self, x: Tensor) -> Tensor:
        """A copy on the device."""
        return torch.empty_like(x, device=self._device).copy_(x, non_blocking=True)

    def _product(self, x: Tensor, scales: Sequence[Tensor]) -> Tensor:
        """``x`` times all ``scales``, on the device in F32."""
        product = self._there(x).float()
        for scale in scales:
            product.mul_(scale)
        return product

    def _combined(self, scales: Sequence[float], terms: Sequence[Tensor], like: Tensor) -> Tensor:
        """``Σ cᵢ·xᵢ`` on the device, of the size of ``like``."""
        products = (self._product(x, factors(c)) for c, x in zip(scales, terms, strict=True))
        total = next(products, None)
        if total is None:
            return torch.zeros_like(like, device=self._device)
        for product in products:
            total.add_(product)
        return total
