"""A run of real processes in which anything happens to them and to their store, from a seed."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from random import Random
from typing import Any, Protocol, Self
from urllib.parse import unquote

from tests.processes.chaos_node import keep, open_store

from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox.base import Mailbox

PATIENCE_SECONDS = 90.0
LEARNERS = ("a", "b", "c", "d")
BODIES = (b"", b"{}", b"[" * 90_000, b"\xff" * 300, b"null", b'{"learner":7}')
EXCUSES = ("No space left on device (injected)", "LearnerReplaced", "PayloadCorrupt")
"""Why a node may end by itself."""


class Store(Protocol):
    """A store that can be restarted and damaged."""

    description: dict[str, str]

    def overwrite(self, key: str, data: bytes) -> None:
        """Change an object behind everybody's back."""
        ...

    def away(self) -> contextlib.AbstractContextManager[None]:
        """Nobody can reach it meanwhile."""
        ...


class Folder:
    """A store on the disk. While it is away its folder has another name, as when unmounted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.description = {"folder": str(folder)}

    def overwrite(self, key: str, data: bytes) -> None:
        part = self.folder.parent / "overwriting"
        part.write_bytes(data)
        with contextlib.suppress(FileNotFoundError):
            if (self.folder / key).exists():
                part.replace(self.folder / key)

    @contextlib.contextmanager
    def away(self) -> Generator[None]:
        hidden = self.folder.with_name("away")
        self.folder.rename(hidden)
        try:
            yield
        finally:
            hidden.rename(self.folder)


@dataclass(slots=True)
class Process:
    """A node that was started."""

    learner: str
    pid: int
    out: Path


class Chaos:
    """The processes of one run, and what happens to them."""

    def __init__(self, folder: Path, store: Store, seed: int) -> None:
        self.folder = folder
        self.archive = folder / "archive"
        self.archive.mkdir()
        self.store = store
        self.random = Random(seed)
        self.alive: list[Process] = []
        self.log: list[str] = []
        self.count = 0
        self.box: Mailbox = open_store(store.description)

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.chaos_node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        for process in self.alive:  # a stopped one ends by SIGKILL too
            os.kill(process.pid, signal.SIGKILL)
        self._server.stdin.close()
        self._server.wait(PATIENCE_SECONDS)
        self._server.stdout.close()
        if kind is not None:
            print(*self.log, sep="\n")
            for path in sorted(self.folder.glob("*.out")):
                print(f"--- {path.name}\n{path.read_text()[-3000:]}")

    def _ask(self, **row: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(row), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    # Processes

    def start(self, learner: str, rounds: int = 0) -> Process:
        """Start a node."""
        self.count += 1
        out = self.folder / f"{self.count:04d}-{learner}.out"
        out.touch()
        pid = self._ask(
            do="start",
            store=self.store.description,
            archive=str(self.archive),
            learner=learner,
            rounds=rounds,
            out=str(out),
        )
        process = Process(learner, pid, out)
        self.alive.append(process)
        return process

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        os.kill(process.pid, signal.SIGKILL)
        self._ask(do="reap", pid=process.pid, wait=True)
        self.alive.remove(process)

    def look_after(self) -> None:
        """Whoever ended by itself had a reason for it; every learner is there."""
        for process in tuple(self.alive):
            code = self._ask(do="reap", pid=process.pid, wait=False)
            if code is not None:
                self.alive.remove(process)
                said = process.out.read_text()
                assert any(excuse in said for excuse in EXCUSES), said[-3000:]
                self.log.append(f"{process.learner} ended by itself")
        for learner in LEARNERS:
            if all(process.learner != learner for process in self.alive):
                self.start(learner)

    # The store

    def rounds(self) -> int:
        """How many rounds are committed."""
        keys = set(self.keys("rounds/"))
        return next(r for r in range(len(keys) + 1) if f"rounds/{r:010d}.json" not in keys)

    def keys(self, prefix: str) -> list[str]:
        """What is there."""
        return list(self._persist(lambda: asyncio.run(self._list(prefix))))

    async def _list(self, prefix: str) -> list[str]:
        return list(await self.box.list(prefix))

    def get(self, key: str) -> bytes | None:
        """One object."""

        async def read() -> bytes | None:
            data = await self.box.get(key)
            return None if data is None else bytes(data)

        return self._persist(lambda: asyncio.run(read()))

    async def _all(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for some in batched(await self.box.list(""), 16):
            bodies = await asyncio.gather(*map(self.box.get, some))
            found.update((k, bytes(b)) for k, b in zip(some, bodies, strict=True) if b is not None)
        return found

    def _persist[T](self, act: Callable[[], T]) -> T:
        ends = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return act()
            except MailboxUnavailable:
                assert time.monotonic() < ends, "the store does not come back"
                time.sleep(0.2)

    def until_rounds(self, count: int) -> None:
        """Wait for so many rounds."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while self.rounds() < count:
            assert time.monotonic() < ends, f"{self.rounds()} rounds, expected {count}"
            self.look_after()
            time.sleep(0.1)

    # What happens

    def happen(self) -> None:
        """One thing, drawn at random."""
        act = self.random.choice(
            (
                self._kill,
                self._kill,
                self._kill_closer,
                self._stop,
                self._stop,
                self._twin,
                self._fill_disk,
                self._take_store_away,
                self._damage,
                self._damage,
                self._write_garbage,
            )
        )
        self.log.append(f"{self.rounds()} rounds; {act.__name__}")
        act()
        time.sleep(self.random.uniform(0.0, 0.6))
        self.look_after()

    def _kill(self) -> None:
        self.kill(self.random.choice(self.alive))
        time.sleep(self.random.uniform(0.0, 2.0))

    def _kill_closer(self) -> None:
        claims = self.keys(f"claims/{self.rounds():010d}/")
        data = self.get(claims[-1]) if claims else None
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            closer = json.loads(data or b"{}")["learner"]
            for process in tuple(self.alive):
                if process.learner == closer:
                    self.kill(process)

    def _stop(self) -> None:
        """SIGSTOP; now and then for longer than the lease lasts."""
        process = self.random.choice(self.alive)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(self.random.choice((0.1, 0.5, 3.0)))
        os.kill(process.pid, signal.SIGCONT)

    def _twin(self) -> None:
        """A second process with the id of one that lives."""
        self.start(self.random.choice(self.alive).learner)

    def _fill_disk(self) -> None:
        full = self.folder / "full"
        full.touch()
        time.sleep(self.random.uniform(0.2, 2.0))
        full.unlink()

    def _take_store_away(self) -> None:
        """Not while a node is opening it: what is no folder then would be a new run."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while not all("joined" in process.out.read_text() for process in self.alive):
            assert time.monotonic() < ends, "a node does not join"
            time.sleep(0.1)
            self.look_after()
        with self.store.away():
            time.sleep(self.random.uniform(0.0, 1.5))

    def _damage(self) -> None:
        """Other bytes in an object of an open round, of a lease, or a claim."""
        prefix = self.random.choice(("snapshots/", "blobs/snapshots/", "claims/", "leases/"))
        keys = [key for key in self.keys(prefix) if "manifest" not in key]
        if keys:
            key = self.random.choice(keys)
            data = self.get(key)
            if data is not None:
                keep(self.archive, key, data)
                bent = bytes(data[: len(data) // 2]) + b"\x00\xff"
                no_beat = (bent, b"", b"[]", b"\xff" * 300)
                self.store.overwrite(key, self.random.choice(no_beat))

    def _write_garbage(self) -> None:
        number = self.rounds()
        ghost = f"ghost-{self.random.randrange(9)}"
        sha = f"{self.random.getrandbits(256):064x}"
        for key in (
            f"rounds/notes-{number}.txt",
            f"rounds/{number + 10_000:010d}.json",
            f"snapshots/{number:010d}/{ghost}.json",
            f"snapshots/{number + 2:010d}/{ghost}.json",
            f"snapshots/.DS_Store-{number}",
            f"claims/{number + 1:010d}/001.json",
            f"leases/{ghost}/0000000001.json",
            f"blobs/snapshots/{number:010d}/{ghost}/{sha}.safetensors",
            f"blobs/rounds/{number:010d}/{sha}.safetensors.zst",
            f"units/{ghost}",
        ):
            body = self.random.choice(BODIES)
            self._persist(lambda key=key, body=body: asyncio.run(self._put(key, body)))

    async def _put(self, key: str, body: bytes) -> None:
        await self.box.put_if_absent(key, body)

    # Afterwards

    def history(self) -> dict[str, bytes]:
        """Every object that the run ever needed: what is there, and what was deleted.

        Of a snapshot that was replaced, or damaged, the body that its round's record lists.
        """
        objects = self._persist(lambda: asyncio.run(self._all()))
        for folder in self.archive.iterdir():
            key = unquote(folder.name)
            bodies = [path.read_bytes() for path in folder.iterdir() if not path.suffix]
            if key.startswith("snapshots/"):
                record = objects.get(f"rounds/{key.split('/')[1]}.json")
                bodies = [body for body in bodies if record and _listed(record, key, body)]
            elif key.startswith("blobs/"):
                bodies = [body for body in bodies if _hashes(key, body)]
            if bodies:
                objects[key] = bodies[0]
        count = self.rounds()
        return {
            key: data
            for key, data in objects.items()
            if not key.startswith("leases/") and not _beyond(key, count)
        }


def _beyond(key: str, count: int) -> bool:
    """Whether the object is of a round that was not committed."""
    parts = key.split("/")
    number = parts[2] if parts[0] == "blobs" and len(parts) > 2 else parts[-1][:10]
    if parts[0] == "snapshots":
        number = parts[1]
    return parts[:2] != ["blobs", "init"] and number.isdigit() and int(number) >= count


def _listed(record: bytes, key: str, body: bytes) -> bool:
    learner = key.split("/")[2].removesuffix(".json")
    try:
        snapshot = json.loads(body)
        rows = [row for row in json.loads(record)["participants"] if row["learner"] == learner]
        counts = ("local_step", "steps", "tokens")
        return any(all(row[name] == snapshot[name] for name in counts) for row in rows)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _hashes(key: str, body: bytes) -> bool:
    return hashlib.sha256(body).hexdigest() in key
