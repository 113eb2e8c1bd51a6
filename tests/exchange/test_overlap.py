"""What goes on at the same time: hashing what is written or looked at, never what may change."""

import asyncio
import contextlib
import gc
import hashlib
import itertools
import threading
import weakref
from collections.abc import Buffer
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from tests.exchange.wire import take
from tests.session.models import QUICK, Keeping, net, train_until

import gradientmail as gm
from gradientmail.algorithm import outer_parts
from gradientmail.algorithm.outer import OuterStep
from gradientmail.backend.numpy import NumpyBackend
from gradientmail.backend.torch import TorchBackend
from gradientmail.calls import PendingCall
from gradientmail.clock import inline
from gradientmail.committing import all_ended
from gradientmail.errors import PayloadCorrupt
from gradientmail.events import Event, TaskFailed
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.payload import PayloadLayout
from gradientmail.exchange.records import Ref
from gradientmail.exchange.sealing import Payload, Sealing
from gradientmail.loop_thread import LoopThread
from gradientmail.schema import TensorSpec
from gradientmail.verification import verify

LAYOUT = PayloadLayout([TensorSpec("w", "F32", (8,)), TensorSpec("a", "BF16", (4,))])


def blob(data: memoryview, claimed: bytes | None = None) -> Ref:
    """A ref to ``data``, or to something else of its size."""
    sha = hashlib.sha256(data if claimed is None else claimed).hexdigest()
    return Ref(layout.round_blob_key(1, sha, ".safetensors"), sha, data.nbytes)


@pytest.mark.parametrize("corrupt", [False, True])
def test_a_payload_is_looked_at_while_its_hash_is_checked(corrupt: bool) -> None:
    async def run() -> None:
        began, looked, mailbox = asyncio.Event(), asyncio.Event(), gm.MemoryMailbox()

        async def offload(work: Any, *args: Any) -> object:
            began.set()
            await asyncio.wait_for(looked.wait(), 60)
            return work(*args)

        async def look(payload: Payload) -> bytes:
            await asyncio.wait_for(began.wait(), 60)
            looked.set()
            return bytes(payload.data("w"))

        exchange = Exchange(mailbox, offload=cast(Any, offload), take=take)
        data = LAYOUT.blank(take)
        ref = blob(data, b"another" if corrupt else None)
        await mailbox.put_if_absent(ref.key, data)
        if corrupt:
            with pytest.raises(PayloadCorrupt, match="do not hash"):
                await exchange.examine(ref, LAYOUT, look)
            assert exchange.held(ref) is None
            return
        found = await exchange.examine(ref, LAYOUT, look)
        assert found is not None
        assert found[1] == b"\xa5" * 32
        assert exchange.held(ref) is found[0]
        assert await exchange.examine(ref, LAYOUT, look) == found

    asyncio.run(run())


def test_a_payload_that_is_not_as_expected_is_looked_at_after_its_check() -> None:
    """Another header may move the tensors anywhere: only a whole payload is taken apart."""

    async def run() -> None:
        seen: list[str] = []

        async def offload(work: Any, *args: Any) -> object:
            await asyncio.sleep(0)
            seen.append("checked")
            return work(*args)

        async def look(payload: Payload) -> bytes:
            seen.append("looked")
            return bytes(payload.data("w"))

        mailbox = gm.MemoryMailbox()
        exchange = Exchange(mailbox, offload=cast(Any, offload), take=take)
        plain = LAYOUT.blank(take)
        spaced = bytearray(plain[: len(LAYOUT.header)]) + b" " * 8 + bytearray(b"\x11" * 40)
        spaced[:8] = (len(LAYOUT.header)).to_bytes(8, "little")
        ref = blob(memoryview(spaced))
        await mailbox.put_if_absent(ref.key, spaced)
        found = await exchange.examine(ref, LAYOUT, look)
        assert found is not None
        assert found[1] == b"\x11" * 32
        assert seen == ["checked", "looked"]
        assert await exchange.examine(blob(plain), LAYOUT, look) is None

    asyncio.run(run())


def test_an_error_of_looking_is_raised_and_nothing_is_held() -> None:
    async def run() -> None:
        async def look(payload: Payload) -> None:
            raise ZeroDivisionError(payload.ref.key)

        mailbox = gm.MemoryMailbox()
        exchange = Exchange(mailbox, offload=inline, take=take)
        data = LAYOUT.blank(take)
        await mailbox.put_if_absent(blob(data).key, data)
        with pytest.raises(ZeroDivisionError, match=blob(data).key):
            await exchange.examine(blob(data), LAYOUT, look)

    asyncio.run(run())


def test_a_payload_is_complete_up_to_the_first_tensor_that_is_missing() -> None:
    of = PayloadLayout(TensorSpec(name, "F32", (2,)) for name in "abc")
    start = len(of.header)
    assert [of.written(dict.fromkeys(names, 2)) for names in ("", "b", "a", "ac", "ab", "abc")] == [
        start,
        start,
        start + 8,
        start + 8,
        start + 16,
        of.nbytes,
    ]


