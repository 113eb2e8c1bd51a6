"""Train a small byte-level language model with several processes that share nothing but a folder.

    uv run examples/byte_lm.py                      four learners and, for comparison, one alone
    uv run examples/byte_lm.py --mailbox runs/x     the same in that folder, or joins the run in it

The text is the source of the Python standard library, which every machine has. Each learner trains
on its own part of it and never meets the others: all they exchange is how far their parameters
moved, through the mailbox. At the end the held-out loss of what they trained together stands beside
that of the process that took as many steps alone.

While it runs, give the same --mailbox in a second terminal: its learners join, take parts of the
text that nobody has, and leave with the others. Or kill a learner, the number at the end of its
name is its process id: the others go on. Ctrl-C ends everything.
"""

import argparse
import asyncio
import itertools
import math
import os
import sys
import sysconfig
import time
import zlib
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradientmail as gm
from bars import Progress, Row, follow, stop

CONTEXT, BATCH, WARMUP, LEARNING_RATE = 64, 8, 50, 2e-3
PARTS = 16  # of the text; each learner trains on one
# Plain averages: in so short a run 0.02 bits better than outer_lr=0.7 with outer_momentum=0.5,
# with which longer ones had better begin (docs/quality.md).
ALGORITHM = gm.DiLoCo(sync_every=48, fragments=4, outer_lr=1.0, outer_momentum=0.0)


@dataclass(frozen=True)
class Options:
    """The command line."""

    mailbox: str
    learners: int
    steps: int
    width: int
    depth: int

    def new_model(self) -> "ByteModel":
        """A model with the same parameters in every process, which leaves cores to the others."""
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (self.learners + 1)))
        torch.manual_seed(0)
        return ByteModel(self.width, self.depth)


class ByteModel(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, width: int, depth: int) -> None:
        """Make one of ``depth`` blocks with heads of 32."""
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Mean loss in bits per byte of bytes in the shape ``(batch, CONTEXT + 1)``."""
        past = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.embed(text[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x, past, is_causal=True)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.mT, text[:, 1:]) / math.log(2)


def source_text(part: int | None, parts: int = PARTS) -> Tensor:
    """The bytes of all files of one part; ``None`` is the part that nobody trains on."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if not {"site-packages", "test"} & set(name.split("/"))]
    held_out = [name for name in names if zlib.crc32(name.encode()) % 20 == 0]
    chosen = held_out if part is None else sorted({*names} - {*held_out})[part % parts :: parts]
    text = b"".join((root / name).read_bytes() for name in chosen)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw(text: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """``size`` random windows of ``text``, of ``CONTEXT + 1`` bytes each."""
    starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)].long()


@torch.no_grad()
def held_out_loss(model: ByteModel) -> float:
    """Bits per byte on text that nobody trained on."""
    text, generator = source_text(None), torch.Generator().manual_seed(0)
    return sum(model(draw(text, 128, generator)).item() for _ in range(8)) / 8


def take_part(box: gm.Mailbox, learner: str) -> int:
    """The first part of the text that is nobody's, and now ours: a key can be created only once."""
    for part in itertools.count():
        if asyncio.run(box.put_if_absent(f"units/part-{part}", learner.encode())):
            return part
    raise AssertionError


