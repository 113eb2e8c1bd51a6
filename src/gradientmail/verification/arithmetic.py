"""The numbers of a commit, computed again with any backend and compared.

Backends and the order of contributions may differ in the last bits, so values are compared by the
length of their difference. Where bytes must be equal (theta from its master, or rebuilt from an
update) they are compared as bytes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from gradientmail.algorithm.merge import Fold, contribution_weight
from gradientmail.algorithm.outer import FragmentState, Transition, apply_update, outer_steps
from gradientmail.algorithm.precision import (
    LARGEST,
    decode_tensors,
    encode_tensors,
    fp32_array,
    largest,
    update_specs,
)
from gradientmail.backend.base import Array, Backend
from gradientmail.exchange.payload import PayloadLayout, sha256_hex
from gradientmail.exchange.records import SnapshotRecord
from gradientmail.exchange.sealing import Payload
from gradientmail.run import Fragment, Run, arrays_over, payload_arrays
from gradientmail.schema import TensorSpec
from gradientmail.verification.reading import memory

ROUNDING = 2.0**-21
"""Relative error allowed to a few fp32 operations."""
MERGING = 1e-4
"""The same for a merge, whose contributions may have been summed in another order."""
BEYOND = 1.0 + 2.0**-23
"""Times the largest fp32 value, this is an infinity; times any but it and the next one, none."""


@dataclass(frozen=True, slots=True)
class State:
    """A committed version of one fragment."""

    version: int
    theta: Payload
    outer: Payload | None
    """None for Θ⁰: zero momentum, theta is the master."""

    def arrays(self, backend: Backend) -> FragmentState:
        """As the outer step reads it."""
        outer = {} if self.outer is None else payload_arrays(backend, self.outer)
        return FragmentState(payload_arrays(backend, self.theta), outer)


COSINE = 1e-3
"""How far a record's cosine may be from the one computed again: others sum in another order."""


def cosine_fault(told: float | None, fold: Fold) -> str:
    """How a record's cosine differs from that of the contributions, if it does."""
    found = fold.merged().cosine
    if told is None or found is None or abs(told - found) <= COSINE:
        return ""
    return f"cosine {told:.6f}, and that of the deltas that it lists is {found:.6f}"


