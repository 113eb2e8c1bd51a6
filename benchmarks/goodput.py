"""Goodput of learners that fail and return: beside the paper's Table 1, and for smaller fleets.

``uv run benchmarks/goodput.py [paper | users] [--json] [--hours 0.5] [--seed 0] [--quick]``

Every figure comes from the protocol's own code in the simulated world (``goodput_world.py``); no
model of it stands in between. ``docs/goodput.md`` has results and what was assumed.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator

from goodput_world import Case, Result, simulate

import gradientmail as gm

YEAR_SECONDS = 365.25 * 24 * 3600
MBIT = 1e6 / 8

# The paper's Table 1 (arXiv 2604.21428): goodput in % by number of learners and of chips.
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
PAPER = {
    1: (88, 80, 69, 58, 40),
    2: (94, 88, 80, 70, 54),
    4: (96, 93, 89, 82, 73),
    8: (98, 96, 94, 88, 80),
    16: (99, 98, 96, 93, 86),
}
REBUILD_SECONDS = 25.0
"""What a learner needs after one of its chips failed: fitted to the paper's first row."""

NODES = (2, 8, 64)
LINKS_MBIT = (50, 1_000, 10_000)
PARAMETERS = (1e8, 1e9, 1e10)
STEP_SECONDS = {1e8: 2.0, 1e9: 5.0, 1e10: 20.0}
BETWEEN_PREEMPTIONS = 3 * 3600.0
REPLACEMENT_SECONDS = 300.0
FRAGMENTS = 4
LEAST_STEPS, MOST_STEPS = 100, 2000
DELTA_BYTES = 0.53
"""Of an F4 delta or update, scales included, per parameter."""
CLOSER_BYTES = 2 + 8 + DELTA_BYTES
"""What a commit uploads per parameter: BF16 theta, F32 momentum and master, F4 update."""
CPU_BYTES_PER_SECOND = 1e9

PUT_DOLLARS, GET_DOLLARS = 5e-6, 0.4e-6
EGRESS_DOLLARS = 0.09e-9
"""S3 Standard, us-east-1: a PUT or LIST, a GET, and a byte that leaves the region."""


def paper_case(learners: int, chips: int, *, keeps_state: bool, hours: float, seed: int) -> Case:
    """A cell of Table 1: each learner has its share of the chips."""
    return Case(
        learners=learners,
        algorithm=gm.DiLoCo(sync_every=24, fragments=4, merge=gm.WeightedMean()),
        step_seconds=2.0,
        between_failures=YEAR_SECONDS / (chips / learners),
        down_seconds=REBUILD_SECONDS,
        keeps_state=keeps_state,
        duration=3600 * hours,
        seed=seed,
    )


def paper_rows(learners: tuple[int, ...], hours: float, seed: int) -> Iterator[dict[str, object]]:
    """Our figures beside theirs."""
    for count in learners:
        for chips, theirs in zip(CHIPS, PAPER[count], strict=True):
            kept, lost = (
                simulate(paper_case(count, chips, keeps_state=keeps, hours=hours, seed=seed))
                for keeps in (True, False)
            )
            yield {
                "learners": count,
                "chips": chips,
                "paper_percent": theirs,
                "trained_percent": percent(kept.trained),
                "merged_percent": percent(kept.merged),
                "trained_percent_state_lost": percent(lost.trained),
                "merged_percent_state_lost": percent(lost.merged),
                "failures": kept.tally.failures,
            }


def sync_every(nodes: int, link: float, parameters: float) -> int:
    """Steps between exchanges: at least 100, and so many that rounds close as fast as they come.

    A closer downloads every other delta of a fragment and uploads the commit, one after the other.
    """
    fragment = parameters / FRAGMENTS
    per_byte = 1 / link + 1 / CPU_BYTES_PER_SECOND
    closing = fragment * (CLOSER_BYTES + (nodes - 1) * DELTA_BYTES) * per_byte
    steps = FRAGMENTS * closing / STEP_SECONDS[parameters]
    return max(LEAST_STEPS, math.ceil(steps / FRAGMENTS) * FRAGMENTS)


