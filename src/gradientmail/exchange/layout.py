"""Where everything lies: the only place where keys are built or parsed.

Keys are relative to the run's prefix. A builder raises ``ValueError`` for an argument that has no
key. A parser returns None for every key that a builder could not have made (notes, folder markers,
other widths, ids that do not match), so that a listing is read as
``[r for key in keys if (r := parse_round_key(key)) is not None]``.

Rounds and beats have ten digits, so that the byte order of their keys is the numeric order;
fragments and claims have three digits, more only from 1000 on.
"""

import os
import re
import socket
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gradientmail.mailbox.base import check_key

MANIFEST = "manifest.json"
ROUNDS = "rounds/"
SNAPSHOTS = "snapshots/"
CLAIMS = "claims/"
LEASES = "leases/"
SWEPT = "leases/_swept/"
"""How far the beats went that were swept. No learner's: ids have no ``_``."""
BLOBS = "blobs/"
BLOBS_INIT = "blobs/init/"
BLOBS_ROUNDS = "blobs/rounds/"
BLOBS_SNAPSHOTS = "blobs/snapshots/"
UNITS = "units/"
BARRIERS = "barriers/"

RAW_EXT = ".safetensors"
"""A payload stored as it is."""
ZSTD_EXT = ".safetensors.zst"
"""A payload shuffled and compressed."""

MAX_ROUND = 10**10 - 1
"""The last round that has a key; also the last beat."""
MAX_COUNT = 10**9 - 1
"""The last fragment and the last claim that have a key."""

_ID = re.compile(r"[a-z0-9-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONG = r"([0-9]{10})"
_SHORT = r"([0-9]{3}|[1-9][0-9]{3,8})"
_LEARNER = rf"({_ID.pattern})"
_STORED = rf"({_SHA256.pattern})(\.safetensors(?:\.zst)?)"

_ROUND = re.compile(rf"rounds/{_LONG}\.json")
_SNAPSHOT = re.compile(rf"snapshots/{_LONG}/{_LEARNER}\.json")
_CLAIM = re.compile(rf"claims/(?:manifest|{_LONG})/{_SHORT}\.json")
_BEAT = re.compile(rf"leases/{_LEARNER}/{_LONG}\.json")
_SWEPT = re.compile(rf"leases/_swept/{_LONG}\.json")
_INIT_BLOB = re.compile(rf"blobs/init/{_SHORT}/{_STORED}")
_ROUND_BLOB = re.compile(rf"blobs/rounds/{_LONG}/{_STORED}")
_SNAPSHOT_BLOB = re.compile(rf"blobs/snapshots/{_LONG}/{_LEARNER}/{_STORED}")


# Names


def is_learner_id(text: str) -> bool:
    """Whether ``text`` is 1 to 64 of ``a-z``, ``0-9`` and ``-``."""
    return _ID.fullmatch(text) is not None


def check_learner_id(learner: str) -> str:
    """Return ``learner`` if it is 1 to 64 of ``a-z``, ``0-9`` and ``-``, else ``ValueError``."""
    if not isinstance(learner, str) or not is_learner_id(learner):
        raise ValueError(
            f"learner_id {learner!r} is not 1 to 64 characters of a-z, 0-9 and '-'; choose another"
        )
    return learner


def default_learner_id() -> str:
    """This process: the host's name, made to match, and the process id."""
    process = str(os.getpid())
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower())
    host = host[: 64 - len(process) - 1].strip("-") or "node"
    return check_learner_id(f"{host}-{process}")


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it can be one part of a key, else ``ValueError`` that calls it ``what``.

    It must not be empty, ``.`` or ``..`` and have no ``/`` and no control characters. Names come
    from users, for units of a shared queue and for barriers. ``TypeError`` if it is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} {name!r} is not a string")
    if not name:
        raise ValueError(f"{what} must not be empty")
    if name in (".", ".."):
        raise ValueError(f"{what} {name!r} is not a plain name")
    if "/" in name or any(unicodedata.category(char) == "Cc" for char in name):
        raise ValueError(f"{what} {name!r} contains '/' or a control character; leave these out")
    return name


def is_sha256(text: str) -> bool:
    """Whether ``text`` is 64 lowercase hexadecimal digits."""
    return _SHA256.fullmatch(text) is not None


def _long(number: int, what: str) -> str:
    if not 0 <= number <= MAX_ROUND:
        raise ValueError(f"{what} {number} is not between 0 and {MAX_ROUND}")
    return f"{number:010d}"


def _short(number: int, what: str, first: int) -> str:
    if not first <= number <= MAX_COUNT:
        raise ValueError(f"{what} {number} is not between {first} and {MAX_COUNT}")
    return f"{number:03d}"


def _stored(sha256: str, ext: str) -> str:
    if not is_sha256(sha256):
        raise ValueError(f"sha256 {sha256!r} is not 64 lowercase hexadecimal digits")
    if ext not in (RAW_EXT, ZSTD_EXT):
        raise ValueError(f"extension {ext!r} is neither {RAW_EXT!r} nor {ZSTD_EXT!r}")
    return sha256 + ext


# Records


def round_key(r: int) -> str:
    """The commit of round ``r``."""
    return f"{ROUNDS}{_long(r, 'round')}.json"


def parse_round_key(key: str) -> int | None:
    """The round whose commit ``key`` is."""
    match = _ROUND.fullmatch(key)
    return int(match[1]) if match else None


def snapshots_prefix(r: int) -> str:
    """All snapshots of round ``r``."""
    return f"{SNAPSHOTS}{_long(r, 'round')}/"


