"""Whole exchanges between processes on this machine: CPU, memory, closing time, requests.

``uv run benchmarks/exchange.py [--json] [--only NAME] [--steps 60]``

Workload W: 64 M fp32 parameters (256 MB), 4 fragments, ``sync_every`` 20, 2 nodes, a folder, poll
0.5 s, a training step of 50 ms that touches little. The others change one thing each. CPU is of
all threads of a node, training included; the floor is ``measure.Floor.exchange``. After a workload
of plain fp32 comes a row of the same work without the library, which ``bare.py`` does. ``agree``:
all models are alike in the end; not so where one node had left before the other's last round.
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import queue
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from bare import BareSession
from measure import MIB, Floor, show

import gradientmail as gm
from gradientmail import events
from gradientmail.testing.faults import CountingMailbox

PRICE = {"list": 5.0, "put_if_absent": 5.0, "get": 0.4, "delete": 0.0}
"""Dollars a million requests, as S3 charges them."""


@dataclass(frozen=True)
class Workload:
    """One way to run."""

    name: str
    nodes: int = 2
    tensors: tuple[int, ...] = (2_000_000,) * 32
    dtype: str = "float32"
    fragments: int = 4
    sync_every: int = 20
    step_seconds: float = 0.05
    poll_interval: float = 0.5
    compression: Literal["off", "zstd"] = "off"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether ``bare.py`` does the same work."""
        return self.dtype == "float32" and self.compression == "off" and not self.options


WORKLOADS = (
    Workload("W"),
    Workload("W, 8 nodes", nodes=8),
    Workload("W, bf16", dtype="bfloat16"),
    Workload("W, F4 deltas and commits", options={"delta_dtype": "F4", "commit_dtype": "F4"}),
    Workload("W, zstd", compression="zstd"),
    Workload("W, 600 small tensors", tensors=(100_000,) * 600),
    Workload("one tensor of 1 GB", tensors=(250_000_000, 1), fragments=2),
)