def test_what_is_hashed_early_is_what_is_hashed() -> None:
    async def run() -> None:
        exchange = Exchange(gm.MemoryMailbox(), offload=inline, take=take)
        buffer = LAYOUT.blank(take)
        sealing = Sealing(buffer, LAYOUT)
        buffer[len(LAYOUT.header) : len(LAYOUT.header) + 32] = bytes(range(32))
        await exchange.hash_written(sealing, {"w": 8})
        assert sealing.hashed == len(LAYOUT.header) + 32
        buffer[-8:] = b"finished"
        sealed = await exchange.seal(sealing, partial(layout.round_blob_key, 1))
        assert sealed.ref.sha256 == hashlib.sha256(buffer).hexdigest()

    asyncio.run(run())


@pytest.mark.parametrize("compression", ["off", "zstd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("commit_dtype", [None, "F4"])
def test_a_commit_is_hashed_while_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
    commit_dtype: str | None,
    dtype: torch.dtype,
    compression: Literal["off", "zstd"],
) -> None:
    """Tensor by tensor, with averaged buffers, which come last; the result is what it was."""
    early: list[float] = []
    hash_until = Sealing.hash_until

    def spied(self: Sealing, stop: int) -> None:
        early.append(stop / self.layout.nbytes)
        hash_until(self, stop)

    monkeypatch.setattr(outer_parts, "PART", 1)
    monkeypatch.setattr(Sealing, "hash_until", spied)
    model, mailbox = torch.nn.Sequential(net(dtype=dtype), torch.nn.BatchNorm1d(3)), Keeping()
    model.to(dtype)
    algorithm = gm.DiLoCo(sync_every=4, fragments=2, commit_dtype=commit_dtype)
    with gm.Session(
        model,
        algorithm=algorithm,
        mailbox=mailbox,
        callbacks=(),
        compression=compression,
        buffers="average",
        **QUICK,
    ) as session:
        train_until(session, model, 6)
    assert any(share < 1.0 for share in early) == (compression == "off")
    report = asyncio.run(verify(mailbox, backend=TorchBackend(), swept=False))
    assert report.holds, report
    assert report.recomputed >= 6


class Seen(Keeping):
    """Tells when a commit's payload is being stored."""

    def __init__(self) -> None:
        super().__init__()
        self.storing: set[int] = set()
        self.another = threading.Condition()

    async def put_if_absent(self, key: str, data: Buffer) -> bool:
        if key.startswith("blobs/rounds/"):
            with self.another:
                self.storing.add(int(key.split("/")[2]))
                self.another.notify_all()
        return await super().put_if_absent(key, data)


@pytest.mark.parametrize(
    ("dtype", "commit_dtype"), [(torch.float32, "F4"), (torch.bfloat16, None)], ids=str
)
def test_the_outer_state_is_stored_while_theta_is_made_of_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, commit_dtype: str | None
) -> None:
    model, mailbox, found = net(dtype=dtype), Seen(), list[bool]()
    follow, rounds = OuterStep.follow, itertools.count()

    def waits(self: OuterStep, *args: Any, **named: Any) -> tuple[str, ...]:
        number = next(rounds)
        with mailbox.another:
            found.append(mailbox.another.wait_for(lambda: number in mailbox.storing, 20.0))
        return follow(self, *args, **named)

    monkeypatch.setattr(OuterStep, "follow", waits)
    algorithm = gm.DiLoCo(sync_every=4, fragments=2, commit_dtype=commit_dtype)
    with gm.Session(model, algorithm=algorithm, mailbox=mailbox, callbacks=(), **QUICK) as session:
        train_until(session, model, 4)
    assert len(found) >= 5
    assert all(found)


