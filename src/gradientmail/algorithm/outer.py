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


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The outer optimizer of a run: learning rate η, momentum β, precision of its commits."""

    lr: float
    momentum: float
    commit_dtype: str | None

    def __call__(
        self,
        backend: Backend,
        specs: Sequence[TensorSpec],
        old: FragmentState,
        deltas: Mapping[str, Combination],
        *,
        new: FragmentState,
        update: Mapping[str, Array],
        final: bool,
        take: Take,
    ) -> tuple[str, ...]:
        """Write the next version of the fragment ``specs`` into the arrays of ``new``.

        Returns the names of the parameters that ran out of their dtype's range, and were held at
        its ends: no finite contribution makes a run's parameters infinite.

        ``new.theta`` has the arrays of ``theta_specs``, ``new.outer`` those of ``outer_specs``;
        ``update`` those of ``update_specs``, none without a ``commit_dtype``. With ``final`` the
        step is ``master − Δ`` and the momentum stays.

        Without ``final`` it may be written over what it uses up: then ``new.outer`` may be
        ``old.outer``, and ``new.theta`` the arrays of one contribution in ``deltas``. With
        ``final`` no array of ``old`` or ``deltas`` may be among the new ones.
        """
        overflowed = []
        for spec in specs:
            step = self._final_step if final else self._nesterov_step
            in_range = step(backend, spec.name, old, deltas[spec.name], new)
            if self.commit_dtype is not None:
                self._commit_update(backend, spec, old, new, update, take)
            elif spec.dtype != "F32":
                backend.encode(new.master(spec.name), spec.dtype, new.theta[spec.name], None)
            if in_range and new.master(spec.name) is not new.theta[spec.name]:
                # Theta is the master rounded, or moved by an update that may have saturated.
                in_range = backend.is_finite(new.theta[spec.name])
            if not in_range:
                self._hold(backend, spec, old, new, update, take)
                overflowed.append(spec.name)
        return tuple(overflowed)

    def _hold(
        self,
        backend: Backend,
        spec: TensorSpec,
        old: FragmentState,
        new: FragmentState,
        update: Mapping[str, Array],
        take: Take,
    ) -> None:
        """Hold at the largest finite value what went beyond it: momentum, master, update, theta.

        Who rebuilds such a theta from the update gets another digest, and fetches it.
        """
        backend.clamp(new.outer[f"momentum.{spec.name}"], LARGEST["F32"])
        master, theta = new.master(spec.name), new.theta[spec.name]
        backend.clamp(master, LARGEST["F32"])
        if self.commit_dtype is not None:
            difference = fp32_array(backend, spec, take)
            backend.subtract(master, old.theta[spec.name], difference)
            backend.clamp(difference, largest(self.commit_dtype))
            named = {spec.name: difference}
            encode_tensors(backend, named, [spec], self.commit_dtype, update)
            apply_update(backend, [spec], old.theta, update, self.commit_dtype, new.theta, take)
        backend.clamp(theta, LARGEST[spec.dtype])

    def _nesterov_step(
        self,
        backend: Backend,
        name: str,
        old: FragmentState,
        delta: Combination,
        new: FragmentState,
    ) -> bool:
        """Whether the master came out finite. A momentum that is not makes it so, too."""
        return backend.nesterov(
            delta,
            old.momentum(name),
            old.master(name),
            beta=self.momentum,
            lr=self.lr,
            new_momentum=new.outer[f"momentum.{name}"],
            new_master=new.master(name),
        )

    def _final_step(
        self,
        backend: Backend,
        name: str,
        old: FragmentState,
        delta: Combination,
        new: FragmentState,
    ) -> bool:
        momentum, kept = new.outer[f"momentum.{name}"], old.momentum(name)
        backend.combine(delta, momentum)
        backend.subtract(old.master(name), momentum, new.master(name))
        backend.combine(() if kept is None else ((1.0, kept),), momentum)
        return backend.is_finite(new.master(name))

    def _commit_update(
        self,
        backend: Backend,
        spec: TensorSpec,
        old: FragmentState,
        new: FragmentState,
        update: Mapping[str, Array],
        take: Take,
    ) -> None:
        """Θ becomes what a holder of the old Θ rebuilds; what rounding lost stays in the master."""
        master = {spec.name: new.master(spec.name)}
        encode_difference(backend, master, old.theta, [spec], self.commit_dtype, update, take)
        apply_update(backend, [spec], old.theta, update, self.commit_dtype, new.theta, take)


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