def user_case(nodes: int, mbit: float, parameters: float, hours: float, seed: int) -> Case | None:
    """A fleet of spot machines; None when its rounds would be more than 2,000 steps long."""
    link = mbit * MBIT
    steps = sync_every(nodes, link, parameters)
    if steps > MOST_STEPS:
        return None
    step_seconds = STEP_SECONDS[parameters]
    gap_seconds = steps / FRAGMENTS * step_seconds
    return Case(
        learners=nodes,
        algorithm=gm.DiLoCo(
            sync_every=steps, fragments=FRAGMENTS, delta_dtype="F4", commit_dtype="F4"
        ),
        step_seconds=step_seconds,
        between_failures=BETWEEN_PREEMPTIONS,
        down_seconds=REPLACEMENT_SECONDS,
        keeps_state=False,
        duration=max(3600 * hours, 12 * gap_seconds),
        poll_interval=max(1.0, gap_seconds / 20),
        parameters=parameters,
        bytes_per_second=link,
        cpu_bytes_per_second=CPU_BYTES_PER_SECOND,
        seed=seed,
    )


def user_rows(nodes: tuple[int, ...], hours: float, seed: int) -> Iterator[dict[str, object]]:
    """Goodput, staleness, requests and dollars."""
    for count in nodes:
        for mbit in LINKS_MBIT:
            for parameters in PARAMETERS:
                base: dict[str, object] = {"nodes": count, "mbit": mbit}
                base["parameters"] = f"{parameters:.0e}"
                case = user_case(count, mbit, parameters, hours, seed)
                if case is None:
                    yield base | {"sync_every": f"> {MOST_STEPS}"}
                else:
                    yield base | user_figures(simulate(case))


def user_figures(result: Result) -> dict[str, object]:
    """What a user asks for, a day of the whole fleet where not said otherwise."""
    case, tally = result.case, result.tally
    days = case.duration / 86400
    writes = tally.calls["put"] + tally.calls["list"]
    reads = tally.calls["get"]
    dollars = (writes * PUT_DOLLARS + reads * GET_DOLLARS) / days
    return {
        "sync_every": case.algorithm.sync_every,
        "trained_percent": percent(result.trained),
        "merged_percent": percent(result.merged),
        "stale_steps": round(result.stale_steps, 1),
        "stale_seconds": round(result.stale_steps * case.step_seconds),
        "round_seconds": round(result.round_seconds),
        "requests_node_hour": round((writes + reads) / case.learners / days / 24),
        "request_dollars_day": round(dollars, 2),
        "gigabytes_day": round((tally.sent + tally.received) / days / 1e9, 1),
        "egress_dollars_day": round(tally.received * EGRESS_DOLLARS / days, 1),
    }


def told(rows: Iterator[dict[str, object]]) -> list[dict[str, object]]:
    """All rows, each said on the way: a table takes minutes."""
    found = []
    for row in rows:
        print(json.dumps(row), file=sys.stderr, flush=True)
        found.append(row)
    return found


def percent(part: float) -> float:
    """In percent, to a tenth."""
    return round(100 * part, 1)


def show(rows: list[dict[str, object]]) -> None:
    """Print rows as a table in Markdown."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    print("| " + " | ".join(name.replace("_", " ") for name in names) + " |")
    print("|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(str(row.get(name, "")) for name in names) + " |")
    print()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="goodput of learners that fail and return")
    parser.add_argument("what", nargs="?", choices=("paper", "users", "both"), default="both")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hours", type=float, default=None, help="virtual hours of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="only the small fleets")
    arguments = parser.parse_args()
    tables: dict[str, list[dict[str, object]]] = {}
    if arguments.what != "users":
        learners = (1, 2) if arguments.quick else tuple(PAPER)
        tables["paper"] = told(paper_rows(learners, arguments.hours or 0.25, arguments.seed))
    if arguments.what != "paper":
        nodes = NODES[:1] if arguments.quick else NODES
        tables["users"] = told(user_rows(nodes, arguments.hours or 3.0, arguments.seed))
    if arguments.json:
        json.dump({"seed": arguments.seed, **tables}, sys.stdout, indent=1)
        print()
    else:
        for rows in tables.values():
            show(rows)


if __name__ == "__main__":
    main()
