"""A closer is killed before and after each of its calls; the run must be as if it had not been."""

import asyncio
from functools import partial
from typing import Literal

import pytest
from tests.node.history import check_history, check_settled, check_tidy
from tests.node.worlds import (
    MortalMailbox,
    World,
    live_and_die,
    mortal,
    train_until,
)

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.testing.virtual_time import run_virtual

ALGORITHM = DiLoCo(sync_every=4, fragments=2, in_flight=2)
STEPS = 5


async def history_with_a_kill(at: int, strike: Literal["before", "after"]) -> tuple[bool, str]:
    """One node dies at its ``at``-th call while it creates, closes and sweeps; one survives."""
    world = World(ALGORITHM)
    doomed = world.node("doomed", wrap=mortal(at, strike), poll=0.5, lease_every=2, lease_timeout=6)
    other = world.node("other", poll=0.5, lease_every=2, lease_timeout=6)

    async def survive() -> None:
        await asyncio.sleep(0.1)
        await other.join()
        goal = max(4, world.archive.rounds() + 2)
        await train_until(other, lambda: died.done() and world.archive.rounds() >= goal)
        goal = world.archive.rounds() + 2
        await train_until(other, lambda: world.archive.rounds() >= goal)
        assert await other.close() == ()

    died = asyncio.ensure_future(live_and_die(doomed, STEPS))
    await asyncio.gather(died, survive())
    check_settled(world.archive, other)
    await check_tidy(world)
    check_history(world.archive)
    assert isinstance(doomed.mailbox, MortalMailbox)
    return await died, doomed.mailbox.last


@pytest.mark.parametrize("strike", ["before", "after"])
def test_a_kill_at_any_call_leaves_the_run_as_it_should_be(
    strike: Literal["before", "after"],
) -> None:
    killed_at = []
    at = 1
    while True:
        history = partial(history_with_a_kill, at, strike)
        lived, last = run_virtual(history, limit_seconds=3000)
        if lived:
            break
        killed_at.append(last)
        at += 1
    # The calls of a closer were all among them, and enough of them.
    said = " ".join(killed_at)
    for needed in ("leases/", "claims/manifest", "blobs/init", "manifest.json", "rounds/"):
        assert f"put_if_absent {needed}" in said, needed
    for needed in ("claims/0000000001", "blobs/rounds", "snapshots/0000000000"):
        assert f"put_if_absent {needed}" in said, needed
    assert "delete snapshots/0000000000" in said
    assert at > 45
