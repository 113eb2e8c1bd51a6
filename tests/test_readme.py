"""The README's code runs as printed, and the reference pages name all there is, as it is."""

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradientmail as gm
from gradientmail import events

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not {part for part in path.relative_to(ROOT).parts if part.startswith(".")}
]


def python_blocks(page: str) -> list[str]:
    """The code of every block marked ``python``, in order."""
    return re.findall(
        r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )


def table_rows(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table after ``heading``, without its head, cells stripped."""
    text = (ROOT / page).read_text("utf-8").split(f"{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    rows = [line.strip("|").split("|") for line in table[0].splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def training_setup() -> dict[str, Any]:
    """What a reader has before the README's first line: a model, a loader and a step of his own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = [torch.randn(16, 4) for _ in range(120)]
    loader = [(x, x.sum(1, keepdim=True)) for x in inputs]

    def train_step(
        model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
    ) -> float:
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "loader": loader, "train_step": train_step}


def test_the_code_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loop, load, watch = python_blocks("README.md")
    names = training_setup()
    before = names["train_step"](names["model"], names["optimizer"], *names["loader"][0])

    exec(loop, names)
    trained = [p.detach().clone() for p in names["model"].parameters()]
    assert names["loss"] < before
    assert names["session"].rounds_seen >= 0
    assert len(loop.splitlines()) == 10

    for parameter in names["model"].parameters():
        parameter.data.zero_()
    exec(load, names)
    assert names["newest_round"] == names["session"].rounds_seen
    loaded = [p.detach() for p in names["model"].parameters()]
    assert all(torch.equal(a, b) for a, b in zip(loaded, trained, strict=True))

    exec(watch, names)
    assert names["session"].rounds_seen == names["newest_round"]
    show: Callable[[events.Event], None] = names["show"]
    show(
        events.RoundSeen(
            round=7, fragment=0, version=1, learners=("a", "b"), rejected=(), cosine=None
        )
    )
    assert "round 7 holds a, b\n" in capsys.readouterr().out


def test_the_commands_are_named() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert "\nuv run examples/byte_lm.py\nuv run pytest\n" in text


def test_every_option_is_explained_with_its_default() -> None:
    shown = {
        row[0].strip("`"): row[1].strip("`") for row in table_rows("docs/options.md", "## `DiLoCo`")
    }
    fields = dataclasses.fields(gm.DiLoCo)
    assert list(shown) == [field.name for field in fields]
    algorithm = gm.DiLoCo(100, 8)
    for field in fields[2:]:
        value = getattr(algorithm, field.name)
        expected = (
            f"{value!r}" if not dataclasses.is_dataclass(value) else f"{type(value).__name__}()"
        )
        assert shown[field.name] == expected, field.name


def test_every_argument_of_a_session_is_explained() -> None:
    shown = {
        row[0].strip("`"): row[1].strip("`")
        for row in table_rows("docs/options.md", "## `Session`")
    }
    parameters = inspect.signature(gm.Session).parameters
    assert set(shown) == set(parameters) - {"model", "algorithm", "mailbox"}
    for name in ("poll_interval", "lease_every", "lease_timeout", "compression", "buffers"):
        assert shown[name].replace('"', "'") == repr(parameters[name].default), name


def test_every_event_is_explained_at_its_level() -> None:
    shown = {row[0].strip("`"): row[2] for row in table_rows("docs/events.md", "# Events")}
    kinds = {kind.__name__: kind for kind in events.Event.__subclasses__()}
    assert set(shown) == set(kinds)
    levels = {name: logging.getLevelName(kind.level).lower() for name, kind in kinds.items()}
    assert shown == levels


def test_every_module_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "how-it-works.md").read_text("utf-8")
    package = ROOT / "src" / "gradientmail"
    modules = [path.name for path in package.glob("*.py") if path.stem != "__init__"]
    words = {"schema.py", "errors.py", "events.py", "clock.py"}
    folders = [f"{path.name}/" for path in package.iterdir() if any(path.glob("*.py"))]
    assert [
        name for name in modules + folders if name not in words and f"`{name}`" not in guide
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page: Path) -> None:
    folders = [ROOT / name for name in ("src", "tests", "examples", "benchmarks")]
    existing = {path.name for folder in folders for path in folder.rglob("*.py")}
    named = re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", page.read_text("utf-8"))
    assert sorted(set(named) - existing) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []
