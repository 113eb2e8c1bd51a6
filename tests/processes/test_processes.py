"""Nodes as processes over a folder, killed at random moments with SIGKILL."""

import time
from pathlib import Path
from random import Random

import pytest
from tests.processes.fleet import Fleet, check_folder, left_behind

STRAYS = (
    ".DS_Store",
    "rounds/notes.txt",
    "rounds/.DS_Store",
    "snapshots/x",
    "snapshots/.DS_Store",
    "snapshots/folder/.keep",
    "claims/README.md",
    "leases/UPPER/0000000001.json",
    "blobs/rounds/.DS_Store",
    "blobs/snapshots/x/y",
)


def test_processes_agree_survive_kills_and_restarts(tmp_path: Path) -> None:
    seed = 1
    print(f"seed {seed}")
    random = Random(seed)
    with Fleet(tmp_path) as fleet:
        # Two agree.
        fleet.start("a", 10)
        fleet.start("b", 10)
        last = [fleet.ended("a"), fleet.ended("b")]
        assert {line[0] for line in last} == {"closed"}
        if last[0][1] == last[1][1]:
            assert last[0][2] == last[1][2]
        records = check_folder(fleet.root)
        assert len(records) >= 10
        assert max(int(line[1]) for line in last) == len(records) - 1

        # A learner that does not close dies: the other goes on, without it after a while.
        fleet.start("a")
        fleet.start("b")
        fleet.joined("a")
        fleet.joined("b")
        before = fleet.rounds()
        fleet.until_rounds(before + 4)
        closer = fleet.closer()
        victim = "a" if closer == "b" else "b"
        fleet.kill(victim)
        before = fleet.rounds()
        fleet.until_rounds(before + 4)

        # The closer dies; the same id is back at once.
        survivor = "a" if victim == "b" else "b"
        fleet.start(victim)
        fleet.joined(victim)
        for _ in range(3):
            fleet.kill(survivor)
            fleet.start(survivor)
            fleet.joined(survivor)
            before = fleet.rounds()
            fleet.until_rounds(before + random.randrange(1, 4))
        fleet.kill("a")
        fleet.kill("b")

        # Whoever comes next finds a run in order, whatever else lies in the folder.
        for stray in STRAYS:
            path = fleet.root / stray
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"not ours")
        fleet.start("c", 8)
        line = fleet.ended("c")
        records = check_folder(fleet.root)
        assert int(line[1]) == len(records) - 1
        assert left_behind(fleet.root) == []
        assert all((fleet.root / stray).exists() for stray in STRAYS)


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [1])
def test_the_closer_is_killed_again_and_again(seed: int, tmp_path: Path) -> None:
    """25 kills of whoever closes, at random moments; two others stay."""
    print(f"seed {seed}")
    random = Random(seed)
    with Fleet(tmp_path) as fleet:
        for learner in ("a", "b", "c"):
            fleet.start(learner)
        for learner in ("a", "b", "c"):
            fleet.joined(learner)
        for _ in range(25):
            before = fleet.rounds()
            fleet.until_rounds(before + 1)
            time.sleep(random.uniform(0, 0.12))
            closer = fleet.closer()
            victim = closer if closer in ("a", "b", "c") else random.choice("abc")
            fleet.kill(victim)
            if random.random() < 0.5:
                time.sleep(random.uniform(0, 0.3))
            fleet.start(victim)
        for learner in ("a", "b", "c"):
            fleet.joined(learner)
            fleet.kill(learner)
        fleet.start("d", 8)
        line = fleet.ended("d")
        records = check_folder(fleet.root)
        assert int(line[1]) == len(records) - 1
        assert len(records) >= 25
        assert left_behind(fleet.root) == []
