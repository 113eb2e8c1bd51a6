"""Arguments, mismatches, ``align``, corrupt runs: what a user gets told."""

import asyncio
import itertools
import json
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
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
    no_threads_left,
    parameters,
    train_until,
)

import gradientmail as gm
from gradientmail.exchange import layout
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox


def session(box: gm.Mailbox, model: object = None, **changes: Any) -> gm.Session:
    """A session that is quick; ``changes`` to its arguments."""
    given: dict[str, Any] = {"algorithm": ALGORITHM, "learner_id": "a", **QUICK, **changes}
    return gm.Session(net() if model is None else model, mailbox=box, **given)


def finished(rounds: int = 3) -> MemoryMailbox:
    """A run that has ended."""
    box = MemoryMailbox()
    model = net()
    with session(box, model) as one:
        train_until(one, model, rounds)
    return box


BAD_SESSIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"algorithm": None}, TypeError, "algorithm"),
    ({"algorithm": {"sync_every": 4}}, TypeError, "algorithm"),
    ({"learner_id": "Not An Id"}, ValueError, "Not An Id"),
    ({"learner_id": ""}, ValueError, "learner_id"),
    ({"learner_id": "x" * 65}, ValueError, "learner_id"),
    ({"learner_id": 7}, ValueError, "learner_id"),
    ({"poll_interval": 0}, ValueError, "poll_interval"),
    ({"poll_interval": -1.0}, ValueError, "poll_interval"),
    ({"poll_interval": float("inf")}, ValueError, "poll_interval"),
    ({"poll_interval": float("nan")}, ValueError, "poll_interval"),
    ({"poll_interval": "1"}, TypeError, "poll_interval"),
    ({"poll_interval": True}, TypeError, "poll_interval"),
    ({"lease_every": 0}, ValueError, "lease_every"),
    ({"lease_timeout": -3}, ValueError, "lease_timeout"),
    ({"compression": "gzip"}, ValueError, "gzip"),
    ({"compression": None}, ValueError, "compression"),
    ({"compression": torch.ones(2)}, ValueError, "compression must be"),
    ({"buffers": torch.ones(2)}, ValueError, "buffers must be"),
    ({"model": object()}, TypeError, "torch.nn.Module"),
    ({"model": torch.zeros(3)}, TypeError, "model"),
    ({"model": torch.nn.ReLU()}, ValueError, "parameter"),
    ({"model": net().requires_grad_(requires_grad=False)}, ValueError, "requires_grad"),
    ({"model": net(0, torch.float64)}, ValueError, "float64"),
    ({"callbacks": 3}, TypeError, "iterable"),
]


@pytest.mark.parametrize(("changes", "kind", "said"), BAD_SESSIONS)
def test_a_bad_argument_is_named(changes: dict[str, Any], kind: type[Exception], said: str) -> None:
    box = MemoryMailbox()
    with no_threads_left(), pytest.raises(kind, match=said):
        session(box, **changes)
    assert asyncio.run(box.list("")) == ()


