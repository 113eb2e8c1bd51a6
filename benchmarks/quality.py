"""What the exchange does to the model: held-out loss at equal total tokens, three seeds each.

    uv run benchmarks/quality.py                 all studies, some five minutes of one core
    uv run benchmarks/quality.py --study merge   one of them
    uv run benchmarks/quality.py --study transformer   the main ones with a transformer, ten minutes
    uv run benchmarks/quality.py --results FILE --report docs/quality.svg

A small byte model on the text of ``examples/byte_lm.py``. The learners train in one process
in lockstep, so that a result depends on the seed alone; deltas, merging, outer step, precision and
schedule are the library's own code, without mailbox and threads. A result is appended to
``--results`` as it comes, and what is there already is not run again.
"""

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from quality_model import ByteModel, OneByOne, Stack, draw
from quality_plot import plot

import gradientmail as gm
from gradientmail.algorithm.merge import Fold, contribution_weight
from gradientmail.algorithm.outer import FragmentState, OuterStep, Transition
from gradientmail.algorithm.precision import decode_tensors, encode_difference, fp32_array
from gradientmail.algorithm.schedule import Schedule
from gradientmail.backend.base import Array
from gradientmail.backend.torch import TorchBackend
from gradientmail.buffers import HOST
from gradientmail.node import planned
from gradientmail.run import Fragment, arrays_over

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import byte_lm
from byte_lm import PARTS, source_text

LEARNING_RATE, WARMUP = 4e-3, 0.05
STEPS = 3600
"""Batches that all learners of a run take together: each of M takes ``STEPS / M``."""
SEEDS = (0, 1, 2)
FRAGMENTS = 4
BACKEND = TorchBackend()


@dataclass(frozen=True)
class Kind:
    """A kind of model, windows of text for it, and what trains many of them."""

    new_model: Callable[[], torch.nn.Module]
    draw: Callable[[torch.Tensor, int, torch.Generator], torch.Tensor]
    training: Callable[[list[Any]], Stack | OneByOne]
    batch: int
    held_out: int


KINDS = {
    "mlp": Kind(ByteModel, draw, Stack, batch=32, held_out=16384),
    # 31,000 parameters: one block, with a head over the last 64 bytes.
    "transformer": Kind(
        functools.partial(byte_lm.ByteModel, 32, 1), byte_lm.draw, OneByOne, batch=8, held_out=1024
    ),
}


@dataclass(frozen=True)
class Case:
    """One configuration. ``reference`` is data-parallel training: gradients averaged each step."""

    learners: int = 4
    reference: bool = False
    sync_every: int = 30
    merge: str = "rda"
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    delta_dtype: str = "F32"
    commit_dtype: str | None = None
    overlap: int = 0
    mixing: float = 0.0
    model: str = "mlp"

    def algorithm(self) -> gm.DiLoCo:
        """The options that the library takes."""
        return gm.DiLoCo(
            sync_every=self.sync_every,
            fragments=FRAGMENTS,
            in_flight=FRAGMENTS,
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            merge=gm.Rda() if self.merge == "rda" else gm.WeightedMean(),
            mixing=self.mixing,
            delta_dtype=self.delta_dtype,
            commit_dtype=self.commit_dtype,
        )


BASE = Case()
STUDIES: dict[str, list[Case]] = {
    "learners": [replace(BASE, reference=True, learners=m) for m in (1, 2, 4, 8)]
    + [replace(BASE, learners=1)]  # of one delta, every merge makes itself
    + [replace(BASE, learners=m, merge=merge) for m in (2, 4, 8) for merge in ("rda", "mean")],
    "precision": [replace(BASE, delta_dtype=dtype) for dtype in ("F32", "BF16", "F8_E4M3", "F4")]
    + [replace(BASE, delta_dtype="F4", commit_dtype="F4")],
    "sync_every": [replace(BASE, sync_every=steps) for steps in (10, 30, 100)],
    "overlap": [BASE] + [replace(BASE, overlap=n, mixing=a) for n in (5, 10) for a in (0.0, 0.5)],
    "outer": [
        replace(BASE, learners=m, outer_lr=lr, outer_momentum=momentum)
        for m in (4, 2)
        for lr in (0.5, 0.7, 1.0, 1.4)
        for momentum in (0.0, 0.5, 0.9)
    ],
    # RDA keeps the length that a mean of unlike deltas loses: is a longer step all that it is?
    "merge": [
        replace(BASE, merge=merge, outer_lr=lr)
        for lr in (0.7, 1.0, 1.4)
        for merge in ("rda", "mean")
    ],
    "transformer": [
        replace(case, learners=m, model="transformer")
        for m in (2, 4)
        for case in (
            replace(BASE, reference=True),
            BASE,
            replace(BASE, merge="mean"),
            replace(BASE, outer_lr=1.0),
            replace(BASE, outer_momentum=0.9),
            replace(BASE, delta_dtype="F4", commit_dtype="F4"),
        )
    ],
}
VARIED = {
    "learners": ("merge",),
    "precision": ("delta_dtype", "commit_dtype"),
    "sync_every": ("sync_every",),
    "overlap": ("overlap", "mixing"),
    "outer": ("outer_lr", "outer_momentum"),
    "merge": ("merge", "outer_lr"),
    "transformer": ("merge", "outer_lr", "outer_momentum", "delta_dtype", "commit_dtype"),
}
"""What the cases of a study differ in, besides the number of learners."""

