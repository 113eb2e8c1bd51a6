"""How the contributions to a round become one delta (decoupled DiLoCo, arXiv 2604.21428).

A contribution's weight is ``w = tokens² / steps``. Per tensor, norms Euclidean and float64:

* weighted mean: ``Δ = Σ wᵢ·vᵢ / Σ wᵢ``
* RDA: ``Δ = (Σ wᵢ‖vᵢ‖ / Σ wᵢ) · φ(Σ wᵢ·φ(vᵢ) / Σ wᵢ)`` with ``φ(x) = x / max(‖x‖, 1e-12)``

Both are linear in the tensors once the norms are known, so a contribution is folded in when it
arrives and let go. Written with ``pᵢ = wᵢ / Σ wᵢ``, ``αᵢ = pᵢ / max(‖vᵢ‖, 1e-12)`` and
``S = Σ αᵢ·vᵢ``, RDA is ``Δ = (Σ pᵢ‖vᵢ‖ / max(‖S‖, 1e-12)) · S``.

``S`` is summed in fp32. When its length is within that sum's rounding, the directions cancel and
it counts as zero: ``φ`` would otherwise blow the noise up to full length.

The record's ``cosine`` is the mean over pairs of the cosine between whole fragments. With ``uᵢ``
the unit vectors (zero for a zero vector), ``k`` of them not zero, and ``U = Σ uᵢ``, that is
``(‖U‖² − k) / (n(n−1))``.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradientmail.algorithm.diloco import Rda, WeightedMean
from gradientmail.algorithm.precision import Take, fp32_array
from gradientmail.backend.base import Array, Backend, Combination
from gradientmail.schema import TensorSpec

EPSILON = 1e-12
"""``φ`` divides by no less than this."""

NOISE = 2.0**-23
"""Rounding of an fp32 sum of ``n`` unit vectors, a term: ``(n + 1)·NOISE`` bounds all of it."""

WEIGHTS = (1e-100, 1e100)
"""The least and the largest weight; ``tokens² / steps`` of 64-bit counts lies well within."""

LARGE = 2**15
"""Elements from which on the cosine takes a tensor's float64 sums instead of fp32 ones."""

KEPT = 2
"""Contributions that are kept as they came."""

type SumIn = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Given the first contribution's arrays, the F32 ones to sum in."""

CANCELLING = 0.5
"""Below this share of the largest possible ``‖S‖`` its square is not taken from a dot product."""


def contribution_weight(tokens: int, steps: int) -> float:
    """``tokens² / steps``; 0 for a contribution that counts nothing."""
    return tokens * tokens / steps if steps > 0 and tokens > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Merged:
    """What the contributions so far come to.

    ``deltas`` refers to the fold's arrays: it is good until the next ``add``.
    ``cosine`` is None with fewer than two contributions.
    """

    deltas: Mapping[str, Combination]
    cosine: float | None


class Measured(NamedTuple):
    """Of one contribution, by name: ``Σ x²``, and for the second one ``Σ x·y`` with the first."""

    squares: Mapping[str, float]
    dots: Mapping[str, float]
    whole_square: float = 0.0
    """``Σ x²`` over all tensors as the cosine of two contributions has it; 0 among more."""
    whole_dot: float = 0.0


@dataclass(frozen=True, slots=True)
class _Contribution:
    """One of the first two, kept as it came."""

    arrays: Mapping[str, Array]
    weight: float
    norms: Mapping[str, float]
    whole_square: float


