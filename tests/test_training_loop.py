"""Every snippet of docs/your-training-loop.md runs as printed and does what its section says."""

import asyncio
import json
import math
import re
import signal
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist

import gradientmail as gm

PAGE = Path(__file__).parents[1] / "docs" / "your-training-loop.md"
INTRODUCTION = ""
"""The heading of what stands before the first one: the lines that every snippet follows."""


@cache
def snippets() -> dict[str, tuple[str, ...]]:
    """The blocks marked ``python`` by the heading that they stand under."""
    parts = re.split(r"^## (.*)\n", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    named = zip([INTRODUCTION, *parts[1::2]], parts[::2], strict=True)
    pattern = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {heading: tuple(pattern.findall(text)) for heading, text in named}


def trained(names: dict[str, Any]) -> None:
    """The session is closed, and the model holds a commit, not what it began with.

    Whether the loss is lower depends on which few rounds there was time for.
    """
    session: gm.Session = names["session"]
    assert session.rounds_seen >= 0
    with pytest.raises(gm.SessionClosed):
        session.step(samples=1)
    torch.manual_seed(1)
    fresh = dict(names)
    exec(snippets()[INTRODUCTION][0], fresh)
    assert names["loss_of"](names["model"], torch.randn(256, 4)).isfinite()
    pairs = zip(names["model"].parameters(), fresh["model"].parameters(), strict=False)
    assert any(mine.shape != new.shape or not mine.equal(new) for mine, new in pairs)


def kept(names: dict[str, Any], prefix: str) -> list[str]:
    """Keys in the mailbox."""
    box: gm.Mailbox = names["mailbox"]
    return list(asyncio.run(box.list(prefix)))


def shared(names: dict[str, Any]) -> None:
    """All units are this node's, and it has trained on them."""
    trained(names)
    assert kept(names, "units/") == [f"units/epoch0-shard{i}" for i in range(6)]


def waited(names: dict[str, Any]) -> None:
    """The barrier was passed by the one who came."""
    trained(names)
    assert names["learners"] == {names["session"].learner_id}
    assert len(kept(names, "barriers/start/")) == 1


def resumed(names: dict[str, Any]) -> None:
    """All batches were trained on, and the last checkpoint can be gone on from."""
    trained(names)
    assert names["position"] == len(names["loader"])
    state = torch.load("checkpoint.pt", weights_only=True)
    assert state["position"] == names["position"]
    assert state["session"]["local_step"] == names["position"]
    assert names["saved"] is None
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert callable(handler)
    assert ended.value.code == 128 + signal.SIGTERM
    exec(snippets()["Stopping and starting again"][0], names)
    assert dict(names)["saved"]["position"] == names["position"]


def streamed(names: dict[str, Any]) -> None:
    """With deltas of four bits."""
    trained(names)
    assert names["session"].rounds_seen >= 4


def skipped(names: dict[str, Any]) -> None:
    """A step whose gradients overflow is not counted."""
    trained(names)
    overflowing = [torch.full((16, 4), 1e36), *names["loader"]]
    exec(snippets()[INTRODUCTION][0], names)
    counts: list[int] = []

    class Counting:
        """Stands for the session."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *args: object) -> None:
            pass

        def step(self, *, samples: int) -> None:
            counts.append(samples)

    names = {**names, "loader": overflowing, "gm": SimpleNamespace(Session=Counting)}
    exec(snippets()["Mixed precision"][0], names)
    assert len(counts) == len(overflowing) - 1


def evaluated(names: dict[str, Any]) -> None:
    """Three times in the middle, and the committed model at the end."""
    trained(names)
    assert len(names["losses"]) == 3
    assert all(math.isfinite(float(loss)) for loss in names["losses"])
    assert len({float(loss) for loss in names["losses"]}) == 3  # it trained between them
    assert names["newest_round"] == names["session"].rounds_seen
    assert not names["committed"].training
    assert names["model"].training


def shared_out(names: dict[str, Any]) -> None:
    """Names without wrappers; one process here has all that the others would get."""
    dist.destroy_process_group()
    trained(names)
    manifest = json.loads(bytes(asyncio.run(names["mailbox"].get("manifest.json"))))
    assert [row["name"] for row in manifest["schema"]] == [
        "0.bias",
        "0.weight",
        "2.bias",
        "2.weight",
    ]


def adapted(names: dict[str, Any]) -> None:
    """The base is as it was, and not in the run."""
    fresh: dict[str, Any] = {}
    exec(snippets()[INTRODUCTION][0], fresh)
    pairs = zip(names["model"].parameters(), fresh["model"].parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert names["session"].rounds_seen >= 0
    manifest = json.loads(bytes(asyncio.run(names["mailbox"].get("manifest.json"))))
    assert [row["name"] for row in manifest["schema"]] == ["1.bias", "1.weight"]


def averaged(names: dict[str, Any]) -> None:
    """What was loaded has the statistics, too."""
    model, loaded = names["model"].eval(), names["loaded"]
    batch = torch.randn(64, 4)
    assert torch.equal(model(batch), loaded(batch))
    assert not torch.equal(loaded[1].running_var, torch.ones(8))


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "Data: each node its own": trained,
    "Local SGD": trained,
    "Standard DiLoCo": trained,
    "Stopping and starting again": resumed,
    "Streaming DiLoCo": streamed,
    "The loop": trained,
    "Gradient accumulation": trained,
    "Mixed precision": skipped,
    "Several optimizers": trained,
    "Tokens": trained,
    "Evaluation": evaluated,
    "Compiled, wrapped and distributed models": shared_out,
    "Frozen parameters and adapters": adapted,
    "Batch norm and other buffers": averaged,
    "DataLoader workers": trained,
    "Notebooks": trained,
    "Waiting for other nodes": waited,
    "Work shared by all nodes": shared,
}
"""By heading, what is true of the names that its snippets have left."""


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun tells the only process that it starts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in told.items():
        monkeypatch.setenv(name, value)


# Python warns of a fork beside threads, and PyTorch's compiler of its own matters.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "heading", [heading for heading, blocks in snippets().items() if heading and blocks]
)
def test_the_code_runs_as_printed(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A reader's session may look once a second; a test need not wait so long.
    quick = {**(gm.Session.__init__.__kwdefaults__ or {}), "poll_interval": 0.02}
    monkeypatch.setattr(gm.Session.__init__, "__kwdefaults__", quick)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in (*snippets()[INTRODUCTION], *snippets()[heading]):
        exec(block, names)
    assert heading in CHECKS, f"say in CHECKS what the code under {heading!r} does"
    CHECKS[heading](names)