def test_a_path_is_not_a_mailbox_yet() -> None:
    with pytest.raises(TypeError, match=r"open_mailbox\('runs/x'\)"):
        gm.Session(net(), algorithm=ALGORITHM, mailbox="runs/x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"open_mailbox\('runs/x'\)"):
        gm.align(net(), mailbox=Path("runs/x"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"open_mailbox\('s3://b/x'\)"):
        gm.align(net(), mailbox="s3://b/x")  # type: ignore[arg-type]


@pytest.mark.parametrize("box", [None, {}, object()])
def test_a_mailbox_that_is_none(box: Any) -> None:
    with pytest.raises(TypeError, match="put_if_absent"):
        session(box)
    with pytest.raises(TypeError, match="put_if_absent"):
        gm.align(net(), mailbox=box)


BAD_OPTIONS: list[dict[str, Any]] = [
    {"sync_every": 0},
    {"sync_every": 2.5},
    {"fragments": 0},
    {"fragments": 9},
    {"in_flight": 0},
    {"in_flight": 3},
    {"overlap_steps": -1},
    {"mixing": 1.0},
    {"mixing": -0.1},
    {"quorum_size": 0},
    {"outer_lr": 0.0},
    {"outer_lr": float("nan")},
    {"outer_momentum": 1.0},
    {"merge": "rda"},
    {"partition": None},
    {"global_batch_size": 0},
    {"delta_dtype": "F64"},
    {"commit_dtype": "INT8"},
    {"flush_on_close": 1},
]


@pytest.mark.parametrize("option", BAD_OPTIONS, ids=str)
def test_a_bad_option_is_named_with_its_value(option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    options: dict[str, Any] = {"sync_every": 8, "fragments": 2, **option}
    with pytest.raises(ValueError, match=name) as caught:
        gm.DiLoCo(**options)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("samples", [0, -1, -(2**70)])
def test_samples_that_are_not_positive(samples: int) -> None:
    with session(MemoryMailbox()) as one, pytest.raises(ValueError, match="samples"):
        one.step(samples=samples)


@pytest.mark.parametrize("samples", [1.0, "8", None, True, [1], 2.5, torch.tensor(1.5)])
def test_samples_that_are_no_integer(samples: Any) -> None:
    with session(MemoryMailbox()) as one, pytest.raises(TypeError, match="samples"):
        one.step(samples=samples)


def test_samples_may_be_any_integer_type_and_are_keyword_only() -> None:
    import numpy as np

    with session(MemoryMailbox()) as one:
        one.step(samples=np.int64(3))  # type: ignore[arg-type]
        one.step(samples=torch.tensor(3))  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            one.step(3)  # type: ignore[misc]


def test_another_model_is_refused_with_names_shapes_and_dtypes() -> None:
    box = finished()
    other = torch.nn.Sequential(
        torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3, bias=False)
    )
    before = list(asyncio.run(box.list("")))
    with no_threads_left(), pytest.raises(gm.SchemaMismatch) as caught:
        session(box, other)
    said = str(caught.value)
    assert "0.bias: F32[9] here, F32[8] in the run" in said
    assert "0.weight: F32[9, 4] here, F32[8, 4] in the run" in said
    assert "2.bias: F32[3] in the run, not here" in said
    assert "2.weight: F32[3, 9] here, F32[3, 8] in the run" in said
    assert list(asyncio.run(box.list(""))) == before
    with pytest.raises(gm.SchemaMismatch, match=r"0\.bias: F32\[9\] here, F32\[8\] in the run"):
        gm.align(other, mailbox=box)
    with pytest.raises(gm.SchemaMismatch, match=r"0\.bias: BF16\[8\] here, F32\[8\] in the run"):
        session(box, net(0, torch.bfloat16))


def test_other_options_are_refused_with_both_values() -> None:
    box = finished()
    other = replace(ALGORITHM, outer_lr=0.5, sync_every=6, merge=gm.WeightedMean())
    with no_threads_left(), pytest.raises(gm.RunConfigMismatch) as caught:
        session(box, algorithm=other)
    said = str(caught.value)
    assert "sync_every: 6 here, 4 in the run" in said
    assert "outer_lr: 0.5 here, 0.7 in the run" in said
    assert "merge: WeightedMean() here, Rda(direct_pattern='embed') in the run" in said
    assert "outer_momentum" not in said
    assert list(asyncio.run(box.list("leases/"))) == []


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"algorithm": replace(ALGORITHM, outer_lr=0.5)}, gm.RunConfigMismatch),
        ({"model": torch.nn.Linear(2, 2)}, gm.SchemaMismatch),
        ({"model": "spoiled"}, gm.PayloadCorrupt),
    ],
    ids=["options", "model", "parameters"],
)
def test_who_cannot_join_ends_no_session_with_its_id(
    changes: dict[str, Any], refused: type[Exception]
) -> None:
    """Neither by a beat, which would end one in another process, nor in this one."""
    box, model, heard = MemoryMailbox(), net(), list[Call]()

    class Listening(WrappedMailbox):
        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            heard.append(call)
            return await act()

    with session(box, model) as live:
        train_until(live, model, 2)
        mailbox: gm.Mailbox = Listening(box)
        if changes.get("model") == "spoiled":
            last = max(key for key in asyncio.run(box.list("rounds/")))
            key = json.loads(asyncio.run(box.get(last)) or b"")["theta"]["key"]
            changes, mailbox = {"model": model}, Spoiled(mailbox, key, "cut")
        with pytest.raises(refused):
            session(mailbox, **{"model": model, **changes})
        assert heard
        assert {call.operation for call in heard} <= {"get", "list"}  # nothing is written
        train_until(live, model, 4)
    assert live.rounds_seen >= 3