@pytest.mark.parametrize("method", ["move", "follow"])
def test_a_step_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Whatever it had written over, and whatever was being stored meanwhile."""
    whole, calls = getattr(OuterStep, method), itertools.count()

    def fails_now_and_then(self: OuterStep, *args: Any, **named: Any) -> tuple[str, ...]:
        beyond: tuple[str, ...] = whole(self, *args, **named)
        if next(calls) % 4 == 2:
            raise ZeroDivisionError("planted")
        return beyond

    model, mailbox, seen = net(), Keeping(), list[Event]()
    algorithm = gm.DiLoCo(sync_every=4, fragments=2, delta_dtype="F4", commit_dtype="F16")
    with monkeypatch.context() as patched:
        patched.setattr(OuterStep, method, fails_now_and_then)
        patched.setattr(outer_parts, "PART", 20)
        with gm.Session(
            model, algorithm=algorithm, mailbox=mailbox, callbacks=(seen.append,), **QUICK
        ) as session:
            train_until(session, model, 4)
    failures = [event for event in seen if isinstance(event, TaskFailed)]
    assert failures
    assert all("planted" in event.error for event in failures)
    report = asyncio.run(verify(mailbox, backend=TorchBackend(), swept=False))
    assert report.holds, report
    assert report.recomputed >= 4


def test_only_what_is_written_is_hashed_whatever_the_parameters_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parameter may have the name of another one's scales or state; without scales, any."""
    monkeypatch.setattr(outer_parts, "PART", 1)
    names = ("x", "x.scale", "momentum.x", "master.x", "x.scale.scale", "é", "")
    model: dict[str, Any] = {name: np.ones(9, np.float32) for name in names}
    mailbox = Keeping()
    algorithm = gm.DiLoCo(
        sync_every=2, fragments=1, in_flight=1, overlap_steps=0, commit_dtype="F16"
    )
    with gm.Session(model, algorithm=algorithm, mailbox=mailbox, callbacks=(), **QUICK) as session:
        while session.rounds_seen < 3:
            for array in model.values():
                np.subtract(array, 0.01 * (session.rounds_seen + 2), out=array, casting="same_kind")
            session.step(samples=1)
    report = asyncio.run(verify(mailbox, backend=NumpyBackend(), swept=False))
    assert report.holds, report
    assert report.recomputed >= 3


def test_the_parts_of_a_step_are_made_in_a_time_that_grows_with_the_tensors() -> None:
    """By the times that a tensor's elements are counted, each of which takes a while."""
    counted = 0

    class Counted:
        @property
        def count(self) -> int:
            nonlocal counted
            counted += 1
            return outer_parts.PART // 100

    specs = [cast(TensorSpec, Counted()) for _ in range(1000)]
    parts = list(outer_parts._some_at_a_time(specs))
    assert [spec for part in parts for spec in part] == specs
    assert {len(part) for part in parts[:-1]} == {101}
    assert counted == 1000


def test_how_a_payload_is_stored_is_what_its_key_says() -> None:
    """Plain bytes under a key of compressed ones are damage to whoever fetches them: here, too."""

    async def run() -> None:
        async def look(payload: Payload) -> None:
            raise AssertionError(payload.ref.key)

        mailbox = gm.MemoryMailbox()
        exchange = Exchange(mailbox, offload=inline, take=take)
        data = LAYOUT.blank(take)
        sha = hashlib.sha256(data).hexdigest()
        ref = Ref(layout.round_blob_key(1, sha, ".safetensors.zst"), sha, data.nbytes)
        await mailbox.put_if_absent(ref.key, data)
        with pytest.raises(PayloadCorrupt):
            await exchange.fetch(ref, LAYOUT)
        with pytest.raises(PayloadCorrupt):
            await exchange.examine(ref, LAYOUT, look)

    asyncio.run(run())


@pytest.mark.parametrize("where", ["check", "look"])
def test_no_payload_waits_for_the_garbage_collector_after_an_error(where: str) -> None:
    thread = LoopThread("errors")

    async def look(payload: Payload) -> None:
        seen.append(weakref.ref(payload))
        if where == "look":
            await thread.offload(ZeroDivisionError().with_traceback, cast(Any, payload))

    async def examine() -> None:
        with contextlib.suppress(PayloadCorrupt, TypeError):
            await exchange.examine(ref, LAYOUT, look)

    seen: list[weakref.ref[Payload]] = []
    mailbox = gm.MemoryMailbox()
    exchange = Exchange(mailbox, offload=thread.hash, take=take)
    data = LAYOUT.blank(take)
    ref = blob(data, b"another" if where == "check" else None)
    thread.call(mailbox.put_if_absent(ref.key, data))
    gc.disable()
    try:
        thread.call(examine())
        thread.stop(60.0)
        assert [one() for one in seen] == [None]
    finally:
        gc.enable()


def test_a_call_that_fails_lets_go_of_what_was_passed() -> None:
    class Large:
        pass

    def fail(large: Large) -> None:
        del large
        raise ZeroDivisionError

    large = Large()
    seen = weakref.ref(large)
    call = PendingCall(partial(fail, large))
    gc.disable()
    try:
        call.run()
        del large
        assert isinstance(call.future.exception(), ZeroDivisionError)
        assert seen() is None
    finally:
        gc.enable()


def test_an_upload_that_fails_lets_go_of_the_others() -> None:
    seen: list[weakref.ref[Payload]] = []

    async def stored() -> Payload:
        data = LAYOUT.blank(take)
        payload = Payload(blob(data), data, LAYOUT.slots)
        seen.append(weakref.ref(payload))
        return payload

    async def failed() -> Payload:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def run() -> None:
        with pytest.raises(ZeroDivisionError):
            await all_ended((failed(), stored()))
        assert await all_ended(()) == []
        both = await all_ended((stored(), stored()))
        assert [payload.data("w").nbytes for payload in both] == [32, 32]

    gc.disable()
    try:
        asyncio.run(run())
        assert [one() for one in seen] == [None] * 3
    finally:
        gc.enable()
