"""What a verification found, in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

INVARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "manifest": "there is one manifest, it can be read, and its initial payloads are there",
        "records": "one record a round, without a gap, each under its own key",
        "versions": "round r is of fragment r mod P and makes version r div P + 1",
        "participants": "a commit lists who contributed, each once, with weight tokens² / steps",
        "payloads": "payloads that a record names exist until they may be swept, and hash to it",
        "snapshots": "a snapshot has its payload as long as its round is open",
        "bases": "a delta starts from the version that its commit replaces",
        "commits": "a commit is the outer step on the version before and the deltas listed",
        "theta": "the published parameters are what master or update make of them, rounded once",
        "leftovers": "what commits made unnecessary is swept within 4·P rounds",
        "leases": "a learner has no more beats than a renewal needs",
    }
)
"""The invariants that can be read from a mailbox, by name."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One invariant that does not hold."""

    invariant: str
    """A key of ``INVARIANTS``."""
    key: str
    """The object that shows it, or a prefix."""
    detail: str

    def __str__(self) -> str:
        """One line; errors of the exchange begin with the key already."""
        named = self.detail.startswith((f"{self.key}:", f"{self.key} "))
        return f"{self.invariant}: {self.detail if named else f'{self.key}: {self.detail}'}"


@dataclass(frozen=True, slots=True)
class Report:
    """What was looked at, and what is wrong."""

    rounds: int
    """Records read."""
    objects: int
    """Objects in the listing."""
    payloads: int
    """Payloads fetched, hashed and checked against their layouts."""
    recomputed: int
    """Commits computed again from their deltas, which were still there."""
    consistent: int
    """Commits whose outer step was checked without the deltas: new against old state."""
    strays: tuple[str, ...]
    """Keys, or snapshots that cannot be read, which every node ignores."""
    violations: tuple[Violation, ...]

    @property
    def holds(self) -> bool:
        """Whether every invariant holds."""
        return not self.violations
