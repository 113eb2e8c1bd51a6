"""One learner of a run that PyTorch and MLX share, as a process. Run by the tests.

Arguments: ``torch`` or ``mlx``, and a folder for each run to take part in, named for its dtypes. In
each the MLX node joins when PyTorch's has claimed the first round, and with it the role of closer;
that one leaves after a while and comes back when the other has closed some rounds alone and waits
for it. Who closes rounds keeps the role while it lives, however slow the machine is. Prints a JSON
line for each session.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gradientmail as gm
from gradientmail.events import Event, RoundCommitted, TaskFailed
from gradientmail.watch import Watch

LEAVE_AFTER, BACK_AFTER, LAST = 7, 10, 17
"""Rounds: PyTorch's node leaves after the first, joins again after the second; then the end."""

type Parts = tuple[object, Callable[[int], None], Callable[[], dict[str, bytes]]]
"""A model, its training step, and how to read it."""


def torch_parts(dtype: str) -> Parts:
    """A network of two layers in PyTorch."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(10, 40), torch.nn.Linear(40, 3)])

    model = Net().to(getattr(torch, dtype))

    def step(number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(16, 10, generator=draw).to(getattr(torch, dtype))
        loss = model.layers[1](torch.tanh(model.layers[0](x))).sub(1.0).square().mean()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():  # importing torch.optim would take most of the time
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=0.05)

    def read() -> dict[str, bytes]:
        raw = {n: p.detach().view(torch.uint8).numpy() for n, p in model.named_parameters()}
        return {name: array.tobytes() for name, array in raw.items()}

    return model, step, read


def mlx_parts(dtype: str) -> Parts:
    """The same in MLX."""
    import mlx.core as mx
    from mlx import nn, optimizers
    from mlx.utils import tree_flatten

    mx.random.seed(2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(10, 40), nn.Linear(40, 3)]

    model = Net()
    model.set_dtype(getattr(mx, dtype))
    optimizer = optimizers.Adam(learning_rate=0.01)

    def loss(x: mx.array) -> mx.array:
        return (model.layers[1](mx.tanh(model.layers[0](x))) + 1.0).square().mean()

    gradients = nn.value_and_grad(model, loss)

    def step(number: int) -> None:
        x = mx.random.normal((16, 10), key=mx.random.key(number)).astype(getattr(mx, dtype))
        optimizer.update(model, gradients(x)[1])
        mx.eval(model.parameters(), optimizer.state)

    def read() -> dict[str, bytes]:
        flat: Any = tree_flatten(model.parameters())
        return {name: memoryview(array).tobytes() for name, array in flat}

    return model, step, read


def take_part(folder: Path, learner: str, parts: Parts, until: int) -> None:
    """One session, from joining until round ``until`` is in the model."""
    delta_dtype, commit_dtype = (
        None if part == "none" else part for part in folder.name.split("-")[1:]
    )
    model, step, read = parts
    closed: list[int] = []
    failed: list[str] = []

    def notice(event: Event) -> None:
        if isinstance(event, RoundCommitted):
            closed.append(event.round)
        elif isinstance(event, TaskFailed):
            failed.append(repr(event))

    with gm.Session(
        model,
        algorithm=gm.DiLoCo(
            sync_every=6,
            fragments=2,
            overlap_steps=0,
            quorum_size=2,
            delta_dtype=delta_dtype,
            commit_dtype=commit_dtype,
        ),
        mailbox=gm.FilesystemMailbox(folder),
        learner_id=learner,
        poll_interval=0.02,
        lease_every=0.5,
        lease_timeout=20.0,
        callbacks=[notice],
    ) as session:
        wait_for(lambda: until == LAST or len(list(folder.glob("leases/*"))) == 2)
        number = 0
        while session.rounds_seen < until:
            if session.rounds_seen >= BACK_AFTER:
                wait_for(lambda: any(folder.glob("leases/torch-again/*")))
            step(number)
            session.step(samples=16)
            number += 1
    digest = hashlib.sha256(b"".join(data for _, data in sorted(read().items()))).hexdigest()
    result: dict[str, Any] = {
        "run": folder.name,
        "learner": learner,
        "closed": closed,
        "failed": failed,
        "seen": session.rounds_seen,
        "digest": digest,
    }
    print(json.dumps(result), flush=True)


def wait_for(reached: Callable[[], bool]) -> None:
    """Poll until it is so; whoever started this process ends it when it takes too long."""
    while not reached():
        time.sleep(0.01)


def never_for_silence(watch: Watch) -> float:
    """Instead of ``Watch.takeover_seconds``."""
    del watch
    return 100.0


def main(framework: str, folders: list[Path]) -> None:
    """Take part in one run after the other."""
    for folder in folders:
        dtype = folder.name.split("-")[0]
        if framework == "torch":
            parts = torch_parts(dtype)
            take_part(folder, "torch", parts, LEAVE_AFTER)
            alone = folder / f"rounds/{BACK_AFTER:010d}.json"
            wait_for(alone.exists)
            take_part(folder, "torch-again", parts, LAST)
        else:
            parts = mlx_parts(dtype)
            wait_for((folder / "claims/0000000000/001.json").exists)
            take_part(folder, "mlx", parts, LAST)


if __name__ == "__main__":
    with patch.object(Watch, "takeover_seconds", never_for_silence):
        main(sys.argv[1], [Path(name) for name in sys.argv[2:]])
