"""The outer step: a fragment's merged delta becomes its next version.

Nesterov momentum in fp32, as DiLoCo has it (arXiv 2311.08105; its defaults lr 0.7, momentum 0.9)::

    m ← β·m + Δ        master ← master − η·(Δ + β·m)

Deltas point from the anchor to the learner, with the sign of a gradient: ``anchor − θ``.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.precision import (
    LARGEST,
    Take,
    add_decoded,
    encode_difference,
    encode_tensors,
    fp32_array,
    largest,
)
from gradientmail.backend.base import Array, Backend, Combination
from gradientmail.schema import TensorSpec


@dataclass(frozen=True, slots=True)
class FragmentState:
    """A committed version of one fragment, by payload names.

    ``theta``: the parameters in their own dtypes. ``outer``: ``momentum.<name>`` and, where theta
    is not the master itself, ``master.<name>``; empty for Θ⁰ (zero momentum, theta the master).
    """

    theta: Mapping[str, Array]
    outer: Mapping[str, Array]

    def momentum(self, name: str) -> Array | None:
        """The fp32 momentum of a parameter, None for zero."""
        return self.outer.get(f"momentum.{name}")

    def master(self, name: str) -> Array:
        """The parameter as the outer step reads it: its fp32 master, or theta."""
        return self.outer.get(f"master.{name}", self.theta[name])

    def part(self, backend: Backend, name: str, start: int, stop: int) -> "FragmentState":
        """One parameter's elements from ``start`` to ``stop``, flat, in the same memory."""
        outer = (f"momentum.{name}", f"master.{name}")
        return FragmentState(
            {name: backend.part(self.theta[name], start, stop)},
            {key: backend.part(self.outer[key], start, stop) for key in outer if key in self.outer},
        )


