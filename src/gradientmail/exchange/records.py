"""The JSON objects of a run as frozen values, and their canonical bytes.

``from_bytes`` raises ``ProtocolError`` naming what is wrong, and nothing else, for any bytes.
What the members of one record must have in common is checked by its constructor (``ValueError``),
so that nothing is written that another node would refuse. What needs more than the record (that
its fragment is ``round mod P``, that its payload exists) is the caller's to check.

Fields have the names of the wire format.
"""

from collections.abc import Buffer, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, override

from gradientmail.errors import ProtocolError
from gradientmail.exchange import layout
from gradientmail.exchange.fields import (
    INT_LIMIT,
    Reader,
    any_text,
    boolean,
    canonical,
    free_object,
    instance,
    integer,
    number,
    optional,
    pair,
    parse,
    sequence,
    signed_number,
    strictly_increasing,
    text,
)
from gradientmail.exchange.layout import BlobKey, is_learner_id, is_sha256
from gradientmail.schema import PARAMETER_DTYPES, Schema, TensorSpec

MANIFEST_LIMIT = 2**25
"""Bytes that a manifest may have: 200,000 parameters with long names."""
ROUND_LIMIT = 2**22
"""Bytes that a round record may have: 25,000 participants."""
SMALL_LIMIT = 2**16
"""Bytes that a snapshot record, a claim or a beat may have."""
MAX_DIMENSIONS = 64


class _Record:
    """An object of the mailbox."""

    __slots__ = ()

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return canonical(self)


# Payload references


@dataclass(frozen=True, slots=True)
class Ref:
    """One payload: its key, and sha256 and size of the stored bytes."""

    key: str
    sha256: str
    size: int

    def __post_init__(self) -> None:
        """Refuse a key that is not a payload's, or names another sha256."""
        blob = layout.parse_blob_key(self.key)
        if blob is None:
            raise ValueError(f"{self.key[:200]!r} is not the key of a payload")
        if blob.sha256 != self.sha256:
            raise ValueError(f"payload {self.key} is recorded with another sha256, {self.sha256}")

    @property
    def blob(self) -> BlobKey:
        """What the key says; ``blob.ext`` tells how the payload is stored."""
        blob = layout.parse_blob_key(self.key)
        assert blob is not None  # by __post_init__  # noqa: S101
        return blob


def _check_place(ref: Ref, kind: str, index: int, learner: str | None = None) -> None:
    blob = ref.blob
    if (blob.kind, blob.index, blob.learner) != (kind, index, learner):
        whose = f" of {learner}" if learner else ""
        raise ValueError(f"{ref.key} is not a payload under {kind} {index}{whose}")


_learner = text(is_learner_id, "a learner id (a-z, 0-9 and '-', 64 at most)")
_sha256 = text(is_sha256, "64 lowercase hexadecimal digits")
_count = integer()
_integer = integer(-INT_LIMIT)
_round = integer(0, layout.MAX_ROUND)
_ref = instance(Ref, {"key": any_text, "sha256": _sha256, "size": _count})


# The run


@dataclass(frozen=True, slots=True)
class Manifest(_Record):
    """A run: what it trains, how, and from what parameters."""

    schema: Schema
    plan: tuple[tuple[str, ...], ...]
    """The names of each fragment."""
    algorithm: Mapping[str, Any]
    """Options as JSON has them; the algorithm's own code reads them."""
    init: tuple[Ref, ...]
    """Θ⁰ of each fragment."""
    created_by: str
    averaged: tuple[str, ...] = field(default=(), metadata={"sparse": True})
    """The names of ``schema`` that are buffers: merged by the weighted mean, without momentum."""

    def __post_init__(self) -> None:
        """Refuse a schema, plan and payloads that do not belong together."""
        names = [spec.name for spec in self.schema]
        if not names:
            raise ValueError("schema is empty")
        if not strictly_increasing(names):
            raise ValueError("schema is not sorted by name, or has a name twice")
        if sum(spec.nbytes for spec in self.schema) >= INT_LIMIT:
            raise ValueError("schema has more bytes than any machine")
        for p, fragment in enumerate(self.plan):
            if not fragment or not strictly_increasing(fragment):
                raise ValueError(f"plan[{p}] is empty, not sorted, or has a name twice")
        if sorted(name for fragment in self.plan for name in fragment) != names:
            raise ValueError("plan does not hold every name of schema exactly once")
        if not strictly_increasing(self.averaged) or set(self.averaged) - set(names):
            raise ValueError("averaged is not sorted, or has a name that schema has not")
        if len(self.init) != len(self.plan):
            raise ValueError(f"{len(self.plan)} fragments, but {len(self.init)} init payloads")
        for p, ref in enumerate(self.init):
            _check_place(ref, "init", p)

    @classmethod
    def from_bytes(cls, data: Buffer) -> Self:
        """Decode ``manifest.json``."""
        return _decode(cls, data, "manifest", MANIFEST_LIMIT)


def _is_name(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name != "__metadata__"


_name = text(_is_name, "a name that a payload can hold")
_spec = instance(
    TensorSpec,
    {
        "name": _name,
        "dtype": text(lambda dtype: dtype in PARAMETER_DTYPES, f"one of {PARAMETER_DTYPES}"),
        "shape": sequence(_count, MAX_DIMENSIONS),
    },
)


@dataclass(frozen=True, slots=True)
class Claim(_Record):
    """Who means to close a round, or to create the run."""

    learner: str

    @classmethod
    def from_bytes(cls, data: Buffer) -> Self:
        """Decode a claim."""
        return _decode(cls, data, "claim", SMALL_LIMIT)


@dataclass(frozen=True, slots=True)
class Beat(_Record):
    """A sign of life. ``token`` tells two processes of one id apart; older versions have none."""

    token: str | None
    after: tuple[str, ...] | None = None
    """Tokens of older processes of the id, newest first. None where a version does not say."""

    @override
    def to_bytes(self) -> bytes:
        """Canonical JSON without the members that are None."""
        members = {"token": self.token, "after": self.after}
        return canonical({name: value for name, value in members.items() if value is not None})

    @classmethod
    def from_bytes(cls, data: Buffer) -> Self:
        """Decode a beat, with or without its members."""
        value = parse(data, "beat", SMALL_LIMIT)
        if isinstance(value, dict):
            value.setdefault("token", None)
        token = text(bool, "a string")
        readers = {"token": optional(token)}
        return instance(cls, readers, {"after": optional(sequence(token))})(value, "beat")


# Rounds


@dataclass(frozen=True, slots=True)
class SnapshotRecord(_Record):
    """A learner's contribution to a round. Steps and tokens of 0 are never accepted."""

    learner: str
    round: int
    local_step: int
    steps: int
    """Optimizer steps of the fragment since its last alignment."""
    tokens: int
    """Samples in these steps."""
    base_version: int
    """Committed version of the fragment that the delta starts from."""
    rounds_seen: int
    """Newest round that the learner had aligned with, −1 for none."""
    step_seconds: float | None
    """Mean seconds an optimizer step; None is read, for a learner that has not measured one."""
    schema_digest: str
    final: bool
    payload: Ref

    def __post_init__(self) -> None:
        """Refuse a payload of another round or learner."""
        _check_place(self.payload, "snapshot", self.round, self.learner)

    @property
    def key(self) -> str:
        """Where this record belongs."""
        return layout.snapshot_key(self.round, self.learner)

    @classmethod
    def from_bytes(cls, data: Buffer) -> Self:
        """Decode a snapshot record."""
        return _decode(cls, data, "snapshot", SMALL_LIMIT)


@dataclass(frozen=True, slots=True)
class Participant:
    """What one learner contributed to a commit; ``weight`` is ``tokens² / steps``, or 0."""

    learner: str
    local_step: int
    steps: int
    tokens: int
    weight: float


@dataclass(frozen=True, slots=True)
class Update:
    """The difference to the version before, and sha256 of the theta payload that it leads to.

    The digest is of the payload before any compression.
    """

    payload: Ref
    theta_digest: str


@dataclass(frozen=True, slots=True)
class Estimates:
    """Moving averages in seconds, None while unknown."""

    step: float | None
    """One optimizer step."""
    quorum: float | None
    """From the start of a round to its quorum."""
    sync: float | None
    """From closing to the durable commit."""


@dataclass(frozen=True, slots=True)
class RoundRecord(_Record):
    """The commit of a round: created once, never deleted."""

    round: int
    step: int
    """Global step at which the round was due."""
    fragment: int
    version: int
    """Version of the fragment that this commit makes, 1 the first."""
    participants: tuple[Participant, ...]
    rejected: tuple[tuple[str, str], ...]
    """Learner and reason."""
    cosine: float | None
    """Mean cosine of the pairs of contributions, None with fewer than two."""
    theta: Ref
    outer: Ref
    update: Update | None
    quorum_seconds: float
    grace_seconds: float
    estimates: Estimates

    def __post_init__(self) -> None:
        """Refuse lists that are not sorted, and payloads of another round."""
        if not strictly_increasing(one.learner for one in self.participants):
            raise ValueError("participants are not sorted by learner, or one is there twice")
        if not strictly_increasing(self.rejected):
            raise ValueError("rejected is not sorted, or an entry is there twice")
        for ref in self.payloads:
            _check_place(ref, "round", self.round)

    @property
    def payloads(self) -> tuple[Ref, ...]:
        """Theta, outer and, if there is one, the update."""
        update = () if self.update is None else (self.update.payload,)
        return (self.theta, self.outer, *update)

    @property
    def key(self) -> str:
        """Where this record belongs."""
        return layout.round_key(self.round)

    @classmethod
    def from_bytes(cls, data: Buffer) -> Self:
        """Decode a round record."""
        return _decode(cls, data, "round", ROUND_LIMIT)


def expect_key[R: SnapshotRecord | RoundRecord](record: R, key: str) -> R:
    """Return ``record`` if it belongs under ``key``, else ``ProtocolError``."""
    if record.key != key:
        raise ProtocolError(f"{key} holds the record of {record.key}; it is ignored")
    return record


_participant = instance(
    Participant,
    {
        "learner": _learner,
        "local_step": _count,
        "steps": _count,
        "tokens": _count,
        "weight": number,
    },
)
_seconds = optional(number)
_READERS: Mapping[type[_Record], Mapping[str, Reader]] = {
    Manifest: {
        "schema": sequence(_spec),
        "plan": sequence(sequence(_name)),
        "algorithm": free_object,
        "init": sequence(_ref),
        "created_by": _learner,
    },
    Claim: {"learner": _learner},
    SnapshotRecord: {
        "learner": _learner,
        "round": _round,
        "local_step": _count,
        # Of any value: who merges says what is wrong with the contribution.
        "steps": _integer,
        "tokens": _integer,
        "base_version": _integer,
        "rounds_seen": integer(-1, layout.MAX_ROUND),
        "step_seconds": _seconds,
        "schema_digest": any_text,
        "final": boolean,
        "payload": _ref,
    },
    RoundRecord: {
        "round": _round,
        "step": _count,
        "fragment": _count,
        "version": integer(1),
        "participants": sequence(_participant),
        "rejected": sequence(pair(_learner, text(str.isprintable, "a reason"))),
        "cosine": optional(signed_number),
        "theta": _ref,
        "outer": _ref,
        "update": optional(instance(Update, {"payload": _ref, "theta_digest": _sha256})),
        "quorum_seconds": number,
        "grace_seconds": number,
        "estimates": instance(Estimates, {"step": _seconds, "quorum": _seconds, "sync": _seconds}),
    },
}


_SPARSE: Mapping[type[_Record], Mapping[str, Reader]] = {
    Manifest: {"averaged": sequence(_name)},
}


def _decode[R: _Record](cls: type[R], data: Buffer, what: str, limit: int) -> R:
    return instance(cls, _READERS[cls], _SPARSE.get(cls))(parse(data, what, limit), what)
