"""Models as users have them: wrapped, frozen in part, with odd parameters, with buffers."""

import asyncio
import json
import sys
import threading
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as checkpointing
from tests.session.models import ALGORITHM, QUICK, Events, net, together, train_step
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

import gradientmail as gm
from gradientmail import events
from gradientmail.verification import verify


def session(box: gm.Mailbox, model: nn.Module, **changes: Any) -> gm.Session:
    """A session that is quick and silent; ``changes`` to its arguments."""
    given: dict[str, Any] = {"algorithm": ALGORITHM, "callbacks": [], **QUICK, **changes}
    return gm.Session(model, mailbox=box, **given)


def train(
    joined: gm.Session, step: Callable[[int], object], rounds: int = 2, most: int = 20_000
) -> None:
    """Train until so many more rounds were seen."""
    wanted = joined.rounds_seen + rounds
    for number in range(most):
        if joined.rounds_seen >= wanted:
            return
        step(number)
        joined.step(samples=6)
        threading.Event().wait(0.001)
    raise AssertionError("no round was committed")


def count(joined: gm.Session, steps: int = 8) -> None:
    """Steps that train nothing."""
    for _ in range(steps):
        joined.step(samples=1)


def stepper(model: nn.Module, lr: float = 0.05) -> Callable[[int], None]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    return lambda number: train_step(model, optimizer, number)


def manifest(box: gm.Mailbox) -> dict[str, Any]:
    return json.loads(bytes(asyncio.run(box.get("manifest.json")) or b""))


def names(box: gm.Mailbox) -> list[str]:
    return [row["name"] for row in manifest(box)["schema"]]


# Wrapped


@pytest.fixture
def gloo(tmp_path: Path) -> Generator[None]:
    """A process group of this process alone."""
    init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    destroy_process_group()


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def inside(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    model[0] = checkpointing.checkpoint_wrapper(model[0])
    compiled: Any = torch.compile(model[2], backend="eager")
    model[2] = compiled
    return model


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: model,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "in place": in_place,
    "distributed": DistributedDataParallel,
    "distributed compiled": lambda model: DistributedDataParallel(
        torch.compile(model, backend="eager")
    ),
    "checkpointed": checkpointing.checkpoint_wrapper,
    "inside": inside,
}


@pytest.mark.usefixtures("gloo")
@pytest.mark.filterwarnings("ignore")  # of compilers and process groups; not what is tested
def test_wrapped_and_plain_nodes_are_one_run() -> None:
    """One after the other, each trains on through its wrapper from where the last one left."""
    box, seen = gm.MemoryMailbox(), -1
    models = {name: net(i) for i, name in enumerate(WRAPPERS)}
    for name, wrap in WRAPPERS.items():
        wrapped = wrap(models[name])
        with session(box, wrapped, learner_id=name.replace(" ", "-")) as joined:
            assert joined.rounds_seen == seen, name
            before = [p.detach().clone() for p in models[name].parameters()]
            train(joined, stepper(wrapped))
        seen = joined.rounds_seen
        after = list(models[name].parameters())
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True)), name
        other = net(99)
        assert gm.align(other, mailbox=box) == seen
        pairs = zip(after, other.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs), name
    assert names(box) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_sharded_models_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins: the real ones ask for several processes, and one takes long to import."""
    where = "torch.distributed.fsdp.fully_sharded_data_parallel"
    sharding = type("FullyShardedDataParallel", (nn.Module,), {})
    module = types.ModuleType(where)
    monkeypatch.setattr(module, "FullyShardedDataParallel", sharding, raising=False)
    monkeypatch.setitem(sys.modules, where, module)
    model = nn.Sequential(nn.Linear(2, 2), sharding())
    with pytest.raises(ValueError, match=r"module 1 is sharded.*holds the whole model"):
        session(gm.MemoryMailbox(), model)

    piece = nn.Linear(2, 2)
    kind = type("DTensor", (nn.Parameter,), {"__module__": "torch.distributed.tensor"})
    piece.weight = kind(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"'weight' is a DTensor, a piece .*FSDP"):
        session(gm.MemoryMailbox(), piece)


# Odd parameters


class Odd(nn.Module):
    """Tied, transposed, channels-last, expanded, sliced, 0-d, empty and frozen parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.transposed = nn.Parameter(torch.randn(4, 3, generator=draw).t())
        last = torch.randn(2, 1, 2, 2, generator=draw).to(memory_format=torch.channels_last)
        self.conv = nn.Conv2d(1, 2, 2)
        self.conv.weight = nn.Parameter(last)
        self.expanded = nn.Parameter(torch.randn(1, 4, generator=draw).expand(3, 4))
        self.sliced = nn.Parameter(torch.randn(8, generator=draw)[::2])
        self.scale = nn.Parameter(torch.randn((), generator=draw))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(3, generator=draw), requires_grad=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) * self.scale + self.sliced
        x = x + (x @ self.transposed.t() + self.frozen) @ self.expanded
        pixels = self.conv(x.view(-1, 1, 2, 2)).mean()
        return self.head(x).square().mean() + pixels.square() + self.empty.sum()