def snapshot_key(r: int, learner: str) -> str:
    """The snapshot of ``learner`` for round ``r``."""
    return f"{snapshots_prefix(r)}{check_learner_id(learner)}.json"


def parse_snapshot_key(key: str) -> tuple[int, str] | None:
    """Round and learner of the snapshot that ``key`` is."""
    match = _SNAPSHOT.fullmatch(key)
    return (int(match[1]), match[2]) if match else None


def claims_prefix(r: int | None) -> str:
    """All claims on round ``r``; None is the creation of the run."""
    return f"{CLAIMS}{'manifest' if r is None else _long(r, 'round')}/"


def claim_key(r: int | None, n: int) -> str:
    """The ``n``-th claim (from 1) on round ``r``; None is the creation of the run."""
    return f"{claims_prefix(r)}{_short(n, 'claim', 1)}.json"


def parse_claim_key(key: str) -> tuple[int | None, int] | None:
    """Round (None: the creation of the run) and number of the claim that ``key`` is."""
    match = _CLAIM.fullmatch(key)
    if match is None or int(match[2]) == 0:
        return None
    return (None if match[1] is None else int(match[1]), int(match[2]))


def beats_prefix(learner: str) -> str:
    """All beats of the lease of ``learner``."""
    return f"{LEASES}{check_learner_id(learner)}/"


def beat_key(learner: str, n: int) -> str:
    """Beat ``n`` (from 0) of the lease of ``learner``."""
    return f"{beats_prefix(learner)}{_long(n, 'beat')}.json"


@lru_cache(maxsize=2**14)
def parse_beat_key(key: str) -> tuple[str, int] | None:
    """Learner and number of the beat that ``key`` is. The same beats are listed many times."""
    match = _BEAT.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def beats_among(keys: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Learner and number of every beat among ``keys``."""
    return (beat for key in keys if (beat := parse_beat_key(key)) is not None)


def swept_key(n: int) -> str:
    """Says that beats up to ``n``, of whomever, may have been swept."""
    return f"{SWEPT}{_long(n, 'beat')}.json"


def parse_swept_key(key: str) -> int | None:
    """How far the swept beats went, as ``key`` says."""
    match = _SWEPT.fullmatch(key)
    return int(match[1]) if match else None


# Payloads


@dataclass(frozen=True, slots=True)
class BlobKey:
    """What the key of a payload says."""

    kind: Literal["init", "round", "snapshot"]
    index: int
    """The fragment of an ``init`` payload, the round of the others."""
    learner: str | None
    """Whose delta a ``snapshot`` payload is; None for the others."""
    sha256: str
    ext: str

    @property
    def key(self) -> str:
        """The key that says this."""
        if self.kind == "init":
            return init_blob_key(self.index, self.sha256, self.ext)
        if self.kind == "round":
            return round_blob_key(self.index, self.sha256, self.ext)
        return snapshot_blob_key(self.index, self.learner or "", self.sha256, self.ext)


def blobs_init_prefix(p: int) -> str:
    """The Θ⁰ payloads of fragment ``p``."""
    return f"{BLOBS_INIT}{_short(p, 'fragment', 0)}/"


def blobs_round_prefix(r: int) -> str:
    """The theta, outer and update payloads of round ``r``."""
    return f"{BLOBS_ROUNDS}{_long(r, 'round')}/"


def blobs_snapshots_prefix(r: int) -> str:
    """The delta payloads of all learners for round ``r``."""
    return f"{BLOBS_SNAPSHOTS}{_long(r, 'round')}/"


def init_blob_key(p: int, sha256: str, ext: str) -> str:
    """A Θ⁰ payload of fragment ``p``; ``sha256`` is of the stored bytes."""
    return blobs_init_prefix(p) + _stored(sha256, ext)


def round_blob_key(r: int, sha256: str, ext: str) -> str:
    """A theta, outer or update payload of round ``r``; ``sha256`` is of the stored bytes."""
    return blobs_round_prefix(r) + _stored(sha256, ext)


def snapshot_blob_key(r: int, learner: str, sha256: str, ext: str) -> str:
    """A delta payload of ``learner`` for round ``r``; ``sha256`` is of the stored bytes."""
    return f"{blobs_snapshots_prefix(r)}{check_learner_id(learner)}/{_stored(sha256, ext)}"


def parse_blob_key(key: str) -> BlobKey | None:
    """What the payload is that ``key`` names."""
    if match := _INIT_BLOB.fullmatch(key):
        return BlobKey("init", int(match[1]), None, match[2], match[3])
    if match := _ROUND_BLOB.fullmatch(key):
        return BlobKey("round", int(match[1]), None, match[2], match[3])
    if match := _SNAPSHOT_BLOB.fullmatch(key):
        return BlobKey("snapshot", int(match[1]), match[2], match[3], match[4])
    return None


# Patterns


def unit_key(unit: str) -> str:
    """The claim on a unit of a shared queue."""
    return check_key(UNITS + check_name(unit, "unit id"))


def arrivals_prefix(name: str) -> str:
    """All arrivals at the barrier ``name``."""
    return f"{BARRIERS}{check_name(name, 'barrier name')}/"


def arrival_key(name: str, learner: str) -> str:
    """The arrival of ``learner`` at the barrier ``name``."""
    return check_key(arrivals_prefix(name) + check_learner_id(learner))


def parse_arrival_key(key: str) -> tuple[str, str] | None:
    """Barrier name and learner of the arrival that ``key`` is."""
    name, _, learner = key.removeprefix(BARRIERS).partition("/")
    try:
        return (name, learner) if arrival_key(name, learner) == key else None
    except ValueError:
        return None
