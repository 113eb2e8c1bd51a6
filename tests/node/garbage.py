"""A writer that puts whatever it likes under every prefix of a run, again and again."""

import asyncio
import json
from random import Random
from typing import Any

from tests.node.worlds import Archive, delta_payload, snapshot_record

NUMBERS: tuple[Any, ...] = (
    -1,
    2**63,
    2**70,
    -(2**70),
    1e308,
    True,
    False,
    None,
    0.5,
    "NaN",
    [],
    {},
)
RAW_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"0" * 40 + b"1", b"9" * 5000)
BODIES = (
    b"",
    b"\0",
    b"{",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe{}",
    b'{"learner":"a","learner":"b"}',
    b'{"learner":"../../etc"}',
    b'{"learner":["a"]}',
    b'{"token":7}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'"' + b"x" * 200_000 + b'"',
    b"[" + b"[]," * 100_000 + b"[]]",
    b" " * 5_000_000,
)
NO_BEATS = tuple(body for body in BODIES if body[:2] not in (b"{}", b'{"'))
NAMES = (
    ".DS_Store",
    "notes.txt",
    "UPPER",
    "a b",
    "é",
    "x" * 200,
    "0000000003",
    "-",
    "..x",
    "a.json",
)


def committed(archive: Archive) -> int:
    """How many rounds are committed: what else lies there does not count."""
    keys = set(archive.now("rounds/"))
    return next(r for r in range(len(keys) + 1) if f"rounds/{r:010d}.json" not in keys)


async def remove_strays(archive: Archive) -> None:
    """Delete what is no commit from ``rounds/``, for checks that expect nothing else."""
    count = committed(archive)
    records = {f"rounds/{r:010d}.json" for r in range(count)}
    await archive.delete(key for key in archive.now("rounds/") if key not in records)


class Garbage:
    """Draws keys and bodies; ``ghosts`` are ids that never joined."""

    def __init__(self, archive: Archive, random: Random, learners: tuple[str, ...]) -> None:
        self.archive = archive
        self.random = random
        self.learners = learners
        self.ghosts = tuple(f"ghost-{n}" for n in range(4))
        self.count = 0

    async def write_for_ever(self, pause: float) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(self.random.uniform(0, 2 * pause))
            for _ in range(4):
                key = self.key()
                body = self.body()
                if any(key.startswith(f"leases/{learner}/") for learner in self.learners):
                    # An object is a beat, of a process that has this id; garbage is something else.
                    body = self.random.choice(NO_BEATS)
                await self.archive.put_if_absent(key, body)
                self.count += 1
            await self._well_formed()

    def body(self) -> bytes:
        """Anything."""
        draw = self.random.random()
        if draw < 0.5:
            return self.random.choice(BODIES)
        if draw < 0.6:
            return self.random.randbytes(self.random.randrange(2000))
        return self._bent(self._some_record())

    def key(self) -> str:
        """Under any prefix: odd names, or a key that the protocol could use with a ghost's id.

        Not a key that a live node must create: that can be taken by anybody who may write, and
        what follows then has tests of its own.
        """
        ahead = committed(self.archive) + self.random.randrange(-4, 3)
        number = f"{max(ahead, 0):010d}"
        far = f"{committed(self.archive) + self.random.randrange(1000, 10**6):010d}"
        ghost, name = self.random.choice(self.ghosts), self.random.choice(NAMES)
        learner = self.random.choice((*self.learners, ghost))
        sha = f"{self.random.getrandbits(256):064x}"
        beat = f"{self.random.choice((0, 7, 10**10 - 1, self.random.randrange(100))):010d}"
        return self.random.choice(
            (
                name,
                f"rounds/{name}",
                f"rounds/{far}.json",
                f"rounds/{number}/{name}",
                f"snapshots/{name}",
                f"snapshots/{number}/{name}",
                f"snapshots/{number}/{ghost}.json",
                f"snapshots/{far}/{ghost}.json",
                f"claims/{name}",
                f"claims/{number}/{name}",
                f"claims/{number}/{self.random.randrange(1, 6):03d}.json",
                f"claims/manifest/{self.random.randrange(1, 6):03d}.json",
                f"leases/{name}",
                f"leases/{name}/{name}",
                f"leases/{learner}/{beat}.json",
                f"blobs/{name}",
                f"blobs/init/{name}",
                f"blobs/init/000/{sha}.safetensors",
                f"blobs/rounds/{number}/{sha}.safetensors.zst",
                f"blobs/rounds/{name}/{sha}.safetensors",
                f"blobs/snapshots/{number}/{ghost}/{sha}.safetensors",
                f"blobs/snapshots/{number}/{name}/x",
                f"units/{name}",
                f"barriers/{name}/{ghost}",
                f"barriers/{name}",
            )
        )

    def _some_record(self) -> dict[str, Any]:
        """A snapshot of a ghost, or the newest record of the run, or a claim."""
        number = committed(self.archive)
        kind = self.random.randrange(3)
        if kind == 0 and number:
            data = self.archive.ever[f"rounds/{number - 1:010d}.json"][0]
            return dict(json.loads(data))
        if kind == 1:
            return {"learner": self.random.choice((*self.ghosts, *self.learners))}
        return self._snapshot(number, self.random.choice(self.ghosts))[0]

    def _snapshot(self, number: int, learner: str) -> tuple[dict[str, Any], bytes]:
        fragments = len(json.loads(self.archive.ever["manifest.json"][0])["plan"])
        payload = delta_payload(self.archive, number % fragments)
        return snapshot_record(self.archive, number, learner, payload), payload

    def _bent(self, record: dict[str, Any]) -> bytes:
        """The record with a member missing, or of another kind, or with a number JSON lacks."""
        name = self.random.choice(sorted(record))
        if self.random.random() < 0.2:
            del record[name]
            return json.dumps(record).encode()
        if self.random.random() < 0.3:
            marked = json.dumps({**record, name: "HERE"}).encode()
            return marked.replace(b'"HERE"', self.random.choice(RAW_NUMBERS))
        return json.dumps({**record, name: self.random.choice(NUMBERS)}).encode()

    async def _well_formed(self) -> None:
        """A ghost's snapshot that is right but for what it refers to, or how it was made."""
        number, ghost = committed(self.archive), self.random.choice(self.ghosts)
        record, payload = self._snapshot(number, ghost)
        other = f"blobs/snapshots/{number + 2:010d}/{ghost}/"
        sha = record["payload"]["sha256"]
        stored: bytes | None = payload
        match self.random.randrange(8):
            case 0:
                record["base_version"] += 1
            case 1:
                record["payload"]["key"] = f"{other}{sha}.safetensors"
            case 2:
                record["payload"]["key"] = f"snapshots/{number:010d}/{ghost}.json"
            case 3:
                record["schema_digest"] = "0" * 64
            case 4:
                stored = payload[:-4] + b"\0\0\xc0\x7f"  # NaN, and another hash
            case 5:
                stored = None
            case 6:
                record["tokens"] = 0
            case _:
                stored = payload * 2000
        if stored is not None:
            await self.archive.put_if_absent(
                f"blobs/snapshots/{number:010d}/{ghost}/{sha}.safetensors", stored
            )
        body = json.dumps(record).encode()
        await self.archive.put_if_absent(f"snapshots/{number:010d}/{ghost}.json", body)