def test_odd_parameters_are_exchanged_and_keep_their_form() -> None:
    box, models = gm.MemoryMailbox(), [Odd(1), Odd(2)]
    forms = [{n: (p.data_ptr(), p.stride()) for n, p in m.named_parameters()} for m in models]
    frozen = [model.frozen.detach().clone() for model in models]
    ready = threading.Barrier(2)

    def life(i: int) -> None:
        trained = [p for p in models[i].parameters() if p.requires_grad]
        able = [p for p in trained if 0 not in p.stride()]  # no optimizer writes an expanded one
        optimizer = torch.optim.SGD(able, lr=1e-4)

        def step(number: int) -> None:
            optimizer.zero_grad()
            models[i](torch.arange(5)).backward()
            optimizer.step()

        with session(box, models[i], learner_id=f"n{i}") as joined:
            ready.wait(90)
            train(joined, step, 4)

    together(lambda: life(0), lambda: life(1))
    assert "head.weight" not in names(box)
    assert "frozen" not in names(box)
    for i, model in enumerate(models):
        assert gm.align(model, mailbox=box) >= 3
        assert {n: (p.data_ptr(), p.stride()) for n, p in model.named_parameters()} == forms[i]
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.frozen, frozen[i])
    trained = [{n: p for n, p in m.named_parameters() if n != "frozen"} for m in models]
    assert all(torch.equal(p, trained[1][n]) for n, p in trained[0].items())


# Frozen in part


class Adapted(nn.Module):
    """A frozen base with a trained adapter, as LoRA has it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, 3).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_only_the_adapter_is_exchanged() -> None:
    box, model, other = gm.MemoryMailbox(), Adapted(0), Adapted(1)
    base = other.base.weight.clone()
    with session(box, model) as joined:
        train(joined, stepper(model))
    assert names(box) == ["down.weight", "up.weight"]
    gm.align(other, mailbox=box)
    assert torch.equal(other.up.weight, model.up.weight)
    assert torch.equal(other.base.weight, base)


def freeze(model: Adapted) -> None:
    model.up.weight.requires_grad = False


def unfreeze(model: Adapted) -> None:
    model.base.bias.requires_grad = True


def replace(model: Adapted) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def add(model: Adapted) -> None:
    model.more = nn.Linear(1, 1)


def add_one(model: Adapted) -> None:
    model.up.register_parameter("gain", nn.Parameter(torch.ones(1)))


def remove(model: Adapted) -> None:
    del model.up.weight


def replace_module(model: Adapted) -> None:
    model.up = nn.Linear(2, 3, bias=False)


def remove_module(model: Adapted) -> None:
    model.up = None  # type: ignore[assignment]


def remove_and_replace(model: Adapted) -> None:
    del model.down
    model.down = nn.Linear(4, 2, bias=False)


def replace_frozen(model: Adapted) -> None:
    model.base = nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace_module, r"'up\.weight' was replaced by another tensor"),
        (remove_module, r"'up\.weight' was removed"),
        (remove_and_replace, r"'down\.weight' was replaced by another tensor"),
        (replace_frozen, r"'base\.weight' was added"),
        (freeze, r"'up\.weight' was frozen \(requires_grad=False\)"),
        (unfreeze, r"'base\.bias' was unfrozen \(requires_grad=True\)"),
        (replace, r"'base\.weight' was replaced by another tensor"),
        (add, r"'more\.weight' was added"),
        (add_one, r"'up\.gain' was added"),
        (remove, r"'up\.weight' was removed"),
    ],
)
def test_another_set_of_parameters_during_a_run_is_an_error_that_says_so(
    change: Callable[[Adapted], None], said: str
) -> None:
    model = Adapted(0)
    joined = session(gm.MemoryMailbox(), model)
    change(model)
    for _ in range(2):  # and again, for who catches it
        with pytest.raises(ValueError, match=said + r".*since the session began") as caught:
            count(joined)
        assert "before the session" in str(caught.value)
    with pytest.raises(ValueError, match=said), joined:  # leaves at once
        joined.step(samples=1)


def test_what_is_frozen_only_within_a_step_and_frozen_additions_are_no_error() -> None:
    box, model = gm.MemoryMailbox(), Adapted(0)
    step = stepper(model)

    def alternate(number: int) -> None:
        model.up.requires_grad_(requires_grad=False)
        model.up.requires_grad_(requires_grad=True)
        step(number)

    with session(box, model) as joined:
        model.probe = nn.Linear(2, 2).requires_grad_(requires_grad=False)
        train(joined, alternate)
    aligned = Adapted(1)
    assert gm.align(aligned, mailbox=box) == joined.rounds_seen >= 0
    assert torch.equal(aligned.up.weight, model.up.weight)


def idle(number: int) -> None:
    """Train nothing."""


def test_a_module_may_be_wrapped_or_moved_during_a_run() -> None:
    """Its parameters are the same, whatever holds them; and what comes later is noticed again."""
    model: Any = Adapted(0)
    with session(gm.MemoryMailbox(), model) as joined:
        model.up = checkpointing.checkpoint_wrapper(model.up)
        train(joined, stepper(model))
        model.down, model.moved = nn.Identity(), model.down
        train(joined, idle)
        model.moved = nn.Linear(4, 2, bias=False)
        with pytest.raises(ValueError, match=r"'moved\.weight' was added"):
            train(joined, idle, rounds=100)
        del model.moved
        with pytest.raises(ValueError, match=r"'down\.weight' was removed"):
            train(joined, idle, rounds=100)


class Tied(nn.Module):
    """One weight in two places, and a place without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.down.weight = self.up.weight