def test_who_fails_while_it_takes_the_lease_leaves_no_beat() -> None:
    class Failing(WrappedMailbox):
        failed = False

        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            answer = await act()
            if call.key.startswith("leases/a/0000000001") and not self.failed:
                self.failed = True
                raise PermissionError("after it was written")
            return answer

    box = finished()
    with no_threads_left(), pytest.raises(PermissionError, match="after it was written"):
        session(Failing(box))
    assert list(asyncio.run(box.list("leases/"))) == []


@pytest.mark.parametrize("how", ["same", "other"])
def test_a_run_that_has_lost_its_manifest_is_not_created_again(how: str) -> None:
    """With other options, perhaps, while nodes that still live go on with the old ones."""
    box = finished(3)
    asyncio.run(box.delete(["manifest.json"]))
    before = list(asyncio.run(box.list("")))
    other = ALGORITHM if how == "same" else replace(ALGORITHM, outer_lr=0.5)
    with no_threads_left(), pytest.raises(gm.ProtocolError, match=r"manifest\.json is gone"):
        session(box, algorithm=other)
    model = net()
    was = parameters(model)
    with no_threads_left(), pytest.raises(gm.ProtocolError, match=r"manifest\.json is gone"):
        gm.align(model, mailbox=box)
    assert all(torch.equal(was[name], now) for name, now in parameters(model).items())
    assert list(asyncio.run(box.list(""))) == before


def test_what_creators_left_that_died_goes_when_the_run_is_created() -> None:
    class Dying(WrappedMailbox):
        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            if call.operation == "put_if_absent" and call.key == "manifest.json":
                raise RuntimeError("killed here")
            return await act()

    box = MemoryMailbox()
    for seed in range(3):
        with pytest.raises(RuntimeError, match="killed here"):
            session(Dying(box), net(seed))
    left = len(asyncio.run(box.list("blobs/init/")))
    asyncio.run(box.put_if_absent("blobs/init/notes.txt", b""))  # somebody else's
    session(box, net(3)).close()
    init = json.loads(asyncio.run(box.get("manifest.json")) or b"")["init"]
    named = sorted(ref["key"] for ref in init)
    assert left == 3 * len(named)
    assert list(asyncio.run(box.list("blobs/init/"))) == [*named, "blobs/init/notes.txt"]


# align


def test_align_on_an_empty_mailbox_leaves_the_model() -> None:
    model, box = net(), MemoryMailbox()
    before = parameters(model)
    assert gm.align(model, mailbox=box) == -1
    assert all(torch.equal(before[n], p) for n, p in parameters(model).items())
    assert asyncio.run(box.list("")) == ()


def test_align_on_a_fresh_run_gives_its_initial_parameters() -> None:
    box, first, other = MemoryMailbox(), net(1), net(2)
    with session(box, first, lease_every=60.0, lease_timeout=120.0):  # no beat comes meanwhile
        before = asyncio.run(box.list(""))
        assert gm.align(other, mailbox=box) == -1
        assert equal(first, other)
        left = [key for key in asyncio.run(box.list("")) if not key.startswith("claims/0")]
        assert left == [key for key in before if not key.startswith("claims/0")]


def test_align_on_a_finished_run_publishes_nothing() -> None:
    box = finished(5)
    before = asyncio.run(box.list(""))
    model = net(3)
    newest = gm.align(model, mailbox=box)
    assert newest == len([key for key in before if key.startswith("rounds/")]) - 1
    assert newest >= 5
    assert asyncio.run(box.list("")) == before
    again = net(4)
    with session(box, again) as one:
        assert one.rounds_seen == newest
        assert equal(again, model)


def test_align_on_a_foreign_mailbox() -> None:
    box = MemoryMailbox()
    asyncio.run(box.put_if_absent("manifest.json", b'{"hello": 1}'))
    with pytest.raises(gm.ProtocolError, match="manifest has no"):
        gm.align(net(), mailbox=box)
    with no_threads_left(), pytest.raises(gm.ProtocolError, match="manifest"):
        session(box)
    other = MemoryMailbox()
    asyncio.run(other.put_if_absent("data/part-0.bin", b"x"))
    assert gm.align(net(), mailbox=other) == -1


class Spoiled(WrappedMailbox):
    """Gives one object with a bit flipped, or cut, or not at all."""

    def __init__(self, inner: gm.Mailbox, key: str, how: str) -> None:
        super().__init__(inner)
        self.key = key
        self.how = how

    async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
        result = await act()
        if call.operation == "get" and call.key == self.key and result is not None:
            data = bytes(result)
            match self.how:
                case "flipped":
                    return data[:-1] + bytes([data[-1] ^ 1])
                case "cut":
                    return data[:-1]
                case "longer":
                    return data + b"\0"
                case "empty":
                    return b""
                case "gone":
                    return None
        return result


