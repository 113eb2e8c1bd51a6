"""What ``step`` costs the training thread when nothing is due, and when a fragment is copied.

``uv run benchmarks/step.py [--json]``
"""

import argparse
import time

import torch
from measure import show

import gradientmail as gm
from gradientmail import events


def model_of(tensors: int, size: int) -> torch.nn.Module:
    """A model of ``tensors`` parameters of ``size`` elements."""
    model = torch.nn.Module()
    for index in range(tensors):
        model.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(size)))
    return model


def percentiles(times: list[int]) -> dict[str, float]:
    """Median and 99th percentile in microseconds of nanoseconds."""
    times.sort()
    return {
        "median_us": round(times[len(times) // 2] / 1e3, 2),
        "p99_us": round(times[len(times) * 99 // 100] / 1e3, 2),
    }


def idle_steps(count: int, *, pause: float) -> list[int]:
    """Nanoseconds of ``step`` with nothing due, each after ``pause`` seconds of other work."""
    algorithm = gm.DiLoCo(sync_every=10**9, fragments=4)
    cold = torch.zeros(2**23)
    with gm.Session(
        model_of(150, 1024), algorithm=algorithm, mailbox=gm.MemoryMailbox(), callbacks=()
    ) as session:
        times = []
        for _ in range(count):
            if pause:
                cold.add_(1)
                time.sleep(pause)
            began = time.perf_counter_ns()
            session.step(samples=8)
            times.append(time.perf_counter_ns() - began)
    return times


def copying_steps(rounds: int, size: int) -> dict[str, float]:
    """Time in ``step`` over some rounds beside as many bare copies as it had to make."""
    model = model_of(8, size // 2)
    seen: list[events.Event] = []
    inside = 0.0
    with gm.Session(
        model,
        algorithm=gm.DiLoCo(sync_every=20, fragments=4),
        mailbox=gm.MemoryMailbox(),
        callbacks=(seen.append,),
        poll_interval=0.05,
    ) as session:
        while session.rounds_seen < rounds - 1:
            time.sleep(0.05)
            began = time.perf_counter()
            session.step(samples=8)
            inside += time.perf_counter() - began
        copies = sum(type(e) in (events.Aligned, events.SnapshotPublished) for e in seen)
    bare = copies * _bare_copy(size)
    return {
        "in_step_ms": round(inside * 1e3, 1),
        "bare_copies_ms": round(bare * 1e3, 1),
        "ratio": round(inside / bare, 2),
    }


def _bare_copy(size: int) -> float:
    """Seconds to copy so many fp32 elements that are in no cache, into warm memory."""
    sources = [torch.ones(size) for _ in range(4)]
    times: list[float] = []
    target = torch.zeros(size)
    for turn in range(12):
        began = time.perf_counter()
        target.copy_(sources[turn % 4])
        times.append(time.perf_counter() - began)
    return sorted(times)[6]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        {"case": "nothing due, tight loop", **percentiles(idle_steps(50_000, pause=0))},
        {"case": "nothing due, after 50 ms of else", **percentiles(idle_steps(60, pause=0.05))},
        {"case": "10 rounds of 64 MB fragments", **copying_steps(10, 16_000_000)},
    ]
    show("step", rows, as_json=args.json)


if __name__ == "__main__":
    main()
