"""The timings in records: against the recorded runs of the published version, and in a world."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.node.history import check_history, records
from tests.node.worlds import World, delta_payload, plant_snapshot

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.estimates import moving_average
from gradientmail.testing.simulated import Connection
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import train_together

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("run", ["f32-default", "bf16-f4-zstd"])
def test_recorded_estimates_follow_from_snapshots_and_quorum_seconds(run: str) -> None:
    root = GOLDEN / run
    step = quorum = None
    sync: list[float | None] = []
    for path in sorted((root / "rounds").iterdir()):
        record: dict[str, Any] = json.loads(path.read_bytes())
        folder = root / "snapshots" / f"{record['round']:010d}"
        seconds = [
            json.loads((folder / f"{row['learner']}.json").read_bytes())["step_seconds"]
            for row in record["participants"]
        ]
        known = [value for value in seconds if value is not None]
        step = moving_average(step, sum(known) / len(known) if known else None)
        quorum = moving_average(quorum, record["quorum_seconds"])
        estimates = record["estimates"]
        assert estimates["step"] == pytest.approx(step, rel=1e-9)
        assert estimates["quorum"] == pytest.approx(quorum, rel=1e-9)
        sync.append(estimates["sync"])
    # Known to its maker alone: it is there from the second record on, or one later after a change.
    assert sync[0] is None
    assert sync[-1] is not None


def test_estimates_of_a_world_are_the_averages_of_what_happened() -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=6, fragments=2, quorum_size=2))
        link = Connection(latency_seconds=0.1)
        nodes = [
            world.node("a", connection=link),
            world.node("b", step_seconds=1.2, connection=link),
        ]
        await train_together(nodes, 40)
        found = check_history(world.archive)
        assert len(found) >= 10
        step = quorum = None
        for record in found:
            number = record["round"]
            seconds = []
            for row in record["participants"]:
                key = f"snapshots/{number:010d}/{row['learner']}.json"
                seconds.append(json.loads(world.archive.ever[key][0])["step_seconds"])
                assert seconds[-1] == pytest.approx(1.0 if row["learner"] == "a" else 1.2)
            step = moving_average(step, sum(seconds) / len(seconds))
            quorum = moving_average(quorum, record["quorum_seconds"])
            assert record["estimates"]["step"] == pytest.approx(step)
            assert record["estimates"]["quorum"] == pytest.approx(quorum)
        assert found[0]["estimates"]["sync"] is None
        # Two round trips: payloads at once, then the record.
        assert found[1]["estimates"]["sync"] == pytest.approx(0.4)
        assert found[8]["estimates"]["sync"] == pytest.approx(0.4)

    run_virtual(main, limit_seconds=500)


def test_who_has_measured_no_step_says_so() -> None:
    """A learner's first snapshot after its first step; an average that began at 0 would lag."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=2, fragments=2, in_flight=2))
        nodes = [world.node("a", step_seconds=10.0)]
        await train_together(nodes, 20)
        found = check_history(world.archive)
        told = [
            json.loads(world.archive.ever[f"snapshots/{record['round']:010d}/a.json"][0])
            for record in found
        ]
        assert [row["step_seconds"] for row in told[:3]] == [None, 10.0, 10.0]
        assert [record["estimates"]["step"] for record in found[:3]] == [None, 10.0, 10.0]

    run_virtual(main, limit_seconds=500)


@pytest.mark.parametrize("told", [None, 0.0])
def test_an_estimate_of_no_seconds_is_none(told: float | None) -> None:
    """As another implementation may send it."""
    world = World(DiLoCo(sync_every=2, fragments=1, in_flight=1))

    async def main() -> None:
        node = world.node("a", step_seconds=10.0)
        await node.join()
        payload = delta_payload(world.archive, 0, 0.1)
        plant_snapshot(world.archive, 0, "z", payload, step_seconds=told)
        await node.train(8)
        await node.kill()

    run_virtual(main, limit_seconds=500)
    found = records(world.archive)
    first = next(r for r in found if "z" in [p["learner"] for p in r["participants"]])
    assert first["round"] == 0
    assert first["estimates"]["step"] is None
