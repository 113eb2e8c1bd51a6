"""Starts, kills and awaits nodes as processes over one folder.

A process that has imported torch and made no thread forks them: importing it anew in each would
take most of the time.
"""

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Buffer, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.processes.stores import store_at

from gradientmail.mailbox.base import Mailbox

HERE = Path(__file__).parent
PATIENCE = 100.0


class Fleet:
    """The processes of one run."""

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.root = folder / "run"
        self._where = str(self.root) if url is None else url
        self._box = store_at(self._where)
        self.folder = folder
        self._outputs: dict[str, Path] = {}

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.processes.node_process",
                "serve",
                *(["s3"] if self._where.startswith("http") else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parents[1],
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()  # it kills what is left
        self._server.wait(PATIENCE)
        self._server.stdout.close()
        if kind is not None:
            for learner, path in self._outputs.items():
                print(f"--- {learner}\n{path.read_text() if path.exists() else ''}")

    def _ask(self, line: str) -> str:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(line, file=self._server.stdin, flush=True)
        return self._server.stdout.readline().strip()

    def start(self, learner: str, rounds: int = 0) -> None:
        """Start a node; ``joined`` tells when it has joined."""
        count = len(list(self.folder.iterdir()))
        out = self._outputs[learner] = self.folder / f"{learner}-{count}.txt"
        answer = self._ask(f"start {self._where} {learner} {rounds} {out}")
        assert answer.startswith("pid "), answer

    def output(self, learner: str) -> str:
        """What a node has printed."""
        path = self._outputs[learner]
        return path.read_text() if path.exists() else ""

    def joined(self, learner: str) -> None:
        """Wait until a node has joined."""
        self.until(lambda: "joined" in self.output(learner))

    def kill(self, learner: str) -> None:
        """SIGKILL."""
        assert self._ask(f"kill {learner}") == "killed"

    def ended(self, learner: str) -> list[str]:
        """Wait for a node to end well; its last line, split."""
        assert self._ask(f"wait {learner}") == "ended 0", self.output(learner)
        lines = self.output(learner).splitlines()
        assert [line for line in lines if line.startswith("failed")] == []
        return lines[-1].split()

    def until(self, reached: Callable[[], bool]) -> None:
        """Poll until it is so."""
        ends = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < ends, "nothing happens any more"
            time.sleep(0.2 if self._where.startswith("http") else 0.01)

    def until_rounds(self, count: int) -> None:
        """Poll until so many rounds are committed."""
        self.until(lambda: self.rounds() >= count)

    def rounds(self) -> int:
        """How many rounds are committed."""
        return len([key for key in self._keys("rounds/") if re.fullmatch(RECORD, key)])

    def closer(self) -> str | None:
        """The claimant of the newest round."""
        keys = self._keys(f"claims/{self.rounds():010d}/")
        data = asyncio.run(_get(self._box, keys[-1])) if keys else None
        return None if data is None else json.loads(bytes(data))["learner"]

    def _keys(self, prefix: str) -> Sequence[str]:
        return asyncio.run(_list(self._box, prefix))

    def mirror(self) -> None:
        """Copy what is in a bucket to ``root``, to look at it there."""
        box = self._box
        for key in asyncio.run(_list(box, "")):
            data = asyncio.run(_get(box, key))
            if data is not None:
                path = self.root / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


RECORD = r"rounds/\d{10}\.json"


async def _list(box: Mailbox, prefix: str) -> Sequence[str]:
    return await box.list(prefix)


async def _get(box: Mailbox, key: str) -> Buffer | None:
    return await box.get(key)


def record_names(folder: Path) -> list[str]:
    """Names of the round records, in order."""
    return sorted(p.name for p in folder.iterdir() if re.fullmatch(r"\d{10}\.json", p.name))


def check_folder(root: Path) -> list[dict[str, Any]]:
    """No gap, versions rise by one, and every payload that is there hashes to its ref."""
    names = record_names(root / "rounds")
    assert names == [f"{number:010d}.json" for number in range(len(names))]
    records = [json.loads((root / "rounds" / name).read_bytes()) for name in names]
    for number, record in enumerate(records):
        assert (record["round"], record["fragment"], record["version"]) == (
            number,
            number % 2,
            number // 2 + 1,
        )
        assert record["participants"]
        for kind in ("theta", "outer"):
            ref = record[kind]
            path = root / ref["key"]
            if number >= len(records) - 4:
                assert path.exists(), f"{kind} of round {number} of {len(records)} is gone"
            if path.exists():
                data = path.read_bytes()
                assert len(data) == ref["size"]
                assert hashlib.sha256(data).hexdigest() == ref["sha256"]
    return records


def left_behind(root: Path, fragments: int = 2) -> list[str]:
    """Objects that the last commit made unnecessary."""
    last = len(record_names(root / "rounds")) - 1
    found = []
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if not path.is_file():
            continue
        match parts:
            case ["snapshots" | "claims", number, _] if number.isdigit():
                gone = int(number) <= last
            case ["blobs", "snapshots", number, *_] if number.isdigit():
                gone = int(number) <= last
            case ["blobs", "rounds", number, _] if number.isdigit():
                gone = int(number) <= last - 2 * fragments
            case _:
                gone = False
        if gone:
            found.append("/".join(parts))
    return found