class Fold:
    """The contributions to one round of one fragment, folded into one delta as they arrive.

    The first two are kept as they came, and their merge is a combination of their own arrays. More
    move all into two accumulators, so memory does not grow with the number that follow. Equal
    contributions in the same order give equal bytes, unless two were summed for a third that came
    to nothing.
    Not safe to use from several threads at once.
    """

    def __init__(
        self,
        merge: Rda | WeightedMean,
        specs: Sequence[TensorSpec],
        backend: Backend,
        take: Take,
        *,
        averaged: Container[str] = (),
    ) -> None:
        """Fold contributions to ``specs``, in buffers of ``take``.

        The tensors named in ``averaged`` take the weighted mean whatever ``merge`` is.
        """
        self._specs = tuple(specs)
        self._backend = backend
        self._take = take
        self._direct = {
            spec.name: spec.name in averaged or _is_direct(merge, spec.name) for spec in self._specs
        }
        self._kept: list[_Contribution] = []
        self._dots: Mapping[str, float] = {}
        self._whole_dot = 0.0
        self._sums: _Sums | None = None
        self.count = 0

    def add(
        self, arrays: Mapping[str, Array], weight: float, measured: Measured | None = None
    ) -> bool:
        """Fold in one contribution: F32, F16 or BF16 arrays by name, and its weight.

        The arrays of the first two are held and only read; later ones are free afterwards.
        ``measured`` is what ``measure`` gave for them since the last ``add``.
        False, changing nothing, when a value is NaN or infinite. ``ValueError`` for a weight
        out of ``WEIGHTS``.
        """
        if not WEIGHTS[0] <= weight <= WEIGHTS[1]:
            raise ValueError(
                f"a contribution's weight must be positive, {WEIGHTS[0]:g} to {WEIGHTS[1]:g}, "
                f"not {weight!r}"
            )
        if measured is None:
            measured = self.measure(arrays)
        squares = measured.squares
        if not all(map(math.isfinite, squares.values())):
            return False
        norms = {name: math.sqrt(square) for name, square in squares.items()}
        new = _Contribution(arrays, weight, norms, measured.whole_square)
        if self.keeps_next:
            self._dots, self._whole_dot = measured.dots, measured.whole_dot
            self._kept.append(new)
        else:
            self._summed_up().add(new)
        self.count += 1
        return True

    def measure(
        self, arrays: Mapping[str, Array], squares: Mapping[str, float] | None = None
    ) -> Measured:
        """What ``add`` has to know of a contribution; nothing is changed.

        ``squares`` are the sums of squares by name, from whoever has computed them already.
        """
        names, backend = [spec.name for spec in self._specs], self._backend
        if not (self._kept and self.keeps_next):
            if squares is None:
                squares = {name: backend.sum_of_squares(arrays[name]) for name in names}
            square = self._over_tensors(arrays, arrays, squares) if self.keeps_next else 0.0
            return Measured(squares, {}, square)
        first = self._kept[0].arrays
        if squares is None:
            both = {name: backend.dot_squares(first[name], arrays[name]) for name in names}
            dots = {name: dot for name, (dot, _) in both.items()}
            squares = {name: square for name, (_, square) in both.items()}
        else:
            dots = {name: backend.dot(first[name], arrays[name]) for name in names}
        square = self._over_tensors(arrays, arrays, squares)
        return Measured(squares, dots, square, self._over_tensors(first, arrays, dots))

    @property
    def keeps_next(self) -> bool:
        """Whether the next contribution is kept as it comes, which is no work."""
        return self._sums is None and self.count < KEPT

    @property
    def holds_contributions(self) -> bool:
        """Whether arrays that were added are still needed."""
        return bool(self._kept)

    @property
    def sums_too_few(self) -> bool:
        """Whether those are summed that would be kept as they came, had no more been fetched."""
        return self._sums is not None and self.count <= KEPT

    def sum_up(self, sum_in: SumIn | None = None) -> None:
        """Sum what is kept, so that it is free before more is fetched; ``add`` does it at last.

        ``sum_in`` is given the first contribution's arrays, and gives F32 ones to sum in; those
        very ones if they may be written over.
        """
        self._summed_up(sum_in)

    def merged(self) -> Merged:
        """The merge of what was added so far; ``ValueError`` when that is nothing."""
        if not self.count:
            raise ValueError("there is no contribution to merge")
        if self._sums is not None:
            return self._sums.merged(self.count)
        total = sum(kept.weight for kept in self._kept)
        shares = [kept.weight / total for kept in self._kept]
        deltas = {spec.name: self._combination(spec, shares) for spec in self._specs}
        if self.count == 1:
            return Merged(deltas, None)
        return Merged(deltas, self._pair_cosine())

    def finish(self) -> Merged:
        """``merged``, and the fold is empty: what only more contributions would need is let go."""
        merged = self.merged()
        self._kept.clear()
        self._sums, self.count = None, 0
        return merged

    def _pair_cosine(self) -> float:
        """The cosine of the two contributions, 0 if one is zero."""
        length = math.prod(math.sqrt(kept.whole_square) for kept in self._kept)
        return min(max(self._whole_dot / length, -1.0), 1.0) if length else 0.0

    def _over_tensors(
        self, x: Mapping[str, Array], y: Mapping[str, Array], exact: Mapping[str, float]
    ) -> float:
        """``Σ x·y`` over all tensors; ``exact`` has each one's, which serves for large ones.

        As the published version has it, to the last bit for small tensors: a tensor's products are
        summed in fp32, and the tensors' sums in float64.
        """
        return sum(
            exact[spec.name]
            if spec.count >= LARGE
            else self._backend.sum_of_products(x[spec.name], y[spec.name])
            for spec in self._specs
        )

    def _summed_up(self, sum_in: SumIn | None = None) -> "_Sums":
        if self._sums is None:
            totals = self._fresh() if sum_in is None else sum_in(self._kept[0].arrays)
            self._sums = _Sums(self._direct, self._backend, totals, self._fresh())
            for kept in self._kept:
                self._sums.add(kept)
            self._kept.clear()
        return self._sums

    def _fresh(self) -> Mapping[str, Array]:
        return {spec.name: fp32_array(self._backend, spec, self._take) for spec in self._specs}

    def _combination(self, spec: TensorSpec, shares: list[float]) -> Combination:
        """The merge of one tensor of the one or two contributions kept."""
        name = spec.name
        norms = [kept.norms[name] for kept in self._kept]
        arrays = [kept.arrays[name] for kept in self._kept]
        radius = sum(share * norm for share, norm in zip(shares, norms, strict=True))
        headroom = _headroom(radius, self.count)
        if self._direct[name]:
            return _terms([share * headroom for share in shares], norms, arrays)
        scales = [share / max(norm, EPSILON) for share, norm in zip(shares, norms, strict=True)]
        lengths = [scale * norm for scale, norm in zip(scales, norms, strict=True)]
        square = sum(length**2 for length in lengths)
        if len(scales) > 1:
            square += 2.0 * scales[0] * scales[1] * self._dots[name]
        if square < (CANCELLING * sum(lengths)) ** 2:
            return self._cancelling(spec, _terms(scales, norms, arrays), radius, sum(lengths))
        gain = radius * headroom / max(math.sqrt(square), EPSILON)
        return _terms([scale * gain for scale in scales], norms, arrays)

    def _cancelling(
        self, spec: TensorSpec, terms: Combination, radius: float, most: float
    ) -> Combination:
        """Two nearly opposite directions: sum them once, and measure what is left."""
        total = fp32_array(self._backend, spec, self._take)
        self._backend.combine(terms, total)
        norm = math.sqrt(self._backend.sum_of_squares(total))
        return _directed(total, norm, radius, most, count=2)


