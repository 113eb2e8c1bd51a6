"""The outer step of one commit in parts, each long enough to hash meanwhile what is finished."""

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.outer import OuterStep, Transition, outer_steps
from gradientmail.algorithm.precision import Take, outer_specs, theta_is_master, update_specs
from gradientmail.backend.base import Backend
from gradientmail.schema import TensorSpec

PART = 2**23
"""Elements in a part: long beside a change of threads, short beside a fragment."""

type Range = tuple[TensorSpec, int, int]
"""The elements of a parameter from one to another."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the work."""

    write: Callable[[], tuple[str, ...]]
    """Does it; returns the names of the parameters that were held at the ends of their range."""
    written: Mapping[str, Mapping[str, int]]
    """By payload (``theta``, ``outer``, ``update``), up to which element of its tensors it wrote.

    No others: a parameter may have the name that another one's scales would have, were there any.
    """


class OuterParts:
    """Everything that an outer step writes, first what moves, then what follows from it.

    Each part is to be taken once, in order, and after all of it its ``write`` can be let go.
    """

    def __init__(
        self,
        algorithm: DiLoCo,
        averaged: Container[str],
        backend: Backend,
        specs: Sequence[TensorSpec],
        change: Transition,
        take: Take,
    ) -> None:
        """The step of ``OuterStep``, whose arguments these are, over a fragment's ``specs``."""
        self.beyond: set[str] = set()
        """To be told by whoever takes the parts: what they named so far."""
        self.moves: deque[Part] = deque()
        """Masters and momenta, and with them a theta that is the master."""
        self.follows: deque[Part] = deque()
        """What is made of the masters then: another theta, and the update."""
        dtype = algorithm.commit_dtype
        moved = replace(change, deltas={})  # contributions are let go before the rest follows
        for outer, those in outer_steps(algorithm, specs, averaged):
            move = partial(_move, outer, backend, change)
            follow = partial(outer.follow, backend, change=moved, beyond=self.beyond, take=take)
            for some in _some_at_a_time(those):
                for ranges in _cut(some):
                    self.moves.append(Part(partial(move, ranges), _moved(ranges, dtype)))
                if written := _followed(some, dtype):
                    self.follows.append(Part(partial(follow, some), written))


def _move(
    outer: OuterStep, backend: Backend, change: Transition, ranges: Sequence[Range]
) -> tuple[str, ...]:
    """``outer.move`` of some tensors, or of some elements of one."""
    spec, start, stop = ranges[0]
    if stop - start < spec.count:
        change = change.part(backend, spec.name, start, stop)
    return outer.move(backend, [spec for spec, _, _ in ranges], change)


def _moved(ranges: Sequence[Range], commit_dtype: str | None) -> dict[str, dict[str, int]]:
    """What ``OuterStep.move`` writes."""
    outer: dict[str, int] = {}
    theta: dict[str, int] = {}
    for spec, _, stop in ranges:
        outer |= {one.name: stop for one in outer_specs([spec], commit_dtype=commit_dtype)}
        if theta_is_master(spec, commit_dtype):
            theta[spec.name] = stop
    return _without_empty(outer=outer, theta=theta)


def _followed(specs: Sequence[TensorSpec], commit_dtype: str | None) -> dict[str, dict[str, int]]:
    """What ``OuterStep.follow`` writes; nothing where theta is the master."""
    theta = {spec.name: spec.count for spec in specs if not theta_is_master(spec, commit_dtype)}
    update = {one.name: one.count for one in update_specs(specs, commit_dtype)}
    return _without_empty(theta=theta, update=update)


def _without_empty(**written: dict[str, int]) -> dict[str, dict[str, int]]:
    return {payload: counts for payload, counts in written.items() if counts}


def _some_at_a_time(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """The tensors in order, ``PART`` elements or more at a time but for the last."""
    some: list[TensorSpec] = []
    count = 0
    for spec in specs:
        some.append(spec)
        count += spec.count
        if count >= PART:
            yield some
            some = []
            count = 0
    if some:
        yield some


def _cut(specs: Sequence[TensorSpec]) -> Iterator[list[Range]]:
    """The same tensors, a large one in ranges by itself."""
    small: list[Range] = [(spec, 0, spec.count) for spec in specs if spec.count <= PART]
    if small:
        yield small
    for spec in specs:
        if spec.count > PART:
            for start in range(0, spec.count, PART):
                yield [(spec, start, min(start + PART, spec.count))]