text_of = functools.cache(source_text)
"""A part of the text, read once."""


class Learner:
    """A model and the parts of the text that it trains on."""

    def __init__(self, case: Case, index: int, seed: int) -> None:
        """All learners of a seed begin with the same parameters."""
        torch.manual_seed(seed)
        self.kind = KINDS[case.model]
        self.model = self.kind.new_model()
        self.parameters = BACKEND.bind(self.model)
        self.generator = torch.Generator().manual_seed(1000 * seed + index)
        self.text = torch.cat([text_of(part) for part in range(index, PARTS, case.learners)])

    def batch(self) -> torch.Tensor:
        """The next batch of its own text."""
        return self.kind.draw(self.text, self.kind.batch, self.generator)

    def copy_of(self, fragment: Fragment) -> dict[str, Array]:
        """The parameters of a fragment at this moment."""
        arrays = blank(fragment, "theta")
        self.parameters.capture(arrays)()
        return arrays


def blank(fragment: Fragment, payload: str) -> dict[str, Array]:
    """Arrays for one of a fragment's payloads."""
    layout = getattr(fragment, payload)
    return {} if layout is None else arrays_over(BACKEND, layout.blank(HOST.take), layout)


@dataclass
class Exchange:
    """All rounds of a run, each closed at the step that it is due with every learner in it."""

    case: Case
    learners: list[Learner]
    flying: deque[tuple[int, int, Mapping[str, Array]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Version 0 of every fragment is what the learners begin with."""
        self.algorithm = self.case.algorithm()
        self.fragments = planned(self.learners[0].parameters.schema, self.algorithm)
        self.schedule = Schedule(self.case.sync_every, len(self.fragments))
        self.states = [FragmentState(self.learners[0].copy_of(f), {}) for f in self.fragments]
        self.anchors = [state.theta for state in self.states]
        self.next_round = 0

    def after_step(self, step: int) -> None:
        """Close what is due, and let the learners have what was committed ``overlap`` steps ago."""
        while self.schedule.due_step(self.next_round) == step:
            number = self.schedule.fragment(self.next_round)
            self.states[number] = self.closed(number, final=False)
            self.flying.append((step + self.case.overlap, number, self.states[number].theta))
            self.next_round += 1
        self.deliver(step)

    def deliver(self, step: float) -> None:
        """Write into the models what has arrived by then."""
        while self.flying and self.flying[0][0] <= step:
            _, number, theta = self.flying.popleft()
            self.anchors[number] = theta
            for learner in self.learners:
                learner.parameters.apply(learner.parameters.stage(theta), mixing=self.case.mixing)

    def closed(self, number: int, *, final: bool) -> FragmentState:
        """The outer step over every learner's delta."""
        fragment, algorithm = self.fragments[number], self.algorithm
        fold = Fold(algorithm.merge, fragment.specs, BACKEND, HOST.take)
        for learner in self.learners:
            fold.add(self.delta(learner, number), contribution_weight(learner.kind.batch, 1))
        new = FragmentState(blank(fragment, "theta"), blank(fragment, "outer"))
        old, update = self.states[number], blank(fragment, "update")
        change = Transition(old, fold.merged().deltas, new, update, final)
        step = OuterStep(algorithm.outer_lr, algorithm.outer_momentum, algorithm.commit_dtype)
        step(BACKEND, fragment.specs, change, HOST.take)
        return new

    def delta(self, learner: Learner, number: int) -> Mapping[str, Array]:
        """``anchor − θ`` as it comes out of the mailbox, through the run's precision."""
        fragment, dtype = self.fragments[number], self.case.delta_dtype
        sent = blank(fragment, "delta")
        theta = learner.copy_of(fragment)
        encode_difference(
            BACKEND, self.anchors[number], theta, fragment.specs, dtype, sent, HOST.take
        )
        fresh = functools.partial(fp32_array, BACKEND, take=HOST.take)
        return decode_tensors(BACKEND, sent, dtype, fragment.specs, fresh)

    def finish(self) -> None:
        """The learners leave with ``flush_on_close``: what they have moved is averaged in."""
        self.deliver(math.inf)
        for number in range(len(self.fragments)):
            theta = self.closed(number, final=True).theta
            self.learners[0].parameters.apply(self.learners[0].parameters.stage(theta))


def train(case: Case) -> list[float]:
    """Held-out bits per byte of what the learners committed together, for each seed."""
    runs = [[Learner(case, index, seed) for index in range(case.learners)] for seed in SEEDS]
    # Data parallelism: of batches of one size, the mean gradient is that of one large batch.
    training = [run[0] for run in runs] if case.reference else [one for run in runs for one in run]
    stack = KINDS[case.model].training([learner.model for learner in training])
    exchanges = [] if case.reference else [Exchange(case, run) for run in runs]
    steps = STEPS // case.learners
    for step in range(1, steps + 1):
        batches = torch.stack([learner.batch() for run in runs for learner in run])
        done = step / steps
        rate = LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * done)) * min(1.0, done / WARMUP)
        stack.step(batches.view(len(training), -1, batches.shape[-1]), rate)
        for exchange in exchanges:
            exchange.after_step(step)
    for exchange in exchanges:
        exchange.finish()
    return [held_out_loss(run[0]) for run in runs]


@torch.no_grad()
def held_out_loss(learner: Learner) -> float:
    """Bits per byte on text that nobody trained on."""
    kind, generator = learner.kind, torch.Generator().manual_seed(0)
    return float(learner.model(kind.draw(text_of(None), kind.held_out, generator)))


def cases(study: str | None) -> Iterator[Case]:
    """What is to run, each case once, although several studies may have it.

    Transformers take longer than all else, and run when they are asked for.
    """
    wanted = [study] if study else [name for name in STUDIES if name != "transformer"]
    chosen = [case for name in wanted for case in STUDIES[name]]
    yield from dict.fromkeys(chosen)


def read(path: Path) -> dict[Case, list[float]]:
    """The results so far: held-out loss of each seed."""
    found: dict[Case, list[float]] = {}
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            row: dict[str, Any] = json.loads(line)
            found[Case(**row["case"])] = row["losses"]
    return found


def run(study: str | None, path: Path) -> None:
    """Run what is missing and append each result."""
    done = read(path)
    for case in cases(study):
        if case in done:
            continue
        began = time.perf_counter()
        losses = [round(loss, 4) for loss in train(case)]
        with path.open("a", encoding="utf-8") as file:
            print(json.dumps({"case": asdict(case), "losses": losses}), file=file)
        print(losses, f"{time.perf_counter() - began:5.1f} s  {label(case)}", flush=True)


def label(case: Case, varied: tuple[str, ...] = tuple(asdict(BASE))) -> str:
    """A case in words: the learners and what the study varies."""
    learners = f"{case.learners} learner{'s' * (case.learners > 1)}"
    if case.reference:
        return f"{learners}, data parallel"
    values = asdict(case)
    shown = [f"{name} {values[name]}" for name in varied if name not in ("learners", "reference")]
    return ", ".join([learners, *shown])


def rows(results: Mapping[Case, list[float]]) -> Iterator[dict[str, object]]:
    """A row a case and study: mean over the seeds, and the best and the worst of them."""
    for study, found in STUDIES.items():
        for case in found:
            losses = results.get(case)
            if losses:
                yield {
                    "study": study,
                    "case": label(case, VARIED[study]),
                    "bits per byte": round(statistics.mean(losses), 3),
                    "best": round(min(losses), 3),
                    "worst": round(max(losses), 3),
                }


def main() -> None:
    """Run, then print the table and draw the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", choices=STUDIES, help="only this one")
    parser.add_argument("--results", type=Path, default=Path("runs/quality.jsonl"))
    parser.add_argument("--report", type=Path, metavar="SVG", help="run nothing, draw this plot")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if args.report is None:
        run(args.study, args.results)
    found = list(rows(read(args.results)))
    if args.json:
        print(json.dumps(found))
    else:
        print("\n| study | case | bits per byte | best | worst |\n" + "|---" * 5 + "|")
        for row in found:
            cells = (
                f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()
            )
            print("| " + " | ".join(cells) + " |")
    if args.report is not None:
        args.report.write_text(plot(found), encoding="utf-8")


if __name__ == "__main__":
    main()