def untie(model: Tied) -> None:
    model.down.weight = nn.Parameter(torch.ones(3, 3))


def fill(model: Tied) -> None:
    model.down.bias = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(("change", "name"), [(untie, "down.weight"), (fill, "down.bias")])
def test_a_parameter_that_comes_where_none_was_or_a_tied_one_was_added(
    change: Callable[[Tied], None], name: str
) -> None:
    model = Tied()
    joined = session(gm.MemoryMailbox(), model)
    change(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"'{name}' was added since the session began"):
            count(joined)
    joined.close()


def test_a_frozen_addition_that_is_unfrozen_later_was_added() -> None:
    model: Any = Adapted(0)
    with session(gm.MemoryMailbox(), model) as joined:
        model.probe = nn.Linear(2, 2).requires_grad_(requires_grad=False)
        train(joined, stepper(model))
        model.probe.requires_grad_(requires_grad=True)
        with pytest.raises(ValueError, match=r"'probe\.weight' was added"):
            train(joined, idle, rounds=100)


@pytest.mark.parametrize("change", ["another", "none", "another with more"])
def test_a_module_whose_averaged_buffers_are_exchanged_is_replaced(change: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False))
    joined = session(gm.MemoryMailbox(), model, buffers="average")
    model[1] = {
        "another": nn.BatchNorm1d(3, affine=False),
        "none": nn.Identity(),
        "another with more": nn.Sequential(nn.BatchNorm1d(3, affine=False)),
    }[change]
    how = "replaced by another tensor" if change == "another" else "removed from the model"
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"the buffer '1\.running_mean' was {how}"):
            count(joined)
    joined.close()


# Buffers