@dataclass(frozen=True, slots=True)
class Transition:
    """From one committed version of a fragment to the next: what an outer step reads and writes.

    ``new.theta`` has the arrays of the fragment, ``new.outer`` those of ``outer_specs`` and
    ``update``, when commits carry one, those of ``update_specs``. With ``final`` the step is
    ``master − Δ`` and the momentum stays.

    Without ``final`` the new version may be written over what the step uses up: then ``new.outer``
    may be ``old.outer``, and ``new.theta`` the arrays of one contribution in ``deltas``. With
    ``final`` no array of ``old`` or ``deltas`` may be among the new ones.
    """

    old: FragmentState
    deltas: Mapping[str, Combination]
    new: FragmentState
    update: Mapping[str, Array]
    final: bool

    def part(self, backend: Backend, name: str, start: int, stop: int) -> "Transition":
        """Of one parameter's elements from ``start`` to ``stop``, flat, without an update."""
        delta = tuple((c, backend.part(x, start, stop)) for c, x in self.deltas[name])
        return Transition(
            self.old.part(backend, name, start, stop),
            {name: delta},
            self.new.part(backend, name, start, stop),
            {},
            self.final,
        )


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The outer optimizer of a run: learning rate η, momentum β, precision of its commits."""

    lr: float
    momentum: float
    commit_dtype: str | None

    def __call__(
        self, backend: Backend, specs: Sequence[TensorSpec], change: Transition, take: Take
    ) -> tuple[str, ...]:
        """Write the next version of the parameters ``specs`` of a fragment.

        ``move``, then ``follow``. Returns the names of the parameters that ran out of their dtype's
        range, and were held at its ends: no finite contribution makes a run's parameters infinite.
        """
        beyond = set(self.move(backend, specs, change))
        beyond |= set(self.follow(backend, specs, change, beyond=beyond, take=take))
        return tuple(spec.name for spec in specs if spec.name in beyond)

    def move(
        self, backend: Backend, specs: Sequence[TensorSpec], change: Transition
    ) -> tuple[str, ...]:
        """Write momentum and master of ``specs``, or of the part of each that ``change`` has.

        ``new.theta`` is written where it is the master. Returns the names of what was held at the
        ends of fp32.
        """
        beyond = []
        for spec in specs:
            step = self._final_step if change.final else self._nesterov_step
            if not step(backend, spec.name, change):
                backend.clamp(change.new.outer[f"momentum.{spec.name}"], LARGEST["F32"])
                backend.clamp(change.new.master(spec.name), LARGEST["F32"])
                beyond.append(spec.name)
        return tuple(beyond)

    def follow(
        self,
        backend: Backend,
        specs: Sequence[TensorSpec],
        change: Transition,
        *,
        beyond: Container[str],
        take: Take,
    ) -> tuple[str, ...]:
        """Write Θ, where that is not the master itself, and ``update``, when commits carry one.

        The masters of ``specs`` have moved, and ``beyond`` has those that were held. No array of
        ``old.theta`` may be among those written.
        Returns the names of what was held at the ends of its dtype, ``beyond`` included.
        """
        held = []
        new = change.new
        for spec in specs:
            if new.master(spec.name) is new.theta[spec.name]:
                continue
            if self.commit_dtype is not None:
                self._commit_update(backend, spec, change, take)
            else:
                backend.encode(new.master(spec.name), spec.dtype, new.theta[spec.name], None)
            # Theta is the master rounded, or moved by an update that may have saturated.
            if spec.name in beyond or not backend.is_finite(new.theta[spec.name]):
                self._hold(backend, spec, change, take)
                held.append(spec.name)
        return tuple(held)

    def _hold(self, backend: Backend, spec: TensorSpec, change: Transition, take: Take) -> None:
        """Hold update and theta at the largest finite value where they went beyond it.

        Who rebuilds such a theta from the update gets another digest, and fetches it.
        """
        old, new = change.old, change.new
        if self.commit_dtype is not None:
            difference = fp32_array(backend, spec, take)
            backend.subtract(new.master(spec.name), old.theta[spec.name], difference)
            backend.clamp(difference, largest(self.commit_dtype))
            named = {spec.name: difference}
            encode_tensors(backend, named, [spec], self.commit_dtype, change.update)
            self._apply(backend, spec, change, take)
        backend.clamp(new.theta[spec.name], LARGEST[spec.dtype])

    def _nesterov_step(self, backend: Backend, name: str, change: Transition) -> bool:
        """Whether the master came out finite. A momentum that is not makes it so, too."""
        return backend.nesterov(
            change.deltas[name],
            change.old.momentum(name),
            change.old.master(name),
            beta=self.momentum,
            lr=self.lr,
            new_momentum=change.new.outer[f"momentum.{name}"],
            new_master=change.new.master(name),
        )

    def _final_step(self, backend: Backend, name: str, change: Transition) -> bool:
        momentum, kept = change.new.outer[f"momentum.{name}"], change.old.momentum(name)
        backend.combine(change.deltas[name], momentum)
        backend.subtract(change.old.master(name), momentum, change.new.master(name))
        backend.combine(() if kept is None else ((1.0, kept),), momentum)
        return backend.is_finite(change.new.master(name))

    def _commit_update(
        self, backend: Backend, spec: TensorSpec, change: Transition, take: Take
    ) -> None:
        """Θ becomes what a holder of the old Θ rebuilds; what rounding lost stays in the master."""
        master = {spec.name: change.new.master(spec.name)}
        encode_difference(
            backend, master, change.old.theta, [spec], self.commit_dtype, change.update, take
        )
        self._apply(backend, spec, change, take)

    def _apply(self, backend: Backend, spec: TensorSpec, change: Transition, take: Take) -> None:
        old, new = change.old.theta, change.new.theta
        apply_update(backend, [spec], old, change.update, self.commit_dtype, new, take)


def outer_steps(
    algorithm: DiLoCo, specs: Sequence[TensorSpec], averaged: Container[str]
) -> list[tuple[OuterStep, list[TensorSpec]]]:
    """The outer step of a run's parameters, and that of its buffers, with the ``specs`` of each.

    Buffers are statistics, not trained: they become their weighted mean (η = 1, β = 0). Momentum
    would carry a running variance past zero.
    """
    mean = OuterStep(1.0, 0.0, algorithm.commit_dtype)
    trained = OuterStep(algorithm.outer_lr, algorithm.outer_momentum, algorithm.commit_dtype)
    return [
        (trained, [spec for spec in specs if spec.name not in averaged]),
        (mean, [spec for spec in specs if spec.name in averaged]),
    ]


def apply_update(
    backend: Backend,
    specs: Sequence[TensorSpec],
    theta: Mapping[str, Array],
    update: Mapping[str, Array],
    commit_dtype: str | None,
    out: Mapping[str, Array],
    take: Take,
) -> None:
    """``Θ_new = Θ_old + decoded update`` in the parameters' dtypes, equal bytes on every node."""
    add_decoded(backend, theta, update, commit_dtype, specs, out, take)
