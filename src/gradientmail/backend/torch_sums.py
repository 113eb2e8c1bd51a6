"""Sums over CPU tensors in float64; of large ones, rows in fp32 first where that loses nothing."""

import math

from gradientmail.backend.torch_chunks import Tensor, chunks, pieces, scratch, torch

ROW = 256
"""Products over a large tensor that are summed in fp32 before the sum goes on in float64. The error
of the whole is 1e-10 to 1e-8, and up to 3e-7 for equal values, whose sums all round one way."""

NORM = 64
"""Elements of a large tensor whose norm is taken in fp32. Their squares add up as exactly as that:
PyTorch has no more than eight elements of each summed one after the other."""

ROWS_FROM = 2**16
"""Tensors of fewer elements are summed in float64 throughout."""


class RowSums:
    """``Σ x·y`` over pieces of large tensors: each row in fp32, their sum in float64."""

    def __init__(self, like: Tensor, size: int, *, squares: bool = False) -> None:
        """With ``squares`` y is x: norms of rows take one pass, and no products are written."""
        self._product = None if squares else scratch(like, size=size)
        self._row = NORM if squares else ROW
        self._rows = torch.empty(like.numel() // self._row, dtype=torch.float32, device="cpu")
        self._parts = iter(pieces(self._rows, size // self._row))
        self._count, self._tail = like.numel(), 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in the next piece of both, F32."""
        whole = x.numel() // self._row * self._row
        if whole < x.numel():  # the last piece has less than a row left
            self._tail += exact_dot(x[whole:], y[whole:])
            x, y = x[:whole], y[:whole]
        if not whole:
            return
        product = self._product
        if product is None:
            torch.linalg.vector_norm(x.view(-1, NORM), dim=1, out=next(self._parts))
            return
        if whole < product.numel():
            product = product[:whole]
        torch.sum(torch.mul(x, y, out=product).view(-1, ROW), dim=1, out=next(self._parts))

    def total(self) -> float | None:
        """The sum; None when overflow or underflow in fp32 can matter in it.

        Underflow loses less than 2e-38 an element, so a larger sum has lost no digit that counts.
        """
        rows = (part.double() for part in pieces(self._rows))
        if self._product is None:
            rows = map(torch.square, rows)
        total = self._tail + sum(float(part.sum()) for part in rows)
        return total if math.isfinite(total) and abs(total) > 1e-28 * self._count else None


def exact_dot(x: Tensor, y: Tensor) -> float:
    """``Σ x·y`` in float64."""
    total = 0.0
    for a, b in chunks(x, y):
        left = a.double()
        total += float((left * (left if x is y else b.double())).sum())
    return total
