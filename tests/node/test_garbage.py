"""Nodes whose mailbox others write garbage into: they go on, and what they commit is right."""

import asyncio
import json
from random import Random

import pytest
from tests.node.garbage import Garbage, committed, remove_strays
from tests.node.history import check_history, check_settled, records
from tests.node.worlds import (
    World,
    delta_payload,
    happened,
    live_and_die,
    mortal,
    plant_snapshot,
)

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.committing import MOST_REJECTED
from gradientmail.events import LearnerLost, LeaseLost, TaskFailed
from gradientmail.exchange.records import ROUND_LIMIT
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import SimulatedNode

ALGORITHM = DiLoCo(sync_every=4, fragments=2, in_flight=2)


def failures(node: SimulatedNode) -> list[TaskFailed]:
    """What a node reported as failed."""
    return happened(node, TaskFailed)


def test_a_record_that_lists_much_garbage_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = [f"{number:064d}" for number in range(MOST_REJECTED)]
    row = json.dumps([longest[0], max(("corrupt", "zero_steps", "missing"), key=len)])
    assert MOST_REJECTED * (len(row) + 1) < ROUND_LIMIT / 4
    monkeypatch.setattr("gradientmail.committing.MOST_REJECTED", 3)

    async def main() -> None:
        world = World(ALGORITHM)
        node = world.node("a")
        await node.join()
        for name in "fbdce":
            await world.archive.put_if_absent(f"snapshots/0000000001/{name}.json", b"{}")
        await node.train(12)
        assert records(world.archive)[1]["rejected"] == [[name, "corrupt"] for name in "bcd"]
        assert committed(world.archive) >= 4
        await node.kill()

    run_virtual(main, limit_seconds=900)


@pytest.mark.parametrize("quorum_size", [1, 2])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 5))]
)
def test_a_run_goes_on_beside_a_writer_of_garbage(seed: int, quorum_size: int) -> None:
    """Under every prefix, ten times a second; one node is killed and comes back in it."""

    async def main() -> None:
        algorithm = DiLoCo(sync_every=4, fragments=2, in_flight=2, quorum_size=quorum_size)
        world = World(algorithm, seed=seed)
        first = world.node("a")
        await first.join()
        garbage = Garbage(world.archive, Random(seed), ("a", "b"))
        writing = asyncio.ensure_future(garbage.write_for_ever(0.2))
        second = world.node("b", wrap=mortal(120 + 10 * seed, "after"))
        training = asyncio.ensure_future(first.train(70))
        assert not await live_and_die(second, 200)
        again = world.node("b")
        await again.join()
        await again.train(30)
        await training
        assert committed(world.archive) >= 20
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        for node in (first, again):
            assert happened(node, LeaseLost) == []
            assert failures(node) == []
        ending = [asyncio.ensure_future(node.close()) for node in (first, again)]
        await asyncio.gather(*ending)
        await remove_strays(world.archive)
        found = check_history(world.archive)
        reasons = {reason for record in found for _, reason in record["rejected"]}
        assert {"corrupt", "schema", "stale", "zero_steps"} <= reasons
        both = [r for r in found if {"a", "b"} <= {part["learner"] for part in r["participants"]}]
        assert len(both) >= 10
        for node in (first, again):
            check_settled(world.archive, node)
        assert garbage.count > 500

    run_virtual(main, limit_seconds=3000)


async def started(world: World, steps: int = 9) -> SimulatedNode:
    """A node "a" that has trained alone."""
    node = world.node("a")
    await node.join()
    await node.train(steps)
    return node


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"x" * 70_000, b'{"token":7}'])
@pytest.mark.parametrize("number", [2, 57, 10**10 - 1])
def test_garbage_under_a_lease_replaces_nobody(number: int, body: bytes) -> None:
    """It names no process; a node that took it for one would stop training."""

    async def main() -> None:
        world = World(ALGORITHM)
        node, other = world.node("a", lease_every=3.0), world.node("b", lease_every=3.0)
        await node.join()
        await other.join()
        world.archive.plant(f"leases/a/{number:010d}.json", body)
        await asyncio.gather(node.train(30), other.train(30))
        assert happened(node, LeaseLost) == []
        assert happened(other, LearnerLost) == []
        assert failures(node) == []
        beats = [await world.archive.get(key) for key in world.archive.now("leases/a/")]
        assert body not in beats
        await node.close()
        await other.close()

    run_virtual(main, limit_seconds=900)


def test_a_beat_just_before_the_last_leaves_room_for_a_restart() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        await (await started(world)).close()
        world.archive.plant(f"leases/a/{10**10 - 2:010d}.json", b"{}")
        again = world.node("a", lease_every=2.0)
        await again.join()
        await again.train(20)
        assert failures(again) == []
        await again.close()
        assert world.archive.now("leases/a/") == []

    run_virtual(main, limit_seconds=900)


