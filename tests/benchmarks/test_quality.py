"""The quality benchmark: many models at once learn what they learn one by one, and what is run."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """``benchmarks/quality.py``, as its command imports it, on one thread as its command is."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("quality")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_models_trained_together_become_what_they_become_alone(
    quality: ModuleType, model: str
) -> None:
    torch.manual_seed(0)
    kind = quality.KINDS[model]
    models = [kind.new_model() for _ in range(3)]
    alone = [kind.new_model() for _ in range(3)]
    for trained, other in zip(models, alone, strict=True):
        other.load_state_dict(trained.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), betas=(0.9, 0.99)) for m in alone]
    stack = kind.training(models)
    read, generator = torch.randint(256, (500,)), torch.Generator().manual_seed(1)
    for _ in range(3):
        text = [kind.draw(read, 5, generator) for _ in range(3)]
        for other, optimizer, own in zip(alone, optimizers, text, strict=True):
            optimizer.param_groups[0]["lr"] = 1e-3
            optimizer.zero_grad()
            loss = other(own)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            optimizer.step()
        if model == "mlp":
            losses = stack.losses(torch.stack(text))
            assert losses[-1].item() == pytest.approx(loss.item(), abs=1e-4)
        stack.step(torch.stack(text), 1e-3)
    for trained, other in zip(models, alone, strict=True):
        for name, mine in trained.named_parameters():
            # A bias of attention's keys changes nothing: rounding is all of its gradient.
            if not name.endswith("in_proj_bias"):
                assert torch.allclose(mine, other.get_parameter(name), atol=1e-5)


def test_the_cases_that_are_wanted_are_run(quality: ModuleType) -> None:
    cases = list(quality.cases(None))
    assert len(set(cases)) == len(cases)
    assert {case.learners for case in cases if case.reference} == {1, 2, 4, 8}
    for merge in ("rda", "mean"):
        assert {2, 4, 8} <= {case.learners for case in cases if case.merge == merge}
    assert {case.delta_dtype for case in cases} == {"F32", "BF16", "F8_E4M3", "F4"}
    assert {case.commit_dtype for case in cases} == {None, "F4"}
    assert {case.sync_every for case in cases} == {10, 30, 100}
    mixed = {(case.overlap, case.mixing) for case in cases}
    assert mixed == {(0, 0.0), (5, 0.0), (5, 0.5), (10, 0.0), (10, 0.5)}
    assert len(quality.SEEDS) == 3


def test_a_case_is_run_once_with_all_seeds_and_reported(
    quality: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def text(part: int | None) -> torch.Tensor:
        return torch.arange(400 + (part or 0)).byte()

    monkeypatch.setattr(quality, "STEPS", 40)
    monkeypatch.setattr(quality, "text_of", text)
    overlapped = quality.Case(learners=2, sync_every=10, overlap=5, mixing=0.5, delta_dtype="F4")
    reference = quality.Case(learners=2, reference=True)
    transformer = quality.Case(learners=2, sync_every=10, model="transformer")
    studies = {"learners": [reference, overlapped], "transformer": [transformer]}
    monkeypatch.setattr(quality, "STUDIES", studies)
    path = tmp_path / "results.jsonl"
    quality.run(None, path)
    written = path.read_text("utf-8")
    found = quality.read(path)
    assert list(found) == [reference, overlapped]
    assert all(len(set(losses)) == len(quality.SEEDS) for losses in found.values())
    quality.run(None, path)
    assert path.read_text("utf-8") == written
    rows = list(quality.rows(found))
    assert [row["case"] for row in rows] == ["2 learners, data parallel", "2 learners, merge rda"]
    picture = quality.plot(rows)
    assert picture.startswith("<svg")
    assert picture.count("<circle") == 2
    quality.run("transformer", path)
    assert len(set(quality.read(path)[transformer])) == len(quality.SEEDS)
