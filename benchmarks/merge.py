"""Folding contributions and closing: time and memory must not grow with the number of learners.

``uv run benchmarks/merge.py [--json] [--mb 64] [--device cuda]``

Folding is what happens when a contribution arrives; closing is what is left after the last one.
With ``--device`` norms, sums and the outer step are computed there.
"""

import argparse
import resource
import time
from pathlib import Path

import torch
from measure import MIB, Floor, show

from gradientmail.algorithm.diloco import Rda, WeightedMean
from gradientmail.algorithm.merge import Fold
from gradientmail.algorithm.outer import FragmentState, OuterStep, Transition
from gradientmail.backend.torch import TorchBackend
from gradientmail.backend.torch_device import TorchDeviceBackend
from gradientmail.buffers import HOST
from gradientmail.schema import TensorSpec


def one_case(
    merge: Rda | WeightedMean, contributions: int, nbytes: int, device: str | None
) -> dict[str, object]:
    """Fold so many contributions of ``nbytes`` in 16 tensors, then close."""
    backend = TorchBackend() if device is None else TorchDeviceBackend(device)
    pool = HOST
    count = nbytes // 64
    specs = tuple(TensorSpec(f"t{index}", "F32", (count,)) for index in range(16))

    def arrays(prefix: str = "") -> dict[str, torch.Tensor]:
        return {
            prefix + spec.name: backend.array(pool.take(spec.nbytes), "F32", spec.shape)
            for spec in specs
        }

    def filled() -> dict[str, torch.Tensor]:
        return {name: array.normal_() for name, array in arrays().items()}

    old = FragmentState(filled(), {f"momentum.{n}": a for n, a in filled().items()})
    new = FragmentState(filled(), {f"momentum.{n}": a for n, a in filled().items()})
    step = OuterStep(0.7, 0.9, None)
    fold, peak = Fold(merge, specs, backend, pool.take), 0
    folding: list[float] = []
    for _ in range(contributions):
        contribution = filled()
        began = time.process_time()
        fold.add(contribution, 1.0)
        folding.append(time.process_time() - began)
        del contribution
        peak = max(peak, _rss())
    began = time.process_time()
    step(backend, specs, Transition(old, fold.finish().deltas, new, {}, final=False), pool.take)
    closing = time.process_time() - began
    return {
        "merge": type(merge).__name__,
        "contributions": contributions,
        "fold_ms_each": round(sorted(folding)[len(folding) // 2] * 1e3, 1),
        "close_ms": round(closing * 1e3, 1),
        "rss_mib": round(max(peak, _rss()) / MIB),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--device", help="merge there, such as cuda; on the host by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    floor = Floor(args.mb * 10**6)
    rows = [
        {**one_case(merge, contributions, args.mb * 10**6, args.device), **floor.row()}
        for merge in (Rda(), WeightedMean())
        for contributions in (2, 8, 32)
    ]
    show("merge", rows, as_json=args.json)


if __name__ == "__main__":
    main()
