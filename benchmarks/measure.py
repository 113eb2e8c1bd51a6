"""What every benchmark here shares: bare floors, repeated timing, one way to print."""

import hashlib
import json
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

MIB = 2**20


def median_seconds(work: Callable[[], object], *, repeats: int = 7) -> float:
    """Median of the CPU time of the process over ``repeats`` calls, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return sorted(times)[repeats // 2]


def wall_seconds(
    *works: Callable[[], object], repeats: int = 9, after: Callable[[], object] = lambda: None
) -> list[float]:
    """Medians of the wall time of calls made in turn, after one of each that warms up.

    ``after`` is called after each, and not timed.
    """
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for work, taken in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
            after()
    return [sorted(taken[1:])[repeats // 2] for taken in times]


class Floor:
    """CPU seconds of the bare work on ``nbytes`` bytes in warm buffers, one thread.

    ``copy``, ``hash`` (sha256), ``write`` and ``read`` (a file in ``folder``), ``step`` (the
    Nesterov step on as many bytes of fp32, in the same chunks, without anything around it).
    """

    def __init__(self, nbytes: int, folder: str | None = None) -> None:
        """Measure all of them."""
        self.nbytes = nbytes
        source, target, third = (torch.randn(nbytes // 4) for _ in range(3))
        plain = memoryview(bytearray(nbytes))
        self.copy = median_seconds(lambda: target.copy_(source))
        self.hash = median_seconds(lambda: hashlib.sha256(plain).digest())
        with tempfile.TemporaryDirectory(dir=folder) as name:
            path = Path(name) / "object"

            def write() -> None:
                path.unlink(missing_ok=True)
                with path.open("wb", buffering=0) as file:
                    file.write(plain)

            def read() -> None:
                with path.open("rb", buffering=0) as file:
                    file.readinto(plain)

            self.write = median_seconds(write)
            self.read = median_seconds(read)
        self.step = median_seconds(lambda: bare_step(target, source, third))

    def exchange(self, nodes: int) -> float:
        """CPU seconds a round a node: every byte copied, hashed, written and read once.

        Each learner copies its parameters out, hashes and writes the delta and copies the commit
        in; each follower reads and hashes the commit; the closer reads and hashes the other
        deltas, takes the step, and hashes and writes theta and the momentum.
        """
        learner = 2 * self.copy + self.hash + self.write
        fetch = self.read + self.hash
        closer = (nodes - 1) * fetch + self.step + 2 * (self.hash + self.write)
        return learner + ((nodes - 1) * fetch + closer) / nodes

    def row(self) -> dict[str, float]:
        """The figures in milliseconds."""
        names = ("copy", "hash", "write", "read", "step")
        return {f"floor_{name}_ms": round(getattr(self, name) * 1e3, 1) for name in names}


def bare_step(
    theta: torch.Tensor, delta: torch.Tensor, momentum: torch.Tensor, chunk: int = 31 * 1024
) -> None:
    """The Nesterov step in place, in chunks that stay in the cache."""
    scratch = torch.empty(chunk)
    flat = (whole.split(chunk) for whole in (theta, delta, momentum))
    for new, moved, kept in zip(*flat, strict=True):
        kept.mul_(0.9).add_(moved)
        step = torch.add(moved, kept, alpha=0.9, out=scratch[: new.numel()])
        new.add_(step, alpha=-1e-9)


def machine() -> str:
    """The processor, the number of cores, Python and torch, in a line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    cores = torch.get_num_threads()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{model}, {cores} threads, {versions}"


def show(title: str, rows: Sequence[Mapping[str, object]], *, as_json: bool) -> None:
    """Print rows as JSON, or as a Markdown table."""
    if as_json:
        print(json.dumps({"benchmark": title, "machine": machine(), "rows": list(rows)}))
        return
    print(f"{title} ({machine()})\n")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row.get(column, "")) for column in columns) + " |")
    print()