def node(
    rank: int, work: Workload, steps: int, folder: str, out: Any, gate: Any, bare: bool
) -> None:
    """One process: join, wait for the others, train, report; ``bare`` without the library."""
    torch.set_num_threads(1)
    model = torch.nn.ParameterList(
        torch.zeros(count, dtype=getattr(torch, work.dtype)) for count in work.tensors
    )
    mailbox = CountingMailbox(gm.FilesystemMailbox(folder))
    seen: dict[str, list[tuple[int, float]]] = {"published": [], "committed": []}
    base = peak = _rss()

    def tell(event: events.Event) -> None:
        if isinstance(event, events.SnapshotPublished):
            seen["published"].append((event.round, time.time()))
        elif isinstance(event, events.RoundCommitted):
            seen["committed"].append((event.round, time.time()))

    session: gm.Session | BareSession
    if bare:
        session = BareSession(
            list(model),
            rank=rank,
            nodes=work.nodes,
            fragments=work.fragments,
            every=-(-work.sync_every // work.fragments),
            poll=work.poll_interval / 8,
            folder=Path(folder),
            tell=lambda what, number: seen[what].append((number, time.time())),
        )
    else:
        session = gm.Session(
            model,
            algorithm=gm.DiLoCo(
                work.sync_every, work.fragments, quorum_size=work.nodes, **work.options
            ),
            mailbox=mailbox,
            learner_id=f"n{rank}",
            poll_interval=work.poll_interval,
            compression=work.compression,
            callbacks=(tell,),
        )
    ended = threading.Event()

    def look() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            peak = max(peak, _rss())

    threading.Thread(target=look, daemon=True).start()
    gate.wait()
    mailbox.calls.clear()
    inside: list[float] = []
    cpu = time.process_time()
    with session:
        for _ in range(steps):
            with torch.no_grad():
                for parameter in model:
                    parameter[:1024] += 1e-3 * (rank + 1)
            time.sleep(work.step_seconds)
            began = time.perf_counter()
            session.step(samples=8)
            inside.append(time.perf_counter() - began)
    cpu = time.process_time() - cpu
    ended.set()
    digest = hashlib.sha256()
    for parameter in model:
        digest.update(parameter.detach().view(torch.uint8).numpy())
    out.put(
        {
            "rounds": session.rounds_seen + 1,
            "cpu": cpu,
            "memory": peak - base,
            "inside": sum(inside),
            "calls": dict(mailbox.calls),
            **seen,
            "digest": digest.hexdigest(),
        }
    )


def _rss() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


def run(work: Workload, steps: int, folder: str | None, *, bare: bool = False) -> dict[str, object]:
    """One workload; its row. ``bare`` does the work of its rounds without the library."""
    context = multiprocessing.get_context("spawn")
    out, gate = context.Queue(), context.Barrier(work.nodes)
    with tempfile.TemporaryDirectory(dir=folder) as root:
        processes = [
            context.Process(
                target=node, args=(rank, work, steps, root, out, gate, bare), daemon=True
            )
            for rank in range(work.nodes)
        ]
        for process in processes:
            process.start()
        try:
            found = [out.get(timeout=600) for _ in processes]
        except queue.Empty:
            raise SystemExit(f"{work.name}: a node did not finish within 10 minutes") from None
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    return _row(work, found) | ({"workload": f"{work.name}, bare"} if bare else {})


def _row(work: Workload, found: list[dict[str, Any]]) -> dict[str, object]:
    rounds = max(one["rounds"] for one in found)
    calls: collections.Counter[str] = collections.Counter()
    for one in found:
        calls.update(one["calls"])
    last: dict[int, float] = {}
    for number, moment in (pair for one in found for pair in one["published"]):
        last[number] = max(moment, last.get(number, 0.0))
    closing = sorted(
        moment - last[number]
        for one in found
        for number, moment in one["committed"]
        if number in last
    )
    share = rounds * work.nodes
    return {
        "workload": work.name,
        "rounds": rounds,
        "agree": len({one["digest"] for one in found}) == 1,
        "cpu_s": round(sum(one["cpu"] for one in found) / share, 3),
        "memory_mib": round(max(one["memory"] for one in found) / MIB),
        "closing_s": round(closing[len(closing) // 2], 2) if closing else None,
        "in_step_ms": round(max(one["inside"] for one in found) / rounds * 1e3, 1),
        "lists": round(calls["list"] / share, 1),
        "requests": round(sum(calls.values()) / share, 1),
        "usd_per_million": round(sum(PRICE[op] * n for op, n in calls.items()) / share, 1),
    }


def is_chosen(name: str, only: str | None) -> bool:
    """All without ``only``; for W, which is in other names too, that one by itself."""
    return only is None or (name == "W" if only == "W" else only in name)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help="W, or a part of the others' names")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-seconds", type=float, help="instead of each workload's own")
    parser.add_argument("--folder", help="where the mailbox and the floor's file lie")
    args = parser.parse_args()
    chosen = [one for one in WORKLOADS if is_chosen(one.name, args.only)]
    if not chosen:
        parser.error(f"--only {args.only}: not in any of {[one.name for one in WORKLOADS]}")
    rows: list[dict[str, object]] = []
    for usual in chosen:
        work = replace(usual, step_seconds=args.step_seconds or usual.step_seconds)
        torch.set_num_threads(1)
        nbytes = sum(work.tensors) * getattr(torch, work.dtype).itemsize // work.fragments
        floor = Floor(nbytes // 4 * 4, args.folder).exchange(work.nodes)
        row = run(work, args.steps, args.folder)
        row["floor_cpu_s"] = round(floor, 3)
        row["ratio"] = round(float(str(row["cpu_s"])) / floor, 2)
        new = [row]
        if work.is_plain:
            new.append(run(work, args.steps, args.folder, bare=True))
        rows += new
        if not args.json:
            for row in new:
                print(json.dumps({**row, "settings": asdict(work)["options"]}), flush=True)
    show("exchange", rows, as_json=args.json)


if __name__ == "__main__":
    main()