@pytest.mark.parametrize("body", [b"", b"[" * 200_000, b"x" * 5_000_000, b"{}"])
@pytest.mark.parametrize("steps", [15, 22])
def test_garbage_ahead_of_the_run_does_not_hide_its_end(steps: int, body: bytes) -> None:
    """Under every key where a joining node looks for the last record."""

    async def main() -> None:
        world = World(ALGORITHM)
        node = await started(world, steps)
        count = world.archive.rounds()
        for number in range(count + 3, count + 70):
            world.archive.plant(f"rounds/{number:010d}.json", body)
        late = world.node("b")
        await late.join()
        assert late.node.rounds_seen >= count - 1
        await node.close()
        await late.close()
        assert failures(late) == []

    run_virtual(main, limit_seconds=900)


def test_an_object_in_the_place_of_the_next_record_is_told_and_the_training_goes_on() -> None:
    """No round can be committed, nothing is merged again and again; removing it is enough."""

    async def main() -> None:
        world = World(ALGORITHM)
        node, other = await started(world), world.node("b")
        await other.join()
        count = world.archive.rounds()
        key = f"rounds/{count:010d}.json"
        world.archive.plant(key, b"not a record")
        await asyncio.gather(node.train(60), other.train(60))
        for one in (node, other):
            told = {event.task: event.error for event in failures(one)}
            assert key in told["poll"]
            assert "until it is removed" in told["poll"]
            assert happened(one, LearnerLost) == []
        assert (
            len([k for k in world.archive.ever if k.startswith(f"blobs/rounds/{count:010d}")]) <= 4
        )
        await world.archive.delete([key])
        await asyncio.gather(node.train(30), other.train(30))
        assert world.archive.rounds() >= count + 8
        world.archive.ever[key] = world.archive.ever[key][1:]
        await asyncio.gather(node.close(), other.close())
        check_history(world.archive)

    run_virtual(main, limit_seconds=900)


def test_a_node_that_was_behind_a_record_since_damaged_catches_up_by_the_later_ones() -> None:
    """The record was one; what it said of its fragment is superseded P rounds later."""

    async def main() -> None:
        world = World(ALGORITHM)
        node, other = await started(world), world.node("b")
        await other.join()
        cut_off = world.store.views[1]
        await asyncio.gather(node.train(4), other.train(4))
        cut_off.pause()
        count = world.archive.rounds()
        await node.train(40)
        assert world.archive.rounds() >= count + 6
        damaged = f"rounds/{count + 1:010d}.json"
        good = world.archive.ever[damaged][0]
        world.archive._objects[damaged] = good[:100]
        cut_off.resume()
        await asyncio.gather(node.train(40), other.train(40))
        assert other.learner.rounds_seen >= world.archive.rounds() - 3
        world.archive._objects[damaged] = good
        await asyncio.gather(node.close(), other.close())
        found = check_history(world.archive)
        assert any(part["learner"] == "b" for part in found[-2]["participants"])

    run_virtual(main, limit_seconds=900)


def test_what_comes_and_goes_under_init_is_no_creator_at_work() -> None:
    """A creator died; whoever waits takes over though strangers keep writing beside it."""

    async def main() -> None:
        world = World(ALGORITHM)
        world.archive.plant("claims/manifest/001.json", b'{"learner":"dead"}')

        async def write() -> None:
            for number in range(10_000):
                await asyncio.sleep(0.5)
                await world.archive.put_if_absent(f"blobs/init/{number}.txt", b"x")

        writing = asyncio.ensure_future(write())
        node = world.node("a")
        await node.join()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await node.close()
        assert world.archive.now("claims/manifest/002.json") != []

    run_virtual(main, limit_seconds=60)


@pytest.mark.parametrize("seconds", [1e300, 2.0**62, 2**62])
def test_an_absurd_time_in_one_record_does_not_make_later_rounds_wait(seconds: float) -> None:
    """The grace is a multiple of it; a learner that lives and does not step never ends it early."""

    async def main() -> None:
        world = World(ALGORITHM)
        node, idle = await started(world), world.node("b")
        await idle.join()
        count = world.archive.rounds()
        for number in range(count, count + 3):
            payload = delta_payload(world.archive, number % 2)
            plant_snapshot(world.archive, number, "ghost", payload, step_seconds=seconds)
        await node.train(100)
        assert world.archive.rounds() >= count + 20
        taken = {p["learner"] for r in check_history(world.archive) for p in r["participants"]}
        assert "ghost" in taken
        await node.kill()
        await idle.kill()

    run_virtual(main, limit_seconds=900)
