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
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gradientmail.mailbox.filesystem import FilesystemMailbox

HERE = Path(__file__).parent
PATIENCE = 60.0


class Fleet:
    """The processes of one run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "run"
        self.folder = folder
        self._outputs: dict[str, Path] = {}

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.node_process", "serve"],
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
        answer = self._ask(f"start {self.root} {learner} {rounds} {out}")
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
            time.sleep(0.01)

    def until_rounds(self, count: int) -> None:
        """Poll until so many rounds are committed."""
        self.until(lambda: self.rounds() >= count)

    def rounds(self) -> int:
        """How many rounds are committed."""
        folder = self.root / "rounds"
        return len(record_names(folder)) if folder.exists() else 0

    def closer(self) -> str | None:
        """The claimant of the newest round."""
        box = FilesystemMailbox(self.root)
        keys = asyncio.run(box.list(f"claims/{self.rounds():010d}/"))
        data = asyncio.run(box.get(keys[-1])) if keys else None
        return None if data is None else json.loads(bytes(data))["learner"]


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
