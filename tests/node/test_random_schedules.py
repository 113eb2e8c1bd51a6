"""Random histories: kills, restarts, latencies, failing calls, hostile objects."""

import asyncio
import json
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.node.history import check_history, check_settled, check_tidy
from tests.node.worlds import (
    World,
    delta_payload,
    live_and_die,
    mortal,
    snapshot_record,
    train_until,
)

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.testing.simulated import Connection
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import train_together

EXAMPLES = 12

connections = st.builds(
    Connection,
    latency_seconds=st.sampled_from([0.0, 0.05, 0.4]),
    jitter_seconds=st.sampled_from([0.0, 0.1, 1.0]),
    failures=st.sampled_from([0.0, 0.0, 0.1]),
)
kills = st.lists(
    st.tuples(st.integers(3, 120), st.sampled_from(["before", "after"]), st.booleans()), max_size=3
)
algorithms = st.builds(
    DiLoCo,
    sync_every=st.sampled_from([4, 6]),
    fragments=st.sampled_from([2, 3]),
    in_flight=st.sampled_from([1, 2]),
    quorum_size=st.sampled_from([1, 2, 3]),
    mixing=st.sampled_from([0.0, 0.5]),
)


async def life_with_kills(
    world: World, name: str, plan: list[tuple[int, Literal["before", "after"], bool]], **how: Any
) -> None:
    """Live, be killed and restart (with the same id or another) as planned, then end well."""
    for number, (at, strike, same_id) in enumerate(plan):
        node = world.node(name if same_id else f"{name}{number}", wrap=mortal(at, strike), **how)
        if await live_and_die(node, 30):
            return
    node = world.node(name, **how)
    await node.join()
    await node.train(20)
    await node.close()


@settings(max_examples=EXAMPLES)
@given(
    seed=st.integers(0, 2**20),
    algorithm=algorithms,
    link=connections,
    plans=st.lists(kills, min_size=2, max_size=3),
    rates=st.lists(st.sampled_from([0.5, 1.0, 1.7]), min_size=3, max_size=3),
)
def test_random_lives(
    seed: int,
    algorithm: DiLoCo,
    link: Connection,
    plans: list[list[tuple[int, Literal["before", "after"], bool]]],
    rates: list[float],
) -> None:
    async def main() -> None:
        world = World(algorithm, seed=seed)
        lives = [
            life_with_kills(
                world,
                f"n{chr(ord('a') + number)}",
                plan,
                connection=link,
                step_seconds=rates[number],
                lease_every=3.0,
                lease_timeout=12.0,
            )
            for number, plan in enumerate(plans)
        ]
        for result in await asyncio.gather(*lives, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        last = world.node("last", lease_every=3.0, lease_timeout=12.0)
        await last.join()
        goal = world.archive.rounds() + 2 * algorithm.fragments + 1
        await train_until(last, lambda: world.archive.rounds() >= goal)
        await last.close()
        check_history(world.archive)
        check_settled(world.archive, last)
        await check_tidy(world)

    run_virtual(main, limit_seconds=50_000)


def mutated(random: Random, record: dict[str, Any]) -> bytes:
    """A snapshot record with something wrong in it."""
    row = json.loads(json.dumps(record))
    name = random.choice(list(row))
    odd: list[Any] = [
        None,
        -1,
        2**63,
        2**70,
        1e308,
        "",
        "x",
        [],
        {},
        True,
        "NaN",
        [[[]]],
        0.5,
        "é" * 3,
    ]
    match random.randrange(6):
        case 0:
            del row[name]
        case 1:
            row[name] = random.choice(odd)
        case 2:
            row["payload"][random.choice(list(row["payload"]))] = random.choice(odd)
        case 3:
            return json.dumps(row).encode().replace(b"0.01", b"NaN")[: random.randrange(400)]
        case 4:
            data = bytearray(json.dumps(row).encode())
            data[random.randrange(len(data))] = random.randrange(256)
            return bytes(data)
        case _:
            return b"[" * random.choice([10, 50_000])
    return json.dumps(row).encode()


def damaged(random: Random, payload: bytes) -> bytes:
    """A payload with something wrong in it."""
    data = bytearray(payload)
    match random.randrange(5):
        case 0:
            return bytes(data[: random.randrange(len(data))])
        case 1:
            data[random.randrange(8)] = random.randrange(256)  # the header's length
        case 2:
            at = random.randrange(8, min(len(data), 200))
            data[at] = random.choice(b'{}[]":,0919a')  # the header
        case 3:
            return b"\xff" * 8 + bytes(data[8:])
        case _:
            data += random.randbytes(random.randrange(1, 100))
    return bytes(data)


@pytest.mark.parametrize("seed", range(6))
def test_hostile_snapshots_never_stop_a_closer(seed: int) -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, quorum_size=4), seed=seed)
        random = Random(seed)
        nodes = [world.node("a"), world.node("b")]
        done = asyncio.ensure_future(train_together(nodes, 30))
        await asyncio.sleep(1.5)
        archive = world.archive
        for number in range(12):
            for learner in ("bad", "worse", "worst"):
                payload = delta_payload(archive, number % 2)
                if random.random() < 0.5:
                    payload = damaged(random, payload)
                record = snapshot_record(archive, number, learner, payload)
                if record["payload"]["key"] not in archive.ever:
                    archive.plant(record["payload"]["key"], payload)
                raw = json.dumps(record).encode()
                if random.random() < 0.6:
                    raw = mutated(random, record)
                archive.plant(f"snapshots/{number:010d}/{learner}.json", raw)
        await done
        # The planted objects may be good ones too; what was committed follows from what was listed.
        found = check_history(archive)
        assert len(found) >= 10
        for record in found[:10]:
            assert {"a", "b"} <= {row["learner"] for row in record["participants"]}
        for node in nodes:
            check_settled(archive, node)

    run_virtual(main, limit_seconds=1000)