class _Sums:
    """Three contributions or more: for each tensor what they sum to, and nothing of their own.

    Coefficients are shares ``w / reference``, the reference being a power of two, two to four
    times all weights so far. So sums of the largest values do not overflow, and rescaling is exact.
    """

    def __init__(
        self,
        direct: Mapping[str, bool],
        backend: Backend,
        totals: Mapping[str, Array],
        units: Mapping[str, Array],
    ) -> None:
        """``totals`` may be those of what is added first, ``units`` are other memory."""
        self._direct = direct
        self._backend = backend
        self._totals = totals
        self._units = units
        self._weight = self._reference = 0.0
        # Σ (w / reference)·‖v‖ and Σ (w / reference)·‖φ(v)‖ of each tensor.
        self._radii = dict.fromkeys(self._totals, 0.0)
        self._most = dict.fromkeys(self._totals, 0.0)
        self._count = self._nonzero = 0

    def add(self, new: _Contribution) -> None:
        self._weight += new.weight
        reference = math.ldexp(2.0, math.frexp(self._weight)[1])
        keep = self._reference / reference
        self._reference, share = reference, new.weight / reference
        length = math.sqrt(math.fsum(norm**2 for norm in new.norms.values()))
        for name, norm in new.norms.items():
            unit = max(norm, EPSILON)
            self._radii[name] = self._radii[name] * keep + share * norm
            self._most[name] = self._most[name] * keep + share * (norm / unit)
            scale = share if self._direct[name] else share / unit
            # The total last: the first contribution may be summed where it lies.
            for out, kept, factor in (
                (self._units[name], float(self._count > 0), 1.0 / length if norm else 0.0),
                (self._totals[name], keep, scale if norm else 0.0),
            ):
                self._backend.accumulate(out, new.arrays[name], keep=kept, scale=factor)
        self._count += 1
        self._nonzero += length > 0.0

    def merged(self, count: int) -> Merged:
        deltas = {name: self._combination(name, count) for name in self._totals}
        square = math.fsum(map(self._backend.sum_of_squares, self._units.values()))
        if count < 2:
            return Merged(deltas, None)
        cosine = (square - self._nonzero) / (count * (count - 1))
        return Merged(deltas, min(max(cosine, -1.0), 1.0))

    def _combination(self, name: str, count: int) -> Combination:
        total, back = self._totals[name], self._reference / self._weight
        radius, most = self._radii[name] * back, self._most[name] * back
        if self._direct[name]:
            return ((back * _headroom(radius, count), total),)
        norm = math.sqrt(self._backend.sum_of_squares(total)) * back
        return _directed(total, norm, radius, most, count, back)


def _is_direct(merge: Rda | WeightedMean, name: str) -> bool:
    return isinstance(merge, WeightedMean) or merge.direct_pattern in name.lower()


def _terms(scales: Sequence[float], norms: Sequence[float], arrays: Sequence[Array]) -> Combination:
    """The combination without the tensors that are zero."""
    terms = zip(scales, norms, arrays, strict=True)
    return tuple((scale, array) for scale, norm, array in terms if norm)


def _directed(
    total: Array, norm: float, radius: float, most: float, count: int, back: float = 1.0
) -> Combination:
    """``radius·φ(S)`` for ``S = back·total`` of length ``norm``; zero when that is rounding.

    ``most`` is the length that S would have if all directions agreed.
    """
    if norm <= (count + 1) * NOISE * most:
        return ()
    gain = radius * _headroom(radius, count) / max(norm, EPSILON)
    return ((gain * back, total),)


def _headroom(radius: float, count: int) -> float:
    """What keeps rounding up from making an infinity of values at the end of fp32's range.

    No value of a merge is larger than ``radius``, so everywhere else it is 1.
    """
    return 1.0 if radius < 2.0**127 else 1.0 - (count + 4) * NOISE
