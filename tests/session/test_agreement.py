"""Sessions with real threads agree, whatever the store, the precision and the model."""

import asyncio
import json
import mmap
import threading
import time
from collections.abc import Awaitable, Buffer, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.session.models import (
    ALGORITHM,
    QUICK,
    Events,
    equal,
    net,
    parameters,
    together,
    train_step,
)

import gradientmail as gm
from gradientmail import events
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.watch import Watch


def node(
    name: str,
    model: torch.nn.Module,
    box: gm.Mailbox,
    seen: Events,
    *,
    algorithm: gm.DiLoCo = ALGORITHM,
    rounds: int = 8,
    compression: str = "off",
    joined: Callable[[], object] = bool,
    met: bool = False,
) -> Callable[[], None]:
    """One node's life: join, train until so many rounds are seen, close.

    With ``met`` until it has seen a round that two had a part in, too.
    """

    def enough(session: gm.Session) -> bool:
        shared = not met or any(len(event.learners) == 2 for event in seen.of(events.RoundSeen))
        return session.rounds_seen >= rounds and shared

    def life() -> None:
        with gm.Session(
            model,
            algorithm=algorithm,
            mailbox=box,
            learner_id=name,
            callbacks=[seen],
            compression=compression,  # type: ignore[arg-type]
            **QUICK,
        ) as session:
            inner = torch.optim.SGD(model.parameters(), lr=0.02)
            joined()
            step = 0
            while not enough(session):
                train_step(model, inner, hash((len(name), step)))
                session.step(samples=6)
                step += 1
                time.sleep(0.002)
                assert step < 50_000

    return life


def run_two(
    box_of: Callable[[], gm.Mailbox],
    *,
    algorithm: gm.DiLoCo = ALGORITHM,
    make: Callable[[int], torch.nn.Module] = net,
    rounds: int = 8,
    compression: str = "off",
    met: bool = False,
    may_fail: bool = False,
) -> tuple[list[torch.nn.Module], list[Events]]:
    """Two nodes, each with a mailbox of its own over one store, that begin when both are there."""
    models = [make(0), make(1)]
    seen = [Events(), Events()]
    joined = threading.Barrier(2, timeout=90).wait
    together(
        *(
            node(
                f"n{'x' * i}",
                models[i],
                box_of(),
                seen[i],
                algorithm=algorithm,
                rounds=rounds,
                compression=compression,
                joined=joined,
                met=met,
            )
            for i in range(2)
        )
    )
    for one in seen:
        assert may_fail or one.of(events.TaskFailed) == []
    return models, seen


def newest(box: gm.Mailbox, like: torch.nn.Module) -> torch.nn.Module:
    """The committed parameters in a model of their own."""
    gm.align(like, mailbox=box)
    return like


def check_agreement(box: gm.Mailbox, models: Sequence[torch.nn.Module], seen: list[Events]) -> None:
    """Each node that saw the last round holds the newest commit, bit for bit."""
    last = [one.of(events.Closed)[0].rounds_seen for one in seen]
    spare = net(9, next(models[0].parameters()).dtype)
    assert gm.align(spare, mailbox=box) == max(last)
    for number, model in zip(last, models, strict=True):
        if number == max(last):
            assert equal(model, spare)


@pytest.mark.parametrize("store", ["memory", "filesystem"])
def test_two_sessions_agree_bit_for_bit(store: str, tmp_path: Path) -> None:
    memory = gm.MemoryMailbox()

    def box() -> gm.Mailbox:
        return memory if store == "memory" else gm.FilesystemMailbox(tmp_path / "run")

    models, seen = run_two(box, met=True)
    check_agreement(box(), models, seen)


class Deltas(WrappedMailbox):
    """Counts what is fetched by what it is, and may spoil updates."""

    def __init__(self, inner: gm.Mailbox, *, spoil: bool = False) -> None:
        super().__init__(inner)
        self.gets: list[str] = []
        self.spoil = spoil
        self.updates: set[str] = set()
        self.thetas: set[str] = set()

    async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
        result = await act()
        if call.operation == "get" and result is not None:
            self.gets.append(call.key)
            if call.key.startswith("rounds/"):
                record = json.loads(bytes(result))
                self.thetas.add(record["theta"]["key"])
                if record["update"]:
                    self.updates.add(record["update"]["payload"]["key"])
            if self.spoil and call.key in self.updates:
                data = bytearray(result)
                data[-1] ^= 1
                return bytes(data)
        return result


