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


def copying_steps(rounds: int, size: int, pause: float) -> dict[str, float]:
    """Time in ``step`` over some rounds beside as many bare copies as it had to make.

    Bare copies are made in the same loop, between the steps, where other threads use the cores as
    they do during ``step``, and once more with nothing else running, after pauses as long.
    """
    model = model_of(8, size // 2)
    sources, target = [torch.ones(size) for _ in range(4)], torch.zeros(size)
    seen: list[events.Event] = []
    inside, steps = 0.0, 0
    beside: list[float] = []

    def copy() -> float:
        began = time.perf_counter()
        target.copy_(sources[len(beside) % 4])
        return time.perf_counter() - began

    with gm.Session(
        model,
        algorithm=gm.DiLoCo(sync_every=20, fragments=4),
        mailbox=gm.MemoryMailbox(),
        callbacks=(seen.append,),
        poll_interval=0.05,
    ) as session:
        while session.rounds_seen < rounds - 1:
            time.sleep(pause)
            began = time.perf_counter()
            session.step(samples=8)
            inside += time.perf_counter() - began
            steps += 1
            if steps % 3 == 0:
                time.sleep(pause)
                beside.append(copy())
        copies = sum(type(e) in (events.Aligned, events.SnapshotPublished) for e in seen)
    quiet = []
    for _ in range(12):
        time.sleep(pause)
        quiet.append(copy())
    alone = sorted(quiet)[6]
    bare = sum(beside) / len(beside)
    return {
        "in_step_ms": round(inside * 1e3, 1),
        "copies": copies,
        "bare_ms": round(bare * copies * 1e3, 1),
        "ratio": round(inside / copies / bare, 2),
        "bare_alone_ms": round(alone * copies * 1e3, 1),
        "ratio_alone": round(inside / copies / alone, 2),
    }


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
        {"case": "10 rounds of 64 MB fragments", **copying_steps(10, 16_000_000, 0.05)},
        {"case": "the same, a round every 2 s", **copying_steps(10, 16_000_000, 0.4)},
    ]
    show("step", rows, as_json=args.json)


if __name__ == "__main__":
    main()
