"""What happens to the nodes of a simulated world: drawn from a seed, or written down.

A plan is a value: the same plan gives the same history, on every machine.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.testing.simulated import Connection

type FaultKind = Literal[
    "crash", "pause", "partition", "outage", "leave", "twin", "vandal", "not_finite"
]
FAULT_KINDS: tuple[FaultKind, ...] = (
    "crash",
    "pause",
    "partition",
    "outage",
    "leave",
    "twin",
    "vandal",
    "not_finite",
)


PERFECT = Connection()


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens.

    ``crash``: the node ends as by SIGKILL, and starts again ``seconds`` later. ``pause``: it is
    stopped for so long, and wakes up late. ``partition``: it does not reach the store. ``outage``:
    nobody does. ``leave``: it leaves cleanly and joins again. ``twin``: another process with its id
    joins, which replaces it. ``vandal``: somebody puts snapshots and other objects there that do
    not belong. ``not_finite``: its parameters become NaN.
    """

    at_seconds: float
    kind: FaultKind
    node: int
    seconds: float = 10.0
    again: bool = True
    """Whether the node comes back, after a crash or a leave."""


type How = Literal[
    "lost before",
    "lost after",
    "crash before",
    "crash after",
    "pause after",
    "work before",
    "work after",
]
STRIKES: tuple[How, ...] = (
    "lost before",
    "lost after",
    "crash before",
    "crash after",
    "pause after",
)
"""How a call of the store goes wrong, before or after it acts."""
WORK_STRIKES: tuple[How, ...] = ("work before", "work after")
"""How work beside the loop goes wrong, before or after it is done: memory runs out, say."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One call of one node goes wrong: its ``number``-th from 1 of the store, or of work."""

    node: int
    number: int
    how: How


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node."""

    name: str
    joins_at: float = 0.0
    step_seconds: float = 1.0
    clock_rate: float = 1.0
    connection: Connection = PERFECT


@dataclass(frozen=True, slots=True)
class Formats:
    """How the numbers of a world lie in its models and in its store.

    The precision of deltas and commits is the algorithm's.
    """

    parameters: tuple[str, ...] = ("F32",)
    """F32, F16 or BF16, by turns for one tensor after the other."""
    compressed: tuple[bool, ...] = (False,)
    """Whether payloads are written with zstd, which has to be installed; by turns for each node."""
    buffers: bool = False
    """Whether models have buffers, which are averaged."""


PLAIN = Formats()


@dataclass(frozen=True, slots=True)
class Plan:
    """A world's whole life: faults for ``seconds``, then calm, quiet, and the end."""

    algorithm: DiLoCo
    nodes: tuple[NodePlan, ...]
    faults: tuple[Fault, ...] = ()
    strikes: tuple[Strike, ...] = ()
    seconds: float = 60.0
    seed: int = 0
    poll_interval: float = 0.5
    lease_every: float = 3.0
    lease_timeout: float = 9.0
    formats: Formats = PLAIN


ALGORITHMS = (
    DiLoCo(sync_every=4, fragments=2),
    DiLoCo(sync_every=6, fragments=3, quorum_size=2),
    DiLoCo(sync_every=6, fragments=2, in_flight=1, quorum_size=3),
    DiLoCo(sync_every=5, fragments=2, mixing=0.5, quorum_size=2),
    DiLoCo(sync_every=4, fragments=2, overlap_steps=0),
    DiLoCo(sync_every=6, fragments=3, in_flight=3, overlap_steps=2, quorum_size=2),
    DiLoCo(sync_every=3, fragments=1, in_flight=1, flush_on_close=True),
)


def random_plan(seed: int) -> Plan:
    """The plan of a seed: 1 to 4 nodes, up to 6 faults in a minute or two, any formats."""
    return with_random_formats(faulty_plan(seed), seed)


def with_random_formats(plan: Plan, seed: int) -> Plan:
    """Half of the plans as they are, the others with other formats, and the same faults."""
    random = Random(f"formats {seed}")
    if random.random() < 0.5:
        return plan
    algorithm, kept = plan.algorithm, plan.algorithm.commit_dtype
    algorithm = replace(
        algorithm,
        delta_dtype=random.choice((None, None, "F32", "F16", "BF16", "F8_E4M3", "F4", "F4")),
        commit_dtype=random.choice((kept, kept, kept, "F16", "BF16", "F8_E4M3", "F4", "F4")),
    )
    formats = Formats(
        parameters=random.choice(
            (("F32",), ("F32",), ("F16",), ("BF16",), ("BF16", "F32"), ("F32", "F16", "BF16"))
        ),
        compressed=random.choice(((False,), (True,), (False, True))),
        buffers=random.random() < 0.4,
    )
    return replace(plan, algorithm=algorithm, formats=formats)


def faulty_plan(seed: int) -> Plan:
    """The plan of a seed without what is said of formats: all F32, updates in a third of them."""
    random = Random(f"plan {seed}")
    count = random.choice((1, 2, 2, 3, 3, 4))
    seconds = random.choice((40.0, 80.0))
    link = Connection(
        latency_seconds=random.choice((0.0, 0.05, 0.4)),
        jitter_seconds=random.choice((0.0, 0.1, 1.0)),
        bytes_per_second=random.choice((float("inf"), 2000.0)),
        failures=random.choice((0.0, 0.0, 0.1)),
        timeout_seconds=2.0,
    )
    nodes = tuple(
        NodePlan(
            name=f"n{number}",
            joins_at=0.0 if number == 0 else random.choice((0.0, 0.3, 15.0)),
            step_seconds=random.choice((0.5, 1.0, 1.0, 3.0)),
            clock_rate=random.choice((0.9, 1.0, 1.0, 1.1)),
            connection=link,
        )
        for number in range(count)
    )
    faults = tuple(
        Fault(
            at_seconds=round(random.uniform(0.0, seconds), 3),
            kind=random.choice(FAULT_KINDS),
            node=random.randrange(count),
            seconds=random.choice((0.2, 5.0, 15.0, 40.0)),
            again=random.random() < 0.8,
        )
        for _ in range(random.randrange(7))
    )
    algorithm = replace(random.choice(ALGORITHMS), commit_dtype=random.choice((None, None, "F32")))
    strikes = tuple(
        Strike(random.randrange(count), random.randrange(1, 200), random.choice(WORK_STRIKES))
        for _ in range(random.choice((0, 0, 1, 3)))
    )
    return Plan(algorithm, nodes, faults, strikes, seconds=seconds, seed=seed)


def long_plan(seed: int) -> Plan:
    """Hours of a run that one or two nodes live through, while others come and are killed.

    Each of those has an id of its own, as a session has that is given none. One sleeps for longer
    than leases are kept, and wakes up. Rounds are minutes long, so that hours are few rounds.
    """
    random = Random(f"long plan {seed}")
    settled, passing = random.choice((1, 2)), random.choice((8, 20))
    hours = 3600.0 * random.choice((2.0, 3.0))
    link = Connection(latency_seconds=random.choice((0.0, 0.4)), failures=random.choice((0.0, 0.1)))
    stays = [
        NodePlan(f"n{n}", step_seconds=30.0, clock_rate=random.choice((0.9, 1.0)), connection=link)
        for n in range(settled + 1)
    ]
    comes = [
        NodePlan(f"p{n}", random.uniform(0.0, hours), step_seconds=30.0, connection=link)
        for n in range(passing)
    ]
    kills = [
        Fault(one.joins_at + random.choice((1.0, 80.0, 200.0)), "crash", place, again=False)
        for place, one in enumerate(comes, len(stays))
    ]
    sleeps = Fault(random.uniform(60.0, 900.0), "pause", settled, random.choice((4200.0, 5400.0)))
    return Plan(
        random.choice(ALGORITHMS),
        (*stays, *comes),
        (*kills, sleeps),
        seconds=hours,
        seed=seed,
        poll_interval=5.0,
        lease_every=30.0,
        lease_timeout=90.0,
    )
