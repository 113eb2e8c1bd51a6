"""The options of a run, checked once, when they are made.

They are the published DiLoCo options: fragments exchanged in turn (streaming DiLoCo), merged by
radial-directional averaging (decoupled DiLoCo, arXiv 2604.21428), applied by an outer Nesterov
step (DiLoCo, arXiv 2311.08105).
"""

# A bad option is a ValueError whatever its type is, so that one `except` catches them all.
# ruff: noqa: TRY004

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

LARGEST_COUNT = 2**53
"""The largest whole number that an option may be: every JSON reader keeps it exactly."""

PAYLOAD_DTYPES = (None, "F32", "F16", "BF16", "F8_E4M3", "F4")
"""What ``delta_dtype`` and ``commit_dtype`` can be.

``None`` is for deltas each parameter's own dtype, and for commits that they carry no update but
the parameters themselves.
"""


@dataclass(frozen=True, slots=True)
class Rda:
    """Radial-directional averaging: lengths and directions are averaged apart.

    A tensor whose lowercased name contains ``direct_pattern`` uses the weighted mean instead.
    """

    direct_pattern: str = "embed"

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a pattern that is not a string."""
        _check_text("direct_pattern", self.direct_pattern)


@dataclass(frozen=True, slots=True)
class WeightedMean:
    """Every tensor's delta is the weighted mean of the contributions."""


@dataclass(frozen=True, slots=True)
class ByBytes:
    """Tensors go, largest first, to the fragment that holds the fewest bytes."""


@dataclass(frozen=True, slots=True)
class Strided:
    """Blocks (layers) go to the fragments in turn, so that each holds a stride of the depth.

    ``block_pattern`` is searched in a tensor's name; its first group is the block's number.
    """

    block_pattern: str = r"\.(\d+)\."

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless the pattern is a regular expression with a group."""
        _check_text("block_pattern", self.block_pattern)
        try:
            groups = re.compile(self.block_pattern).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"block_pattern={self.block_pattern!r} is not a regular expression: {error}"
            ) from None
        if groups < 1:
            raise ValueError(
                f"block_pattern={self.block_pattern!r} has no group; put parentheses around the "
                r"block's number, as in '\.(\d+)\.'"
            )


@dataclass(frozen=True, slots=True)
class DiLoCo:
    """The algorithm of a run; every node of it has the same. A bad value is a ``ValueError``.

    sync_every: local steps in which every fragment is exchanged once (H).
    fragments: parts that the parameters are cut into (at most this many; P).
    in_flight: rounds that a learner may have published and not yet seen committed.
    overlap_steps: steps to train on while a round is under way before waiting; None never waits.
    mixing: share of the learner's own parameters kept when it aligns, in [0, 1).
    quorum_size: contributions that let a round close.
    outer_lr, outer_momentum: η > 0 and β in [0, 1) of the outer Nesterov step.
    merge: how contributions become one delta. partition: how tensors become fragments.
    global_batch_size: what ``Session.batch_size`` divides among the live learners.
    delta_dtype: precision of snapshots: "F32", "F16", "BF16", "F8_E4M3" or "F4"; None is each
        parameter's own dtype.
    commit_dtype: the same for the updates that commits carry; None is no update, but parameters.
    flush_on_close: whether a clean close publishes the steps since the last snapshot first.
    """

    sync_every: int
    fragments: int
    in_flight: int = 2
    overlap_steps: int | None = None
    mixing: float = 0.0
    quorum_size: int = 1
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    merge: Rda | WeightedMean = field(default_factory=Rda)
    partition: ByBytes | Strided = field(default_factory=ByBytes)
    global_batch_size: int | None = None
    delta_dtype: str | None = None
    commit_dtype: str | None = None
    flush_on_close: bool = False

    def __post_init__(self) -> None:
        """Check every option; numbers of other types, NumPy's say, become Python's."""
        for name, (least, none) in _COUNTS.items():
            if not (none and getattr(self, name) is None):
                object.__setattr__(self, name, _count(name, getattr(self, name), least, none=none))
        self._check_together()
        for name, bounds in _FRACTIONS.items():
            object.__setattr__(self, name, _fraction(name, getattr(self, name), *bounds))
        _check_kind("merge", self.merge, (Rda, WeightedMean))
        _check_kind("partition", self.partition, (ByBytes, Strided))
        for name in ("delta_dtype", "commit_dtype"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, str)) or value not in PAYLOAD_DTYPES:
                allowed = ", ".join(map(repr, PAYLOAD_DTYPES))
                raise ValueError(f"{name}={value!r} is not one of {allowed}")
        if not isinstance(self.flush_on_close, bool):
            raise ValueError(f"flush_on_close={self.flush_on_close!r} is neither True nor False")

    def _check_together(self) -> None:
        if self.fragments > self.sync_every:
            raise ValueError(
                f"fragments={self.fragments!r} must be at most sync_every={self.sync_every!r}: "
                "a step can exchange one fragment"
            )
        if self.in_flight > self.fragments:
            raise ValueError(
                f"in_flight={self.in_flight!r} must be at most fragments={self.fragments!r}; "
                f"pass in_flight={self.fragments} (the default is 2)"
            )

    def to_json(self) -> dict[str, Any]:
        """The options as the manifest holds them; ``from_json`` reads them back."""
        row = {option.name: getattr(self, option.name) for option in fields(self)}
        return row | {"merge": _choice_json(self.merge), "partition": _choice_json(self.partition)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "DiLoCo":
        """Read a manifest's ``algorithm``; unknown fields are ignored, absent ones default.

        Raises ``ValueError`` naming the option whose value is missing or wrong.
        """
        if not isinstance(row, Mapping):
            raise ValueError(f"algorithm is not an object of options: {row!r}")
        known = {option.name: row[option.name] for option in fields(cls) if option.name in row}
        for name in ("sync_every", "fragments"):
            if name not in known:
                raise ValueError(f"{name} is missing from the algorithm's options")
        for name in ("merge", "partition"):
            if name in known:
                known[name] = _choice_from_json(name, known[name])
        return cls(**known)

    def differences(self, other: "DiLoCo") -> list[str]:
        """One line for each option that differs: the value here, and ``other``'s (the run's)."""
        return [
            f"{name}: {ours!r} here, {theirs!r} in the run"
            for name in (option.name for option in fields(self))
            if (ours := getattr(self, name)) != (theirs := getattr(other, name))
        ]


_COUNTS = {
    "sync_every": (1, False),
    "fragments": (1, False),
    "in_flight": (1, False),
    "quorum_size": (1, False),
    "overlap_steps": (0, True),
    "global_batch_size": (1, True),
}
"""Options that are whole numbers: the least allowed, and whether they may be None."""

_FRACTIONS = {
    "mixing": (0.0, True, 1.0),
    "outer_lr": (0.0, False, math.inf),
    "outer_momentum": (0.0, True, 1.0),
}
"""Options that are fractions: the lower bound, whether it is allowed itself, the bound above."""

_CHOICES: dict[str, dict[str, type]] = {
    "merge": {"rda": Rda, "weighted_mean": WeightedMean},
    "partition": {"by_bytes": ByBytes, "strided": Strided},
}
"""The options that are one of several classes, by their ``kind`` in JSON."""

_KINDS = {choice: kind for kinds in _CHOICES.values() for kind, choice in kinds.items()}


def _choice_json(choice: Rda | WeightedMean | ByBytes | Strided) -> dict[str, str]:
    values = {option.name: getattr(choice, option.name) for option in fields(choice)}
    return {"kind": _KINDS[type(choice)], **values}


def _choice_from_json(name: str, row: object) -> object:
    kind = row.get("kind") if isinstance(row, Mapping) else None
    choice = _CHOICES[name].get(kind) if isinstance(kind, str) else None
    if choice is None or not isinstance(row, Mapping):
        raise ValueError(f"{name}={row!r} is not a known kind; known: {', '.join(_CHOICES[name])}")
    return choice(
        **{option.name: row[option.name] for option in fields(choice) if option.name in row}
    )


def _count(name: str, value: object, least: int, *, none: bool) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(value, bool) or not least <= number <= LARGEST_COUNT:
        allowed = f"a whole number from {least} to 2**53" + (" or None" if none else "")
        raise ValueError(f"{name}={value!r} is not {allowed}")
    return number


def _fraction(name: str, value: object, least: float, closed: bool, bound: float) -> float:
    allowed = f"a finite number {'at least' if closed else 'over'} {least:g}"
    allowed += "" if math.isinf(bound) else f" and below {bound:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name}={value!r} is not {allowed}")
    try:
        number = float(value) + 0.0  # turns -0.0 into 0.0, which is written differently in JSON
    except OverflowError:
        number = math.inf
    enough = number >= least if closed else number > least
    if not (math.isfinite(number) and enough and number < bound):
        raise ValueError(f"{name}={value!r} is not {allowed}")
    return number


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} is not a string")


def _check_kind(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        names = ", ".join(f"{kind.__name__}()" for kind in kinds)
        raise ValueError(f"{name}={value!r} is not one of {names}")