@pytest.mark.parametrize("how", ["flipped", "cut", "longer", "empty", "gone"])
def test_a_corrupt_commit_is_named_and_never_a_group(how: str) -> None:
    box = finished(4)
    last = max(key for key in asyncio.run(box.list("rounds/")))
    key = json.loads(asyncio.run(box.get(last)) or b"")["theta"]["key"]
    spoiled = Spoiled(box, key, how)
    for call in (lambda: gm.align(net(), mailbox=spoiled), lambda: session(spoiled)):
        with no_threads_left(), pytest.raises(gm.PayloadCorrupt) as caught:
            call()
        assert type(caught.value) is gm.PayloadCorrupt
        assert key in str(caught.value)
    assert list(asyncio.run(box.list("leases/"))) == []


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_corrupt_beginning_is_named_too(how: str) -> None:
    box = MemoryMailbox()
    session(box).close()
    key = asyncio.run(box.list("blobs/init/"))[1]
    with no_threads_left(), pytest.raises(gm.PayloadCorrupt, match=key):
        session(Spoiled(box, key, how))


@pytest.mark.parametrize("lost", [[0], [1], [2], [3], [6], [0, 1, 2], [2, 6], list(range(7))])
def test_old_records_that_are_gone_are_passed_over(lost: list[int]) -> None:
    """Wherever the search for the newest one looks, or does not."""
    box, expected = finished(9), net()
    newest = gm.align(expected, mailbox=box)
    assert newest >= 9
    asyncio.run(box.delete([layout.round_key(number) for number in lost]))
    found, model = net(1), net(1)
    assert gm.align(found, mailbox=box) == newest
    assert equal(found, expected)
    with session(box, model) as one:
        assert one.rounds_seen == newest
        assert equal(model, expected)
        train_until(one, model, newest + 2)
    there = asyncio.run(box.list("rounds/"))
    assert [key for key in map(layout.round_key, lost) if key in there] == []


def test_any_two_old_records_may_be_gone() -> None:
    box = finished(16)
    newest = gm.align(net(), mailbox=box)
    records = {key: asyncio.run(box.get(key)) or b"" for key in asyncio.run(box.list("rounds/"))}
    for lost in itertools.combinations(list(records)[: newest - 1], 2):
        asyncio.run(box.delete(lost))
        assert gm.align(net(), mailbox=box) == newest, lost
        for key in lost:
            asyncio.run(box.put_if_absent(key, records[key]))


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_one_of_the_last_records_that_is_gone_is_named(how: str) -> None:
    box = finished(9)
    newest = gm.align(net(), mailbox=box)
    key = layout.round_key(newest - 1)
    spoiled = Spoiled(box, key, how)
    for call in (lambda: gm.align(net(), mailbox=spoiled), lambda: session(spoiled)):
        with no_threads_left(), pytest.raises(gm.ProtocolError, match=key):
            call()


def test_what_lies_under_a_later_rounds_key_and_is_no_record_holds_nobody_up() -> None:
    box = finished(3)
    newest = gm.align(net(), mailbox=box)
    for number in (newest + 5, newest + 6, 10**10 - 1):
        asyncio.run(box.put_if_absent(layout.round_key(number), b"{}"))
    assert gm.align(net(), mailbox=box) == newest
    with session(box) as one:
        assert one.rounds_seen == newest
    empty = MemoryMailbox()
    asyncio.run(empty.put_if_absent(layout.round_key(7), b"{}"))
    with session(empty) as one:
        assert one.rounds_seen == -1


def test_a_run_that_lost_its_manifest_and_first_rounds_is_not_created_again() -> None:
    box = finished(6)
    old = [layout.MANIFEST, *map(layout.round_key, range(4))]
    asyncio.run(box.delete(old + list(asyncio.run(box.list(layout.BLOBS_INIT)))))
    with no_threads_left(), pytest.raises(gm.ProtocolError, match="manifest"):
        session(box)
    assert layout.MANIFEST not in asyncio.run(box.list(""))


def test_a_session_that_cannot_join_leaves_the_model_alone() -> None:
    """Whichever call of the store fails."""

    class FailsAt(WrappedMailbox):
        calls = 0

        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            self.calls += 1
            if self.calls == at:
                raise OSError("the disk is gone")
            return await act()

    box, before = finished(3), net(1)
    for at in range(1, 100):
        model = net(1)
        try:
            one = session(FailsAt(box), model)
        except OSError:
            assert equal(model, before), at
        else:
            one.close()
            break
    assert 5 < at < 50


