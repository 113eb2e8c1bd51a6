"""The store in a folder between real processes: races, kills at every point, a full disk."""

# ruff: noqa: PTH208 - system calls are what is tested.

import asyncio
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.mailbox.store_process import LARGE_BYTES

from gradientmail.mailbox import FilesystemMailbox
from gradientmail.testing.mailbox_races import content

REPOSITORY = Path(__file__).parents[2]
both_ways = pytest.mark.parametrize("links", ["links", "renames"])

type Process = subprocess.Popen[str]


class Processes:
    """Starts ``store_process.py`` and ends what it started."""

    def __init__(self) -> None:
        self._started: list[Process] = []

    def start(self, *arguments: object) -> Process:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.mailbox.store_process", *map(str, arguments)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def finish(self, process: Process) -> Any:
        """Wait for its end; the values of its lines."""
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        return [json.loads(line) for line in output.splitlines()]

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def processes() -> Generator[Processes]:
    started = Processes()
    yield started
    started.close()


@both_ways
def test_one_of_16_processes_wins_each_key(
    tmp_path: Path, processes: Processes, links: str
) -> None:
    wins = processes.finish(processes.start("race", tmp_path, links))
    assert sorted(number for number, _ in wins) == list(range(16))
    winner = {key: number for number, keys in wins for key in keys}
    assert sum(len(keys) for _, keys in wins) == len(winner) == 30
    for key, number in winner.items():
        found = (tmp_path / f"race/{key % 3}/{key}").read_bytes()
        assert found == str(number).encode() * 10_000
    assert os.listdir(tmp_path / ".tmp") == []


@both_ways
def test_killed_before_each_system_call(tmp_path: Path, processes: Processes, links: str) -> None:
    """``store_process.steps`` looks after each kill; here: it did meet every kind of them."""
    [seen] = processes.finish(processes.start("steps", tmp_path / "run", links))
    assert seen["steps"] > 15
    assert seen["absent"] > 5
    assert seen["whole"] > 5
    assert seen["left over"] > 5


def kill_writers(root: Path, processes: Processes, links: str, seed: int, kills: int) -> None:
    """Kill one writer after another at random moments, reading meanwhile."""
    random = Random(seed)
    print("seed", seed)

    async def check(mailbox: FilesystemMailbox, keys: Sequence[str]) -> None:
        for key in keys:
            assert content(await mailbox.get(key)) == bytes([int(key[6:]) % 251]) * LARGE_BYTES

    async def main() -> None:
        reader = FilesystemMailbox(root)
        checked = ""
        for kill in range(kills):
            first = int(checked[6:] or 0)
            writer = processes.start("write", root, links, first)
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            end, newest = time.monotonic() + random.uniform(0.0, 0.15), ""
            # The first lives until one object is whole, or on a slow disk none would ever be.
            while time.monotonic() < end or not (kill or newest):
                for newest in (await reader.list("large/", after=checked))[-1:]:
                    await check(reader, [newest])
            writer.kill()
            writer.wait()
            keys = await FilesystemMailbox(root).list("large/", after=checked)
            await check(reader, keys)
            assert os.listdir(root / ".tmp") == [], kill
            await reader.delete(keys[:-1])
            checked = keys[-1] if keys else checked
        assert checked

    asyncio.run(main())


@both_ways
def test_writers_killed_at_random_moments(tmp_path: Path, processes: Processes, links: str) -> None:
    kill_writers(tmp_path, processes, links, seed=11, kills=3)


@pytest.mark.soak
def test_many_writers_killed(tmp_path: Path, processes: Processes) -> None:
    kill_writers(tmp_path, processes, "links", seed=12, kills=5)


@both_ways
def test_file_size_limit(tmp_path: Path, processes: Processes, links: str) -> None:
    """The limit strikes in the middle of the file, and what had been written is gone."""
    [(code, message, left)] = processes.finish(processes.start("limit", tmp_path, links))
    assert (code, left) == (errno.EFBIG, [])
    assert "File too large" in message
    assert str(tmp_path / "too/large") in message


def test_full_disk(tmp_path: Path) -> None:
    """A real file system of 4 MB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        asyncio.run(fill_up(tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


async def fill_up(root: Path) -> None:
    mailbox = FilesystemMailbox(root / "run")
    assert await mailbox.put_if_absent("large/1", bytes(3 * 2**20))
    with pytest.raises(OSError, match=r"No space left on device.*free space there") as caught:
        await mailbox.put_if_absent("large/2", bytes(3 * 2**20))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(root / "run/large/2")
    assert os.listdir(root / "run/.tmp") == []
    assert await mailbox.get("large/2") is None
    assert list(await mailbox.list("")) == ["large/1"]
    await mailbox.delete(["large/1"])
    assert await mailbox.put_if_absent("large/2", bytes(3 * 2**20))