class Arithmetic:
    """Computes commits of one run again."""

    def __init__(self, run: Run, backend: Backend) -> None:
        """``backend`` need not be the one that the commits were made with."""
        self._run = run
        self._backend = backend
        options = run.algorithm
        self._gain = max(1.0, (1 + options.outer_momentum) * options.outer_lr)
        """How far a step may move, in merged deltas of the same round."""

    # The whole step, where the deltas are still there

    def fold(self, fragment: Fragment) -> Fold:
        """An empty sum of contributions."""
        return Fold(
            self._run.algorithm.merge,
            fragment.specs,
            self._backend,
            memory,
            averaged=self._run.averaged,
        )

    def add(self, fold: Fold, fragment: Fragment, record: SnapshotRecord, delta: Payload) -> bool:
        """Fold one contribution in; False for one that counts nothing or is not finite."""
        weight = contribution_weight(record.tokens, record.steps)
        dtype = self._run.algorithm.delta_dtype
        arrays = payload_arrays(self._backend, delta)
        blank = partial(fp32_array, self._backend, take=memory)
        decoded = decode_tensors(self._backend, arrays, dtype, fragment.specs, blank)
        return weight > 0 and fold.add(decoded, weight)

    def step_faults(
        self, fragment: Fragment, old: State, new: State, fold: Fold, *, final: bool
    ) -> Iterator[str]:
        """How ``new`` differs from the outer step on ``old`` and exactly these contributions."""
        before, after = old.arrays(self._backend), new.arrays(self._backend)
        expected = self._stepped(fragment, before, fold, final=final)
        for spec in fragment.specs:
            apart = self._apart(spec, before, after, expected, MERGING)
            if apart is not None:
                yield f"{spec.name}: {apart} from the outer step on the deltas that it lists"

    def _stepped(
        self, fragment: Fragment, old: FragmentState, fold: Fold, *, final: bool
    ) -> FragmentState:
        def blank(one: PayloadLayout) -> dict[str, Array]:
            return arrays_over(self._backend, one.blank(memory), one)

        update = {} if fragment.update is None else blank(fragment.update)
        new = FragmentState(blank(fragment.theta), blank(fragment.outer))
        change = Transition(old, fold.merged().deltas, new, update, final)
        for step, specs in outer_steps(self._run.algorithm, fragment.specs, self._run.averaged):
            step(self._backend, specs, change, memory)
        return new

    # What old and new state show without the deltas

    def trace_faults(self, fragment: Fragment, old: State, new: State) -> Iterator[str]:
        """How ``new`` contradicts ``old`` whatever the deltas were.

        The merged delta is what the momentum took in, ``Δ = m' − β·m``, and leads from the old
        master to the new one; only in a final round the momentum stays as it was, and any Δ may.
        A tensor that was held at the ends of fp32 does not show where it would have gone.
        """
        backend = self._backend
        before, after = old.arrays(backend), new.arrays(backend)
        if all(self._kept(before, after, spec) for spec in fragment.specs):
            return  # a final round, or one whose deltas were zero
        steps = outer_steps(self._run.algorithm, fragment.specs, self._run.averaged)
        for outer, spec in ((outer, spec) for outer, specs in steps for spec in specs):
            taken, kept = after.momentum(spec.name), before.momentum(spec.name)
            if self._held(spec, taken) or self._held(spec, after.master(spec.name)):
                continue
            delta = [(1.0, taken)] + ([] if kept is None else [(-outer.momentum, kept)])
            merged = fp32_array(backend, spec, memory)
            backend.combine(delta, merged)
            expected = FragmentState(
                {spec.name: fp32_array(backend, spec, memory)},
                {f"momentum.{spec.name}": fp32_array(backend, spec, memory)},
            )
            backend.nesterov(
                ((1.0, merged),),
                kept,
                before.master(spec.name),
                beta=outer.momentum,
                lr=outer.lr,
                new_momentum=expected.outer[f"momentum.{spec.name}"],
                new_master=expected.theta[spec.name],
            )
            apart = self._apart(spec, before, after, expected, ROUNDING)
            if apart is not None:
                yield f"{spec.name}: {apart} from where the momentum says that it went"

    def _kept(self, before: FragmentState, after: FragmentState, spec: TensorSpec) -> bool:
        taken, kept = after.momentum(spec.name), before.momentum(spec.name)
        if kept is None:
            return self._backend.sum_of_squares(taken) == 0.0
        return self._distance(spec, taken, kept) == 0.0

    def _held(self, spec: TensorSpec, x: Array) -> bool:
        """Whether a value of the F32 ``x`` lies at the end of its range."""
        further = fp32_array(self._backend, spec, memory)
        self._backend.combine(((BEYOND, x),), further)
        return not self._backend.is_finite(further)

    def _apart(
        self,
        spec: TensorSpec,
        before: FragmentState,
        after: FragmentState,
        expected: FragmentState,
        rounding: float,
    ) -> str | None:
        """How far momentum or master is from what is expected, None when that is rounding.

        Neither is compared where a length overflows.
        """
        name = spec.name
        moved, goal = after.momentum(name), expected.momentum(name)
        kept = before.momentum(name)
        force = self._length(moved) + self._length(goal) + self._length(kept)
        place = self._length(before.master(name)) + self._length(after.master(name))
        checks = (
            ("momentum", moved, goal, rounding * force),
            (
                "master",
                after.master(name),
                expected.master(name),
                rounding * self._gain * force + ROUNDING * place,
            ),
        )
        for what, found, wanted, allowed in checks:
            distance = self._distance(spec, found, wanted)
            if math.isfinite(allowed) and not distance <= allowed:
                return f"{what} is {distance:.3g} (rounding: {allowed:.3g})"
        return None

    def _length(self, x: Array | None) -> float:
        return 0.0 if x is None else math.sqrt(self._backend.sum_of_squares(x))

    def _distance(self, spec: TensorSpec, x: Array, y: Array) -> float:
        difference = fp32_array(self._backend, spec, memory)
        self._backend.subtract(x, y, difference)
        return self._length(difference)

    # What must be equal to the byte

    def theta_faults(
        self, fragment: Fragment, old: State | None, new: State, update: Payload | None, digest: str
    ) -> Iterator[str]:
        """Where theta is not its master rounded, or not what ``update`` makes of the old theta.

        Either is held at the ends of its dtype, as a closer does, where it lies beyond and theta
        does not. ``digest`` is the record's, of theta.
        """
        backend = self._backend
        buffer = fragment.theta.blank(memory)
        theta = arrays_over(backend, buffer, fragment.theta)
        if update is None:
            outer = new.arrays(backend)
            for spec in fragment.specs:
                backend.encode(outer.master(spec.name), spec.dtype, theta[spec.name], None)
        elif old is not None:
            dtype = self._run.algorithm.commit_dtype
            arrays = payload_arrays(backend, update)
            before = payload_arrays(backend, old.theta)
            apply_update(backend, fragment.specs, before, arrays, dtype, theta, memory)
            yield from self._update_faults(fragment, old, new, update)
        else:  # the digest is all that can be told
            if sha256_hex(new.theta.buffer) != digest:
                yield "the recorded digest is another theta's"
            return
        self._hold(fragment, theta, payload_arrays(backend, new.theta))
        if update is not None and sha256_hex(buffer) != digest:
            yield "the update does not lead to the theta whose digest is recorded"
        for name, slot in fragment.theta.slots.items():
            if new.theta.data(name) != buffer[slot.start : slot.stop]:
                yield f"{name}: theta is not what {'the update' if update else 'its master'} gives"

    def _update_faults(
        self, fragment: Fragment, old: State, new: State, update: Payload
    ) -> Iterator[str]:
        """Where ``update`` is not the way from the old theta to the new master, rounded once.

        One that was held at the ends of its format's range is that way as far as it goes.
        """
        dtype = self._run.algorithm.commit_dtype
        assert dtype is not None  # noqa: S101
        before, after = old.arrays(self._backend), new.arrays(self._backend)
        for spec in fragment.specs:
            way = fp32_array(self._backend, spec, memory)
            self._backend.subtract(after.master(spec.name), before.theta[spec.name], way)
            for limit in (LARGEST["F32"], largest(dtype)):
                self._backend.clamp(way, limit)
                if self._is_encoded(spec, way, dtype, update):
                    break
            else:
                yield f"{spec.name}: the update is not what leads to the master"

    def _is_encoded(self, spec: TensorSpec, way: Array, dtype: str, update: Payload) -> bool:
        layout = PayloadLayout(update_specs([spec], dtype))
        buffer = layout.blank(memory)
        out = arrays_over(self._backend, buffer, layout)
        encode_tensors(self._backend, {spec.name: way}, [spec], dtype, out)
        return all(
            update.data(name) == buffer[slot.start : slot.stop]
            for name, slot in layout.slots.items()
        )

    def _hold(
        self, fragment: Fragment, theta: Mapping[str, Array], found: Mapping[str, Array]
    ) -> None:
        """Hold what is not finite in ``theta`` at the ends of its dtype, if ``found`` is finite."""
        for spec in fragment.specs:
            finite = self._backend.is_finite
            if not finite(theta[spec.name]) and finite(found[spec.name]):
                self._backend.clamp(theta[spec.name], LARGEST[spec.dtype])
