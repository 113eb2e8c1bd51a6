"""A round that is about to close without a learner is due at once, and is told in time."""

import asyncio
import json
from dataclasses import replace

import pytest
from tests.node.worlds import World, drift

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.testing.virtual_time import run_virtual


@pytest.mark.parametrize("closer", ["a", "b"])
@pytest.mark.parametrize("gap", [10, 100, 2000])
def test_who_became_slow_publishes_when_the_others_have(closer: str, gap: int) -> None:
    """Its steps came fast when it was told when its round is due, and the other waits for it."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=2 * gap, fragments=2, quorum_size=2))
        nodes = {
            "a": world.node("a", change=drift(0), step_seconds=1e-5),
            "b": world.node("b", change=drift(1), step_seconds=1.0 / gap),
        }
        for name in sorted(nodes, key=lambda name: name != closer):
            await nodes[name].join()
        await nodes["a"].train(4)
        await nodes["b"].train(gap)
        await nodes["b"].clock.sleep(1.0)
        nodes["a"].training = replace(nodes["a"].training, step_seconds=0.2)
        await nodes["a"].train(3)
        await nodes["b"].clock.sleep(0.5)
        snapshot = json.loads(world.archive.ever["snapshots/0000000000/a.json"][0])
        assert snapshot["local_step"] <= 6
        for node in nodes.values():
            await node.kill()

    run_virtual(main, limit_seconds=500)


@pytest.mark.parametrize("quorum", [3, 8])
@pytest.mark.parametrize("how", ["leaves", "is killed"])
def test_who_is_slow_publishes_when_those_who_are_left_have(how: str, quorum: int) -> None:
    """Of three one has; when another goes, that one is enough."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=2000, fragments=2, quorum_size=quorum))
        nodes = {
            "a": world.node("a", change=drift(0), step_seconds=0.001),
            "b": world.node("b", change=drift(1), step_seconds=1.0),
            "c": world.node("c", change=drift(2), step_seconds=1.0),
        }
        for node in nodes.values():
            await node.join()
        await nodes["a"].train(1000)
        training = asyncio.ensure_future(nodes["b"].train(60))
        await nodes["c"].clock.sleep(20.0)
        key = "snapshots/0000000000/b.json"
        assert key not in world.archive.ever
        await (nodes["c"].close() if how == "leaves" else nodes["c"].kill())
        await training
        steps = json.loads(world.archive.ever[key][0])["local_step"]
        assert 20 < steps < 45
        for name in "ab":
            await nodes[name].kill()

    run_virtual(main, limit_seconds=500)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_round_whose_snapshots_wait_is_published_by_the_step_that_makes_it_next(
    in_flight: int,
) -> None:
    """The commit on its way to a slow learner tells which round is next, before it is taken in."""

    async def main() -> None:
        algorithm = DiLoCo(sync_every=40, fragments=2, in_flight=in_flight, quorum_size=8)
        world = World(algorithm)
        nodes = {
            "quick": world.node("quick", change=drift(0), step_seconds=0.1),
            "slow": world.node("slow", change=drift(1), step_seconds=2.0),
        }
        for node in nodes.values():
            await node.join()
        await asyncio.gather(nodes["quick"].train(2000), nodes["slow"].train(100))
        rounds = nodes["slow"].learner.rounds_seen + 1
        # One a step; with the next round told of a step late, one in two.
        assert 90 <= rounds <= 100
        for node in nodes.values():
            await node.kill()

    run_virtual(main, limit_seconds=1000)
