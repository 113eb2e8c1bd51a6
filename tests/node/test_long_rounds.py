"""Rounds of a minute, at default lease options: what a dead node costs, at the worst moment."""

import asyncio
from typing import Literal

import pytest
from tests.node.worlds import World, happened

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.events import LeaseRenewed, RoundCommitted
from gradientmail.testing.simulated import Connection
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import SimulatedNode

ROUND, TIMEOUT = 60.0, 120.0


def now() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


def by_role(nodes: list[SimulatedNode], role: Literal["closer", "learner"]) -> SimulatedNode:
    """The node that closed the newest round, or another."""
    newest = [max((e.round for e in happened(n, RoundCommitted)), default=-1) for n in nodes]
    closer = nodes[newest.index(max(newest))]
    return closer if role == "closer" else next(node for node in nodes if node is not closer)


async def beats_late_in_a_round(
    world: World, nodes: list[SimulatedNode], role: Literal["closer", "learner"]
) -> tuple[SimulatedNode, float]:
    """Wait until a node of this role beats when a round is almost due; that round's start."""
    rounds, began, beats = 0, now(), dict.fromkeys(range(len(nodes)), 0)
    while True:
        await asyncio.sleep(0.5)
        if world.archive.rounds() != rounds:
            rounds, began = world.archive.rounds(), now()
        counts = {i: len(happened(node, LeaseRenewed)) for i, node in enumerate(nodes)}
        fresh, beats = {i for i in counts if counts[i] != beats[i]}, counts
        node = by_role(nodes, role)
        if rounds > 6 and now() - began > 0.75 * ROUND and nodes.index(node) in fresh:
            return node, began


async def next_commit(world: World) -> None:
    """Wait for it."""
    before = world.archive.rounds()
    while True:
        await asyncio.sleep(0.5)
        if world.archive.rounds() != before:
            return


@pytest.mark.parametrize("role", ["closer", "learner"])
def test_a_node_that_dies_with_a_fresh_beat_delays_a_round_by_one_lease_timeout(
    role: Literal["closer", "learner"],
) -> None:
    """Its beat must be noticed by the time the round is due, and its end when that runs out."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=12, fragments=2, in_flight=2, quorum_size=2))
        nodes = []
        for name, every in (("a", 59.1), ("b", 57.3)):
            node = world.node(
                name,
                step_seconds=10.0,
                poll=1.0,
                lease_every=every,
                lease_timeout=TIMEOUT,
                connection=Connection(latency_seconds=0.05),
            )
            await node.join()
            nodes.append(node)
            await asyncio.sleep(7)
        training = [asyncio.ensure_future(node.train(2000)) for node in nodes]
        victim, began = await beats_late_in_a_round(world, nodes, role)
        training[nodes.index(victim)].cancel()
        await victim.kill()
        await next_commit(world)
        # Ten seconds: what a round may be late by without surprise, and a few polls.
        assert now() - began - ROUND <= TIMEOUT + 10
        for task in training:
            task.cancel()
        for node in nodes:
            if node is not victim:
                await node.kill()

    run_virtual(main, limit_seconds=20_000)


def test_a_pause_in_training_makes_no_later_loss_longer() -> None:
    """After it a round is expected to take long; a lease that has run out is noticed all the same.

    One hour without a step, as in a notebook; the node dies some rounds later.
    """

    async def main() -> None:
        world = World(DiLoCo(sync_every=10, fragments=2, quorum_size=2))
        nodes = [
            world.node(name, poll=1.0, lease_every=60.0, lease_timeout=TIMEOUT) for name in "ab"
        ]
        for node in nodes:
            await node.join()

        async def life(node: SimulatedNode, steps: int) -> None:
            await node.train(60)
            await asyncio.sleep(3600)
            await node.train(steps)

        survivor = asyncio.ensure_future(life(nodes[0], 10**6))
        await life(nodes[1], 20)
        await nodes[1].kill()
        killed, rounds = now(), world.archive.rounds()
        await next_commit(world)
        if now() - killed < 10:  # one was under way
            await next_commit(world)
        assert world.archive.rounds() <= rounds + 2
        assert now() - killed <= TIMEOUT + 10
        survivor.cancel()
        await nodes[0].kill()

    run_virtual(main, limit_seconds=20_000)
