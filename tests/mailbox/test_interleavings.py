"""Many orders of system calls of several writers, deleters and killed ones, on a real folder."""

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.mailbox.interleaving import Killed, Scheduler, SteppedOs

from gradientmail.mailbox import filesystem, listing, placing, staging
from gradientmail.mailbox.filesystem import FilesystemMailbox

KEY = "folder/deep/key"


class World:
    """A folder, mailboxes on it, and a seeded scheduler of their system calls."""

    def __init__(
        self, root: Path, seed: int, monkeypatch: pytest.MonkeyPatch, *, links: bool
    ) -> None:
        shutil.rmtree(root, ignore_errors=True)
        self.random = Random(seed)
        self.scheduler = Scheduler(self.random, kill_probability=self.random.choice([0, 0.04]))
        self.object = root / KEY
        self.root = root
        self.links = links
        stepped = SteppedOs(self.scheduler.step, str(self.object))
        for module in (filesystem, listing, placing, staging):
            monkeypatch.setattr(module, "os", stepped)

    def open(self) -> FilesystemMailbox:
        mailbox = FilesystemMailbox(self.root)
        mailbox._links = self.links
        return mailbox

    def put(self, data: bytes, key: str = KEY) -> Callable[[], bool]:
        return partial(self.open()._put, key, data, threading.Event())

    def delete(self, key: str = KEY) -> Callable[[], None]:
        return partial(self.open()._delete, (key,))

    def run(self, *works: Callable[[], Any]) -> list[Any]:
        outcomes = self.scheduler.run(works)
        for outcome in outcomes:
            assert isinstance(outcome, bool | Killed | None), self.explain(outcomes)
        return outcomes

    def explain(self, outcomes: list[Any]) -> str:
        return "\n".join([*self.scheduler.trace, *map(repr, outcomes)])


@pytest.fixture(params=[True, False], ids=["links", "renames"])
def make_world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], World]:
    return lambda seed: World(tmp_path / "run", seed, monkeypatch, links=request.param)


@pytest.mark.parametrize("first_seed", [0, 1000])
def test_one_of_three_writers_wins(make_world: Callable[[int], World], first_seed: int) -> None:
    kills = 0
    for seed in range(first_seed, first_seed + 60):
        print("seed", seed)
        world = make_world(seed)
        outcomes = world.run(*(world.put(bytes([n]) * 3) for n in range(3)))
        dead = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Killed)]
        winners = [n for n, outcome in enumerate(outcomes) if outcome is True]
        kills += len(dead)
        before = world.object.read_bytes() if world.object.exists() else None
        assert len(winners) <= 1, world.explain(outcomes)
        assert winners or dead, world.explain(outcomes)
        if winners or False in outcomes:
            assert before in [bytes([n]) * 3 for n in winners or dead], world.explain(outcomes)
        # Whoever was killed, the next writer is not in its way: it creates the object, or finds
        # it, or finishes what a dead one had begun.
        created = world.open()._put(KEY, b"next", threading.Event())
        after = world.object.read_bytes()
        if created:
            assert (before, after) == (None, b"next"), world.explain(outcomes)
        else:
            assert after == before or (before is None and after[0] in dead), world.explain(outcomes)
    assert kills > 0


def test_deleting_between_writers(make_world: Callable[[int], World]) -> None:
    """Nothing is replaced (``SteppedOs`` looks), and what is there at the end was put."""
    for seed in range(80):
        print("seed", seed)
        world = make_world(seed)
        values = [b"one", b"two", b"three"]
        works = [world.delete(), *map(world.put, values), world.delete()]
        outcomes = world.run(*works)
        puts = outcomes[1:4]
        killed = any(isinstance(outcome, Killed) for outcome in outcomes)
        assert killed or True in puts, world.explain(outcomes)
        assert puts.count(True) <= 3, world.explain(outcomes)
        if world.object.exists():
            outcome = puts[values.index(world.object.read_bytes())]
            assert outcome is True or isinstance(outcome, Killed), world.explain(outcomes)


def test_folders_come_and_go(make_world: Callable[[int], World]) -> None:
    """Deleting the last object of a folder while another is put there."""
    for seed in range(60):
        print("seed", seed)
        world = make_world(seed)
        sibling = "folder/deep/sibling"
        assert world.open()._put(sibling, b"", threading.Event())
        outcomes = world.run(world.delete(sibling), world.put(b"one"), world.put(b"two"))
        killed = any(isinstance(outcome, Killed) for outcome in outcomes)
        assert killed or outcomes.count(True) == 1, world.explain(outcomes)
        if True in outcomes:
            assert world.object.read_bytes() == [b"one", b"two"][outcomes.index(True) - 1]


def test_the_check_finds_a_wrong_order(
    make_world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proof that these tests can fail: looking before the turn, not in it, replaces objects."""

    def looks_too_early(
        source: str, target: str, turn: str, make_folder: Callable[[str], None]
    ) -> bool:
        del turn
        if placing.os.path.lexists(target):
            return False
        make_folder(str(Path(target).parent))
        placing.os.rename(source, target)
        return True

    monkeypatch.setattr(filesystem, "rename_once", looks_too_early)
    found = 0
    for seed in range(60):
        world = make_world(seed)
        world.links = False
        outcomes = world.scheduler.run([world.put(b"one"), world.put(b"two")])
        found += any(isinstance(outcome, AssertionError) for outcome in outcomes)
    assert found > 0