class Normed(nn.Module):
    """Batch norm, a buffer that no checkpoint holds, one of whole numbers, one that is rebound."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm: Any = nn.BatchNorm1d(8)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("cache", torch.full((2,), -torch.inf), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return self.last(self.norm(self.first(x)))


FLOATING = ("mean", "norm.running_mean", "norm.running_var")


def test_buffers_stay_local_and_an_event_says_so_once() -> None:
    box, model, heard = gm.MemoryMailbox(), Normed(), Events()
    with session(box, model, callbacks=[heard]) as joined:
        train(joined, stepper(model), 4)
    (event,) = heard.of(events.BuffersStayLocal)
    assert event.buffers == FLOATING
    assert 'buffers="average"' in str(event)
    assert "averaged" not in manifest(box)
    assert set(names(box)).isdisjoint(FLOATING)
    other = Normed(1)
    gm.align(other, mailbox=box)
    assert torch.equal(other.norm.running_var, torch.ones(8))
    silent = Events()
    session(gm.MemoryMailbox(), net(), callbacks=[silent]).close()
    assert silent.of(events.BuffersStayLocal) == []


def test_averaged_buffers_are_part_of_the_run() -> None:
    box, models, heard = gm.MemoryMailbox(), [Normed(1), Normed(2)], Events()
    ready = threading.Barrier(2)

    def life(i: int) -> None:
        with session(
            box, models[i], learner_id=f"n{i}", buffers="average", callbacks=[heard]
        ) as joined:
            ready.wait(90)
            train(joined, stepper(models[i]), 6)

    together(lambda: life(0), lambda: life(1))
    assert heard.of(events.BuffersStayLocal) == []
    assert manifest(box)["averaged"] == list(FLOATING)
    assert set(FLOATING) <= set(names(box))
    assert not {"norm.num_batches_tracked", "cache"} & set(names(box))
    fresh = Normed(9)
    assert gm.align(fresh, mailbox=box, buffers="average") >= 5
    assert not torch.equal(fresh.norm.running_var, torch.ones(8))
    for model in models:
        gm.align(model, mailbox=box, buffers="average")
        assert all(torch.equal(getattr(model.norm, n), getattr(fresh.norm, n)) for n in RUNNING)
        assert torch.equal(model.mean, fresh.mean)
    from gradientmail.backend.torch import TorchBackend

    report = asyncio.run(verify(box, backend=TorchBackend()))
    assert report.violations == ()
    assert report.recomputed + report.consistent > 0


RUNNING = ("running_mean", "running_var")


def test_a_commit_holds_the_buffers_mean_however_large_the_outer_step() -> None:
    """Momentum would carry a variance that falls from 1 to 0.01 below zero."""
    model, lowest = Normed(), [1.0]
    algorithm = gm.DiLoCo(sync_every=4, fragments=1, in_flight=1, overlap_steps=0, outer_lr=1.0)
    with session(gm.MemoryMailbox(), model, algorithm=algorithm, buffers="average") as joined:
        for number in range(40):
            with torch.no_grad():
                model.norm.running_var.fill_(0.01)
                model.mean.fill_(number)
            joined.step(samples=1)
            lowest.append(model.norm.running_var.min().item())
            if number % 4 == 3:
                torch.testing.assert_close(model.mean, torch.tensor(float(number)))
    assert min(lowest) == pytest.approx(0.01)


def test_the_option_is_one_of_the_whole_run() -> None:
    with_buffers, without = gm.MemoryMailbox(), gm.MemoryMailbox()
    session(with_buffers, Normed(), buffers="average").close()
    session(without, Normed()).close()
    for call in (
        lambda: session(with_buffers, Normed()),
        lambda: gm.align(Normed(), mailbox=with_buffers),
    ):
        with pytest.raises(gm.SchemaMismatch, match=r'running_mean.*(?s:.)*pass buffers="average"'):
            call()
    for call in (
        lambda: session(without, Normed(), buffers="average"),
        lambda: gm.align(Normed(), mailbox=without, buffers="average"),
    ):
        with pytest.raises(gm.SchemaMismatch, match=r'leave buffers="average" out'):
            call()


def test_buffers_that_cannot_be_averaged_are_named() -> None:
    wide, endless = Normed(), Normed()
    wide.register_buffer("wide", torch.zeros(2, dtype=torch.float64))
    endless.register_buffer("mask", torch.full((2,), -torch.inf))
    with pytest.raises(ValueError, match=r"buffer 'wide' is torch\.float64.*persistent=False"):
        session(gm.MemoryMailbox(), wide, buffers="average")
    with pytest.raises(ValueError, match="mask"):
        session(gm.MemoryMailbox(), endless, buffers="average")
    with pytest.raises(ValueError, match=r'buffers must be "local" or "average", not True'):
        session(gm.MemoryMailbox(), net(), buffers=True)


def test_a_buffer_that_goes_away_is_named() -> None:
    model = Normed()
    joined = session(gm.MemoryMailbox(), model, buffers="average")
    model.norm.running_mean = None
    with pytest.raises(ValueError, match=r"buffer 'norm\.running_mean' is None"), joined:
        count(joined)


def test_nan_in_a_buffer_goes_back_to_the_committed_value() -> None:
    model, heard = Normed(), Events()
    with session(gm.MemoryMailbox(), model, buffers="average", callbacks=[heard]) as joined:
        step = stepper(model)

        def spoil(number: int) -> None:
            step(number)
            if not heard.of(events.ParametersNotFinite):  # a commit may come first, and heal it
                with torch.no_grad():
                    model.norm.running_mean.fill_(torch.nan)

        train(joined, step, 2)
        while not heard.of(events.ParametersNotFinite):
            train(joined, spoil, 1)
        train(joined, step, 4)
    assert {t for e in heard.of(events.ParametersNotFinite) for t in e.tensors} == {
        "norm.running_mean"
    }
    assert bool(model.norm.running_mean.isfinite().all())