def train(
    model: ByteModel,
    text: Tensor,
    steps: int,
    progress: Progress,
    pipe: Connection,
    session: gm.Session | None,
) -> None:
    """The training loop: the same in the run and alone, but for ``session.step``."""
    generator = torch.Generator().manual_seed(len(text))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    for step in range(progress.first_step, steps):
        decay = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * decay * min(1, (step + 1) / WARMUP)
        loss = model(draw(text, BATCH, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if session:
            session.step(samples=BATCH * CONTEXT)
        progress.step, progress.loss = step + 1, loss.item()
        progress.send(pipe)


def learn_together(options: Options, pipe: Connection) -> None:
    """What a learner's process does."""
    model, box, progress = options.new_model(), gm.open_mailbox(options.mailbox), Progress()

    def notice(event: gm.events.Event) -> None:
        if isinstance(event, gm.events.RoundSeen):
            progress.round, progress.participants = event.round, len(event.learners)

    with gm.Session(
        model,
        algorithm=ALGORITHM,
        mailbox=box,
        poll_interval=0.1,
        lease_every=2.0,
        lease_timeout=8.0,
        callbacks=(notice,),
    ) as session:
        progress.name = session.learner_id
        # Who joins later begins where the run is, with the learning rate that the run has there.
        committed = session.rounds_seen + 1
        progress.first_step = progress.step = (
            committed * ALGORITHM.sync_every // ALGORITHM.fragments
        )
        text = source_text(take_part(box, session.learner_id))
        train(model, text, options.steps, progress, pipe, session)


def learn_alone(options: Options, pipe: Connection) -> None:
    """What the process does that all this is compared with: it trains on the first part only."""
    model, progress = options.new_model(), Progress("alone")
    train(model, source_text(0), options.steps, progress, pipe, session=None)
    progress.held_out = held_out_loss(model)
    progress.send(pipe)


def report(options: Options, learners: list[Row[Options]], alone: list[Row[Options]]) -> None:
    """Say what came out of the run: the committed parameters, not any learner's own."""
    model = options.new_model()
    last = gm.align(model, mailbox=gm.open_mailbox(options.mailbox))
    together = held_out_loss(model)
    steps = [row.progress.step - row.progress.first_step for row in learners]
    print(f"\nBits per byte of held-out text, lower is better, after {last + 1} rounds:")
    print(
        f"  together  {together:.3f}  learners here: {len(steps)}, {max(steps)} steps each at most,"
    )
    print(f"                   {sum(steps) * BATCH * CONTEXT:,} bytes read")
    for row in alone:
        single, count = row.progress.held_out, row.progress.step
        print(f"  alone     {single:.3f}  {count} steps,")
        print(f"                   {count * BATCH * CONTEXT:,} bytes read")
        helped = together < single
        print(f"Training together {'helped' if helped else 'did not help'}: ", end="")
        print(f"{abs(single - together):.3f} {'lower' if helped else 'higher'}.")


def parse_options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    new = f"runs/byte-lm-{time.strftime('%Y%m%d-%H%M%S')}"
    parser.add_argument("--mailbox", default=new, help="folder or URL (default: a new folder)")
    parser.add_argument("--learners", type=int, default=4, help="how many to start (default: 4)")
    parser.add_argument(
        "--steps", type=int, default=720, help="length of the whole run (default: 720)"
    )
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32 (default: 128)")
    parser.add_argument("--depth", type=int, default=3, help="blocks of the model (default: 3)")
    options = Options(**vars(parser.parse_args()))
    if options.width < 32 or options.width % 32:
        parser.error(f"--width is a multiple of 32, not {options.width}")
    return options


def main() -> int:
    """Start the processes, show them, and report."""
    options = parse_options()
    box = gm.open_mailbox(options.mailbox)
    exists = asyncio.run(box.get("manifest.json")) is not None
    print("Joining the run in" if exists else "A new run in", options.mailbox)
    print("Join it from a second terminal: the same command with", f"--mailbox {options.mailbox}\n")
    rows: list[Row[Options]] = []
    try:
        for work in [learn_together] * options.learners + [learn_alone] * (not exists):
            rows.append(Row(work, options, options.steps))  # noqa: PERF401 - stop() needs them
        learners, alone = rows[: options.learners], rows[options.learners :]
        follow(rows)
        if not any(row.state == "done" for row in learners):
            raise SystemExit("\nNo learner finished.")
        report(options, learners, alone)
    except KeyboardInterrupt:
        stop(rows)
        print("\nStopped.", flush=True)
        os._exit(130)  # at once: unloading torch takes longer than all the rest
    return 0


if __name__ == "__main__":
    sys.exit(main())
