"""A learner in MLX. ``torch_learner.py`` beside this file is its twin, and both join one run.

    uv run examples/torch_learner.py runs/twins --learners 2     in one terminal
    uv run examples/mlx_learner.py runs/twins --learners 2       in another

A small network predicts the next byte of Python source. What makes the two models one to a run is
that their parameters have the same names, dtypes and shapes.
"""

import argparse
import math
import sys
from random import Random

import mlx.core as mx
from mlx import nn, optimizers

import gradientmail as gm
from gradientmail.patterns.barrier import Barrier
from windows import CONTEXT, draw, read_text

BATCH = 64
ALGORITHM = gm.DiLoCo(
    sync_every=20,
    fragments=2,
    quorum_size=2,  # a round waits for the twin as long as it lives
    outer_momentum=0.5,  # for few learners: docs/quality.md
)


class NextByte(nn.Module):
    """``embed.weight``, and ``layers.0`` and ``layers.1`` with a weight and a bias each."""

    def __init__(self) -> None:
        """Draw the parameters."""
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.layers = [nn.Linear(16 * CONTEXT, 64), nn.Linear(64, 256)]

    def __call__(self, windows: mx.array) -> mx.array:
        """Mean loss in bits per byte of windows in the shape ``(batch, CONTEXT + 1)``."""
        past = self.embed(windows[:, :-1]).flatten(1)
        logits = self.layers[1](mx.tanh(self.layers[0](past)))
        return nn.losses.cross_entropy(logits, windows[:, -1], reduction="mean") / math.log(2)


def main() -> None:
    """Join the run, train until it has some rounds, leave, and measure what was committed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", help="where the run is, or a new one is to be")
    parser.add_argument("--rounds", type=int, default=100, help="train until the run has so many")
    parser.add_argument("--learners", type=int, default=1, help="begin when so many have joined")
    options = parser.parse_args()

    text, random, model = read_text(), Random(), NextByte()
    training, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    optimizer = optimizers.Adam(learning_rate=2e-3)
    loss_and_gradients = nn.value_and_grad(model, model)
    mailbox = gm.FilesystemMailbox(options.folder)
    with gm.Session(
        model,
        algorithm=ALGORITHM,
        mailbox=mailbox,
        poll_interval=0.1,
        lease_every=2.0,
        lease_timeout=10.0,
    ) as session:
        if options.learners > 1:
            print(f"{session.learner_id} waits until {options.learners} are there", flush=True)
        barrier = Barrier(mailbox=mailbox, learner_id=session.learner_id)
        barrier.wait("start", parties=options.learners)
        print(f"{session.learner_id} trains in MLX, from round {session.rounds_seen + 1} on")
        while session.rounds_seen + 1 < options.rounds:
            _, gradients = loss_and_gradients(mx.array(draw(training, BATCH, random)))
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), optimizer.state)
            session.step(samples=BATCH)
    loss = model(mx.array(draw(held_out, 4096, Random(0))))
    print(f"round {session.rounds_seen}: {loss.item():.3f} bits per byte of held-out text")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; start it again with the same line to go on")
        sys.exit(130)
