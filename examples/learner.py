"""One learner of a run: start this script, unchanged, on every machine.

    uv run examples/learner.py MAILBOX --rank 0 --world 2        on one machine
    uv run examples/learner.py MAILBOX --rank 1 --world 2        on another

MAILBOX is a folder that all machines reach, or a bucket: s3://bucket/runs/bytes (see
docs/mailboxes.md; ``gradientmail doctor MAILBOX`` tells whether it will do). The learners train a
small language model on the source of the Python standard library, each on its own share of the
files. They never talk to each other: how far their parameters moved goes through the mailbox.

Kill one, with kill -9 if you like, and start it again with the same line: it goes on where the run
is. All end when the run is as long as --steps says, with the same parameters. Give the same MAILBOX
and a larger --steps later, and the run goes on. On one machine, two terminals do as well. Put your
own model, data and optimizer in the place of these.
"""

import argparse
import math
import sys
import time
from dataclasses import replace

import torch
from torch import nn

import gradientmail as gm
from byte_lm import ALGORITHM, BATCH, CONTEXT, ByteModel, draw, held_out_loss, source_text
from gradientmail import events
from gradientmail.patterns.barrier import Barrier

LEARNING_RATE, WARMUP = 2e-3, 50
SHOW_SECONDS = 5.0


def say(text: str) -> None:
    """Print a line, with the time of day."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


begun_with = math.inf
"""The newest round when this learner joined; those before, which it hears of first, are no news."""


def tell(event: events.Event) -> None:
    """What the others do, in plain words. What is wrong is in the log of ``gradientmail``."""
    global begun_with
    match event:
        case events.Joined(rounds_seen=begun_with):
            pass
        case events.LearnerAppeared(learner=learner):
            say(f"{learner} has joined")
        case events.LearnerLeft(learner=learner):
            say(f"{learner} has left")
        case events.TookOver(previous=previous):
            say(f"this learner now closes the rounds, instead of {previous}")
        case events.RoundSeen(round=number, learners=learners) if number > begun_with:
            say(f"round {number} is made of what {' and '.join(learners)} learned")
        case _:
            pass


def await_others(where: str, done: str, learner: str, options: argparse.Namespace) -> None:
    """Wait until all have ``done`` so once. Who starts again, or late, is not held up."""
    if options.world == 1:
        return
    barrier = Barrier(mailbox=gm.open_mailbox(options.mailbox), learner_id=learner)
    say(f"waits {options.wait:g} s at most until all {options.world} have {done}")
    try:
        barrier.wait(where, parties=options.world, timeout=options.wait)
    except TimeoutError as missing:
        say(f"going on without the others: {missing}")


def train(
    session: gm.Session,
    model: ByteModel,
    optimizer: torch.optim.Optimizer,
    options: argparse.Namespace,
) -> None:
    """Your own training loop, with one line more. It ends when the run is long enough."""
    text = source_text(options.rank, options.world)
    generator = torch.Generator().manual_seed(1000 * session.rounds_seen + options.rank)
    rounds = options.steps * ALGORITHM.fragments // ALGORITHM.sync_every
    shown = time.monotonic()
    steps = 0
    while (begun := session.rounds_seen + 1) < rounds:  # a learner that joins late begins there
        steps += 1
        decay = 0.55 + 0.45 * math.cos(math.pi * begun / rounds)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * decay * min(1, steps / WARMUP)
        loss = model(draw(text, BATCH, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        session.step(samples=BATCH * CONTEXT)
        if time.monotonic() - shown > SHOW_SECONDS:
            shown = time.monotonic()
            say(f"{steps} steps here, {begun} of {rounds} rounds, {loss.item():.2f} bits per byte")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mailbox", help="folder, or s3://bucket/prefix?endpoint=…")
    parser.add_argument("--rank", type=int, default=0, help="which share of the data, from 0")
    parser.add_argument(
        "--world", type=int, default=1, help="how many shares there are; a run keeps its number"
    )
    parser.add_argument(
        "--steps", type=int, default=1440, help="of each, how long the run is (default: 1440)"
    )
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the others")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32 (default: 128)")
    parser.add_argument("--depth", type=int, default=2, help="blocks of the model (default: 2)")
    options = parser.parse_args()
    if options.width < 32 or options.width % 32:
        parser.error(f"--width is a multiple of 32, not {options.width}")
    try:
        gm.open_mailbox(options.mailbox)
    except (ValueError, OSError) as error:
        parser.error(f"MAILBOX: {error}")
    if not 0 <= options.rank < options.world:
        parser.error(f"--rank is from 0 to {options.world - 1} when --world is {options.world}")
    return options


def main() -> int:
    """Join the run, train, and say what came out."""
    options = parse_options()
    torch.set_num_threads(1)  # enough for so small a model, and others may share this machine
    torch.manual_seed(0)
    model = ByteModel(options.width, options.depth)
    # Before joining: the others wait for a learner that is in the run and not yet ready to train.
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    learner = f"rank-{options.rank}"
    say(f"{learner} looks for the run in {options.mailbox}")
    try:
        with gm.Session(
            model,
            # A round waits for every learner that lives, so that none has trained in vain.
            algorithm=replace(ALGORITHM, quorum_size=options.world),
            mailbox=gm.open_mailbox(options.mailbox),
            learner_id=learner,
            poll_interval=0.5,
            lease_every=5.0,
            lease_timeout=20.0,
            callbacks=(events.log_events, tell),
        ) as session:
            begun = session.rounds_seen + 1
            how = f"has {begun} rounds already" if begun else "begins"
            say(f"{learner} of {options.world} learners is in the run, which {how}")
            await_others("start", "joined", learner, options)
            train(session, model, optimizer, options)
        # What the others had under way has been committed when they have left, too.
        await_others(f"end-{options.steps}", "finished", learner, options)
        rounds = gm.align(model, mailbox=gm.open_mailbox(options.mailbox)) + 1
    except KeyboardInterrupt:
        say("stopped; start it again with the same line to go on")
        return 130
    except gm.GradientMailError as error:
        say(f"{type(error).__name__}: {error}")
        if isinstance(error, gm.RunConfigMismatch) and "quorum_size" in str(error):
            say("quorum_size is --world: give the one that the run was begun with")
        return 1
    say(
        f"done after {rounds} rounds: {held_out_loss(model):.2f} bits per byte of text that nobody "
        "has trained on, 8 for a model that knows nothing"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