PRECISIONS = [
    (None, None),
    ("F32", "F32"),
    ("F16", "F16"),
    ("BF16", "BF16"),
    ("F8_E4M3", "F8_E4M3"),
    ("F4", "F4"),
    (None, "F4"),
    ("F4", None),
]


@pytest.fixture
def one_closer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who closes rounds keeps the role while it lives, however slow the machine is."""

    def long(watch: Watch) -> float:
        return 100.0

    monkeypatch.setattr(Watch, "takeover_seconds", long)


@pytest.mark.usefixtures("one_closer")
@pytest.mark.parametrize("compression", ["off", "zstd"])
@pytest.mark.parametrize(("delta", "commit"), PRECISIONS)
def test_precisions_and_compression(
    delta: str | None, commit: str | None, compression: str
) -> None:
    algorithm = gm.DiLoCo(
        sync_every=4,
        fragments=2,
        in_flight=2,
        delta_dtype=delta,
        commit_dtype=commit,
        quorum_size=2,
    )
    memory = gm.MemoryMailbox()
    boxes: list[Deltas] = []

    def box() -> gm.Mailbox:
        boxes.append(Deltas(memory))
        return boxes[-1]

    models, seen = run_two(box, algorithm=algorithm, rounds=6, compression=compression)
    check_agreement(memory, models, seen)
    ext = ".zst" if compression == "zstd" else ".safetensors"
    blobs = asyncio.run(memory.list("blobs/"))
    assert blobs
    assert all(key.endswith(ext) for key in blobs)
    if commit is not None:
        # One that holds the version before fetches updates and no theta, but for what it joined
        # with and what came two at a time.
        closers = [len(one.of(events.RoundCommitted)) for one in seen]
        follower = boxes[closers.index(min(closers))]
        fetched = [key for key in follower.gets if key in follower.updates]
        thetas = [key for key in follower.gets if key in follower.thetas]
        assert len(fetched) >= 3
        assert len(thetas) <= 2


@pytest.mark.usefixtures("one_closer")
def test_a_corrupt_update_falls_back_to_theta() -> None:
    algorithm = gm.DiLoCo(sync_every=4, fragments=2, commit_dtype="BF16", quorum_size=2)
    memory = gm.MemoryMailbox()
    boxes: list[Deltas] = []

    def box() -> gm.Mailbox:
        boxes.append(Deltas(memory, spoil=True))
        return boxes[-1]

    models, seen = run_two(box, algorithm=algorithm, rounds=6, may_fail=True)
    check_agreement(memory, models, seen)
    closers = [len(one.of(events.RoundCommitted)) for one in seen]
    follower = closers.index(min(closers))
    failed = seen[follower].of(events.TaskFailed)
    assert failed
    assert all(
        "PayloadCorrupt" in event.error and "blobs/rounds/" in event.error for event in failed
    )
    assert [key for key in boxes[follower].gets if key in boxes[follower].thetas]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(dtype: torch.dtype) -> None:
    memory = gm.MemoryMailbox()
    models, seen = run_two(lambda: memory, make=lambda seed: net(seed, dtype), rounds=6)
    check_agreement(memory, models, seen)
    assert {p.dtype for model in models for p in model.parameters()} == {dtype}


def test_alignment_writes_in_place_and_leaves_everything_else() -> None:
    """Storage, ``requires_grad``, gradients, optimizer state, tied and frozen parameters."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(7, 4)
            self.body = torch.nn.Linear(4, 4)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight
            self.frozen = torch.nn.Linear(4, 4)
            self.frozen.requires_grad_(requires_grad=False)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.frozen(self.body(self.embed(x))))

    torch.manual_seed(0)
    model, seen, memory = Tied(), Events(), gm.MemoryMailbox()
    frozen = model.frozen.weight.detach().clone()
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    ids = {name: id(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.01)
    with gm.Session(
        model, algorithm=ALGORITHM, mailbox=memory, callbacks=[seen], **QUICK
    ) as session:
        step = 0
        while session.rounds_seen < 5:
            x = torch.randint(0, 7, (5,))
            loss = torch.nn.functional.cross_entropy(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            states = {
                id(p): {k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
                for p, state in optimizer.state.items()
            }
            grads = {
                n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
            }
            session.step(samples=5)
            for p, state in optimizer.state.items():
                for k, v in states[id(p)].items():
                    assert torch.equal(state[k], v)
            for n, p in model.named_parameters():
                grad = grads[n]
                assert (p.grad is None) == (grad is None)
                assert grad is None or torch.equal(grad, p.grad)  # type: ignore[arg-type]
            step += 1
            time.sleep(0.003)
    assert seen.of(events.Aligned)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    assert {name: id(p) for name, p in model.named_parameters()} == ids
    assert model.head.weight is model.embed.weight
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {
        "frozen.weight",
        "frozen.bias",
    }
    assert torch.equal(model.frozen.weight, frozen)
    manifest = json.loads(asyncio.run(memory.get("manifest.json")) or b"")
    assert [row["name"] for row in manifest["schema"]] == [
        "body.bias",
        "body.weight",
        "embed.weight",
    ]


def test_a_backward_pass_over_an_alignment_is_not_refused() -> None:
    model, memory = net(), gm.MemoryMailbox()
    algorithm = gm.DiLoCo(sync_every=1, fragments=1, in_flight=1, overlap_steps=0)
    with gm.Session(model, algorithm=algorithm, mailbox=memory, **QUICK) as session:
        for _ in range(3):
            loss = model(torch.ones(2, 4)).sum()
            session.step(samples=1)  # barrier: aligned in this very call
            loss.backward()
        assert session.rounds_seen == 2


class Keeping:
    """A mailbox as a user may write one: a dict that keeps what it is given, uncopied."""

    def __init__(self, as_type: Callable[[memoryview], Buffer]) -> None:
        self.objects: dict[str, Buffer] = {}
        self.hashes: dict[str, int] = {}
        self.as_type = as_type

    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        given = memoryview(data)
        if self.objects.setdefault(key, given) is not given:  # one step, for two threads
            return False
        self.hashes[key] = hash(bytes(data))
        return True

    async def get(self, key: str, /) -> Buffer | None:
        found = self.objects.get(key)
        return None if found is None else self.as_type(memoryview(found))

    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        return sorted(k for k in tuple(self.objects) if k.startswith(prefix) and k > after)

    async def delete(self, keys: Iterable[str], /) -> None:
        for key in keys:
            self.objects.pop(key, None)


def mapped(view: memoryview) -> Buffer:
    """The object as a store that maps files gives it."""
    size = view.nbytes
    found = mmap.mmap(-1, max(size, 1))
    found[:size] = view
    return memoryview(found)[:size]


@pytest.mark.parametrize("as_type", [bytes, bytearray, memoryview, mapped])
def test_a_mailbox_that_keeps_the_very_buffers(as_type: Callable[[memoryview], Buffer]) -> None:
    box = Keeping(as_type)
    models, seen = run_two(lambda: box, rounds=12)
    check_agreement(box, models, seen)
    for key, data in box.objects.items():
        assert hash(bytes(data)) == box.hashes[key], f"{key} was overwritten"


def test_overlap_steps_zero_is_a_barrier() -> None:
    """After every round both nodes hold the same parameters before they go on."""
    memory = gm.MemoryMailbox()
    algorithm = gm.DiLoCo(sync_every=3, fragments=1, in_flight=1, overlap_steps=0, quorum_size=2)
    held: list[list[dict[str, torch.Tensor]]] = [[], []]
    # Who lags behind would publish early, when the other has.
    lockstep = threading.Barrier(2, timeout=90)

    def life(i: int) -> Callable[[], None]:
        def run() -> None:
            model = net(i)
            with gm.Session(
                model, algorithm=algorithm, mailbox=memory, learner_id=f"n{i}", **QUICK
            ) as session:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                for step in range(12):
                    train_step(model, optimizer, 100 * i + step)
                    lockstep.wait()
                    session.step(samples=6)
                    if (step + 1) % 3 == 0:
                        assert session.rounds_seen == step // 3
                        held[i].append(parameters(model))

        return run

    together(life(0), life(1))
    assert len(held[0]) == len(held[1]) == 4
    for left, right in zip(*held, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_global_batch_size_is_shared_among_live_learners() -> None:
    memory = gm.MemoryMailbox()
    algorithm = gm.DiLoCo(sync_every=4, fragments=2, global_batch_size=7)
    with gm.Session(net(), algorithm=algorithm, mailbox=memory, learner_id="a", **QUICK) as first:
        assert first.batch_size == 7
        with gm.Session(
            net(), algorithm=algorithm, mailbox=memory, learner_id="b", **QUICK
        ) as second:
            assert second.batch_size == 4
            for _ in range(4500):
                if first.batch_size == 4:
                    break
                time.sleep(0.02)
            assert first.batch_size == 4
