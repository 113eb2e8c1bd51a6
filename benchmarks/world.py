"""A run of many nodes in virtual time: how long an hour of it takes on one core.

``uv run benchmarks/world.py [--nodes 100 1000] [--hours 1] [--json]``

Every node is the real loop half and the real learner, over one simulated store with a latency;
tensors have four numbers. Steps that only count pass on one timer. What is left is what nodes do
all the time (polls, leases, records, snapshots), so this shows what that costs, too.
"""

import argparse
import asyncio
import gc
import time
from dataclasses import dataclass

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.events import Event
from gradientmail.exchange import layout
from gradientmail.exchange.records import RoundRecord
from gradientmail.node import Settings
from gradientmail.testing.simulated import Connection, SimulatedStore
from gradientmail.testing.vector import Vector
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import SimulatedNode, Training

FRAGMENTS = 4
NUDGE_EVERY = 16
"""Steps from one change of a model to the next: training is not what is measured."""


@dataclass(frozen=True, slots=True)
class World:
    """What became of a run."""

    nodes: int
    virtual_seconds: int
    records: tuple[RoundRecord, ...]
    objects: int
    cpu_seconds: float

    def row(self) -> dict[str, object]:
        """The figures."""
        present = [len(one.participants) / self.nodes for one in self.records[1:]]
        return {
            "nodes": self.nodes,
            "virtual_hours": round(self.virtual_seconds / 3600, 2),
            "rounds": len(self.records),
            "in_a_round_%": round(100 * sum(present) / max(len(present), 1), 1),
            "objects": self.objects,
            "cpu_s": round(self.cpu_seconds, 1),
            "times_faster": round(self.virtual_seconds / self.cpu_seconds),
            "cpu_ms_per_node_hour": round(
                1e3 * self.cpu_seconds / self.nodes / self.virtual_seconds * 3600, 1
            ),
        }


def run_world(nodes: int, seconds: int, *, sync_every: int = 500) -> World:
    """So many nodes train for ``seconds`` of a step each, and stop where they are."""
    algorithm = DiLoCo(
        sync_every=sync_every, fragments=FRAGMENTS, quorum_size=max(1, nodes * 9 // 10)
    )
    store = SimulatedStore(seed=1)

    def make(number: int) -> SimulatedNode:
        values = {f"w{place}": [float(place)] * 4 for place in range(FRAGMENTS)}
        return SimulatedNode(
            mailbox=store.view(Connection(latency_seconds=0.05)),
            settings=Settings(f"n{number:04d}", 10.0, lease_every=600.0, lease_timeout=1800.0),
            algorithm=algorithm,
            training=Training(Vector(values), _nudge, steps_at_once=10**6),
            seed=number,
            announce=_ignore,
        )

    async def live(node: SimulatedNode) -> None:
        await node.join()
        await node.train(seconds)

    async def main() -> tuple[tuple[RoundRecord, ...], int]:
        all_nodes = [make(number) for number in range(nodes)]
        await asyncio.gather(*map(live, all_nodes))
        keys = await store.mailbox.list("")
        rounds = [key for key in keys if layout.parse_round_key(key) is not None]
        found = [RoundRecord.from_bytes(await store.mailbox.get(key) or b"") for key in rounds]
        for node in all_nodes:
            await node.kill()
        return tuple(found), len(keys)

    gc.disable()  # it would look through all that the nodes hold again and again
    try:
        began = time.process_time()
        records, objects = run_virtual(main)
        return World(nodes, seconds, records, objects, time.process_time() - began)
    finally:
        gc.enable()


def _nudge(model: object, local_step: int) -> None:
    if local_step % NUDGE_EVERY == 0:
        assert isinstance(model, Vector)
        model.shift(NUDGE_EVERY / 100)


def _ignore(event: Event) -> None:
    del event


def main() -> None:
    """Run and print."""
    from measure import show  # it imports torch, which a world has no use for

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--hours", type=float, default=1.0)
    args = parser.parse_args()
    rows = [run_world(nodes, round(3600 * args.hours)).row() for nodes in args.nodes]
    show("world", rows, as_json=args.json)


if __name__ == "__main__":
    main()