def test_a_corrupt_record_stops_no_node_and_is_told() -> None:
    """Training goes on; that no round can be committed is an error event which names the object."""
    box, heard = finished(4), Events()
    last = max(key for key in asyncio.run(box.list("rounds/")))
    asyncio.run(box.delete([last]))
    asyncio.run(box.put_if_absent(last, b"{}"))
    with no_threads_left():
        one = session(box, callbacks=[heard])
        ends = time.monotonic() + 90
        while not heard.of(gm.events.TaskFailed):
            time.sleep(0.005)
            assert time.monotonic() < ends
        one.step(samples=1)  # nothing is due yet, so that closing waits for no round
        with pytest.raises(gm.ProtocolError, match=last):
            one.close()
    assert last in heard.of(gm.events.TaskFailed)[0].error


def test_a_store_that_refuses_is_told_at_once_and_once() -> None:
    class Denied(WrappedMailbox):
        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            raise PermissionError("access denied to this prefix; ask its owner")

    heard = Events()
    with no_threads_left(), pytest.raises(PermissionError, match="ask its owner"):
        session(Denied(MemoryMailbox()), callbacks=[heard])
    assert list(heard) == []
    with no_threads_left(), pytest.raises(PermissionError, match="ask its owner"):
        gm.align(net(), mailbox=Denied(MemoryMailbox()))


def test_a_wrong_address_is_suspected_until_the_store_has_answered() -> None:
    """It is waited for, as a store that is away; who interrupts that is told of nothing else."""

    class Nowhere(WrappedMailbox):
        calls = 0

        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            self.calls += 1
            raise gm.MailboxUnavailable("listing in bucket 'b' at https://mistyped: no such host")

    box, heard = Nowhere(MemoryMailbox()), Events()

    def interrupt(event: gm.events.Event) -> None:
        heard(event)
        if len(heard.of(gm.events.StoreUnavailable)) == 2:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with no_threads_left(), pytest.raises(KeyboardInterrupt):
        session(box, callbacks=[interrupt])
    told = heard.of(gm.events.StoreUnavailable)
    assert len(told) == box.calls == len(list(heard)) == 2
    assert str(told[0]).startswith(
        "no usable answer from the mailbox yet: check its address, or wait;"
    )
    assert "https://mistyped" in str(told[0])


def test_align_tells_of_a_store_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Late(WrappedMailbox):
        calls = 0

        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            self.calls += 1
            if self.calls == 1:
                raise gm.MailboxUnavailable("https://mistyped: no such host")
            return await act()

    with no_threads_left():
        assert gm.align(net(), mailbox=Late(MemoryMailbox())) == -1
    (told,) = caplog.messages
    assert told.startswith("no usable answer from the mailbox yet: check its address, or wait;")
    assert told.endswith("https://mistyped: no such host")


def test_a_store_that_has_answered_is_away() -> None:
    class Stumbling(WrappedMailbox):
        calls = 0

        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise gm.MailboxUnavailable("the store answered 503")
            return await act()

    heard = Events()
    with session(Stumbling(MemoryMailbox()), callbacks=[heard]):
        (told,) = heard.of(gm.events.StoreUnavailable)
    assert str(told).endswith("s: the store answered 503")
    assert str(told).startswith("mailbox ")


def test_the_same_id_twice_in_one_process() -> None:
    box, model = MemoryMailbox(), net()
    first = session(box, model)
    # It renews nothing meanwhile: for a moment there would be two beats of one learner.
    with session(box, net(1), lease_every=60.0, lease_timeout=120.0):
        with pytest.raises(gm.LearnerReplaced, match="'a'"):
            train_until(first, model, 10**6)
        with pytest.raises(gm.LearnerReplaced):
            first.close()
        assert len(asyncio.run(box.list("leases/"))) == 1


def test_the_default_id_is_host_and_process() -> None:
    import os
    import re

    with session(MemoryMailbox(), learner_id=None) as one:
        assert re.fullmatch(r"[a-z0-9-]{1,64}", one.learner_id)
        assert one.learner_id.endswith(f"-{os.getpid()}")


def test_beats_come_at_half_the_lease_timeout_at_least() -> None:
    with session(MemoryMailbox(), lease_every=60.0, lease_timeout=4.0) as one:
        assert one._settings.lease_every == 2.0
