"""How a session ends: cleanly, by an exception, with a store that hangs, with the interpreter."""

import asyncio
import contextlib
import itertools
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.patterns.waiting import until
from tests.session.models import (
    ALGORITHM,
    QUICK,
    Events,
    equal,
    net,
    no_threads_left,
    parameters,
    together,
    train_step,
    train_until,
)

import gradientmail as gm
import gradientmail.session
from gradientmail import events, learner
from gradientmail.exchange import layout
from gradientmail.mailbox.wrapped import Call, WrappedMailbox


class Boom(Exception):
    """What the body of a session raises."""


SOON = 0.8
"""What a session that leaves at once really gets; other tests are not in a hurry."""


def soon(_: object) -> float:
    """So long, whatever is asked."""
    return SOON


class Hanging(WrappedMailbox):
    """A store whose calls end no more after ``hang`` is set, in one of four ways."""

    def __init__(self, inner: gm.Mailbox, how: str) -> None:
        super().__init__(inner)
        self.how = how
        self.hang = False
        self.release = threading.Event()

    async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
        if self.hang:
            match self.how:
                case "awaits":
                    await asyncio.Event().wait()
                case "in a thread":
                    await asyncio.to_thread(self.release.wait)
                case "refuses to be cancelled":
                    while not self.release.is_set():
                        try:
                            await asyncio.sleep(0.05)
                        except asyncio.CancelledError:
                            continue
                case "blocks the loop":
                    self.release.wait()
        return await act()


def interrupt_soon() -> None:
    """Ctrl-C in a moment."""
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()


def keys(box: gm.MemoryMailbox, prefix: str = "") -> list[str]:
    """What is in the store."""
    return list(asyncio.run(box.list(prefix)))


def test_a_clean_exit_waits_for_its_rounds_and_holds_the_newest_commit() -> None:
    box, model, seen = gm.MemoryMailbox(), net(), Events()
    with no_threads_left():
        with gm.Session(
            model, algorithm=ALGORITHM, mailbox=box, learner_id="a", callbacks=[seen], **QUICK
        ) as session:
            train_until(session, model, 4)
        published = max(e.round for e in seen.of(events.SnapshotPublished))
        assert session.rounds_seen >= published
        (closed,) = seen.of(events.Closed)
        assert closed.clean
        assert closed.rounds_seen == session.rounds_seen
        assert seen[-1] is closed
        assert keys(box, "leases/") == []
        other = net(1)
        assert gm.align(other, mailbox=box) == session.rounds_seen
        assert equal(model, other)
        assert seen.of(events.GaveUp) == []
        assert seen.of(events.TaskFailed) == []


class Failing(WrappedMailbox):
    """A store in which, from some moment on, so many reads of commits' payloads go wrong."""

    def __init__(self, inner: gm.Mailbox, how: str) -> None:
        super().__init__(inner)
        self.how, self.left = how, 0

    async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
        if call.operation != "get" or not call.key.startswith("blobs/rounds/") or not self.left:
            return await act()
        self.left -= 1
        if self.how == "refused":
            raise gm.MailboxRefused(f"{call.key}: access denied")
        if self.how == "cancelled":
            raise asyncio.CancelledError
        return bytes(100)


ERRORS = {
    "damaged": (gm.PayloadCorrupt, "blobs/rounds/"),
    "refused": (gm.MailboxRefused, "blobs/rounds/"),
    "cancelled": (RuntimeError, "ended in CancelledError"),
}


@pytest.mark.parametrize("how", ERRORS)
@pytest.mark.parametrize("times", [2, 1000])
def test_a_newest_commit_that_cannot_be_read_leaves_the_newest_that_can(
    how: str, times: int
) -> None:
    box, ours, model = gm.MemoryMailbox(), net(), net()
    store, heard, seen = Failing(box, how), Events(), Events()
    with gm.Session(
        ours, algorithm=ALGORITHM, mailbox=box, learner_id="a", callbacks=[heard], **QUICK
    ) as session:

        def train(rounds: int) -> None:
            train_until(session, ours, rounds)
            sent = session._learner._last_published  # which an event tells later
            until(lambda: heard.of(events.RoundCommitted)[-1].round >= sent)

        train(2)
        other = gm.Session(
            model,
            algorithm=ALGORITHM,
            mailbox=store,
            callbacks=[seen],
            poll_interval=60.0,  # so that only closing looks
            lease_every=QUICK["lease_every"],
            lease_timeout=QUICK["lease_timeout"],
        )
        joined = parameters(model)
        store.left = times if times > 2 else 0
        train(6)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        store.left = times
        if times == 2:
            other.close()
            newest = net()
            assert gm.align(newest, mailbox=box) == other.rounds_seen
            assert equal(model, newest)
        else:
            error, said = ERRORS[how]
            with pytest.raises(error, match=said):
                other.close()
            assert all(torch.equal(now, joined[name]) for name, now in parameters(model).items())
        (closed,) = seen.of(events.Closed)
        assert closed.clean == (times == 2)


def test_closing_says_when_the_store_does_not_tell_of_newer_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model then holds the newest commits that were known, and no local steps."""
    monkeypatch.setattr(gradientmail.session, "LEAVE_SECONDS", SOON)
    monkeypatch.setattr(gradientmail.session.Node, "patience", soon)
    box, model, seen = Hanging(gm.MemoryMailbox(), "awaits"), net(), Events()
    with gm.Session(
        model, algorithm=ALGORITHM, mailbox=box, learner_id="a", callbacks=[seen], **QUICK
    ) as session:
        train_until(session, model, 4)
        sent = session._learner._last_published  # perhaps not in the mailbox yet
        until(lambda: seen.of(events.RoundCommitted)[-1].round >= sent)
        box.hang = True
    fetch, lease = seen.of(events.TaskFailed)
    assert (fetch.task, lease.task) == ("fetch", "lease")
    assert str(fetch) == (
        "leaves with the newest commits that it knew, there may be more: they could not be looked "
        "for or fetched within 0.8 s"
    )
    assert session.rounds_seen == sent
    box.hang = False
    newest = net()
    assert gm.align(newest, mailbox=box) == sent
    assert equal(model, newest)


def test_closing_waits_for_a_commit_that_takes_long_to_fetch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer than the last words may, which are small."""
    slow = False

    class Slow(WrappedMailbox):
        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            if slow and call.operation == "get" and call.key.startswith("blobs/rounds/"):
                await asyncio.sleep(3 * SOON)
            return await act()

    monkeypatch.setattr(gradientmail.session, "LEAVE_SECONDS", SOON)
    box, ours, model, seen = gm.MemoryMailbox(), net(), net(), Events()
    with gm.Session(ours, algorithm=ALGORITHM, mailbox=box, learner_id="a", **QUICK) as session:
        seldom = QUICK | {"poll_interval": 0.5}  # so that it takes no round over
        other = gm.Session(
            model, algorithm=ALGORITHM, mailbox=Slow(box), callbacks=[seen], **seldom
        )
        slow = True
        train_until(session, ours, 3)
    other.close()
    newest = net()
    assert gm.align(newest, mailbox=box) == session.rounds_seen == other.rounds_seen
    assert equal(model, newest)
    assert seen.of(events.TaskFailed) == []


class Once:
    """A function that is interrupted by Ctrl-C the first time that it is called."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner, self.left = inner, 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("where", ["forgets", "unregisters", "calls", "tells"])
@pytest.mark.parametrize("how", ["close", "exception"])
def test_ctrl_c_in_the_last_words_leaves_nothing_behind(
    where: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, model, heard = gm.MemoryMailbox(), net(), Once(str)

    def tell(event: events.Event) -> None:
        if isinstance(event, events.Closed) and where == "tells":
            heard(event)

    with no_threads_left():
        session = gm.Session(
            model, algorithm=ALGORITHM, mailbox=box, learner_id="a", callbacks=[tell], **QUICK
        )
        train_until(session, model, 2)
        owner, name = {
            "forgets": (gradientmail.session.opened, "closed"),
            "unregisters": (gradientmail.session.atexit, "unregister"),
            "calls": (session._node, "leave"),
            "tells": (heard, "inner"),
        }[where]
        if where != "tells":
            monkeypatch.setattr(owner, name, Once(getattr(owner, name)))
        ends = {"close": session.close, "exception": partial(session.__exit__, Boom, Boom(), None)}
        with pytest.raises(KeyboardInterrupt):
            ends[how]()
        session.close()
        assert keys(box, "leases/") == []
        with pytest.raises(gm.SessionClosed):
            session.step(samples=1)


@pytest.mark.parametrize("mended", [False, True])
def test_a_commit_that_was_left_out_is_tried_again_when_closing(
    mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still lacking is named, and keeps no other away."""
    damaged = True

    class Damaged(WrappedMailbox):
        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            blob = layout.parse_blob_key(call.key)
            bad = damaged and blob is not None and blob.kind == "round" and blob.index % 2 == 0
            return bytes(100) if bad and call.operation == "get" else await act()

    box, ours, model, heard, seen = gm.MemoryMailbox(), net(), net(), Events(), Events()
    with gm.Session(
        ours, algorithm=ALGORITHM, mailbox=box, learner_id="a", callbacks=[heard], **QUICK
    ) as session:
        until(lambda: heard.of(events.RoundClaimed))
        seldom = QUICK | {"poll_interval": 0.5}  # so that it takes no round over
        other = gm.Session(
            model, algorithm=ALGORITHM, mailbox=Damaged(box), callbacks=[seen], **seldom
        )
        learner = other._learner
        numbers, settle = list[int](), learner.settle

        def settling() -> None:
            numbers.extend(version.number for version in learner.versions)
            settle()

        monkeypatch.setattr(learner, "settle", settling)
        train_until(session, ours, 5)
        sent = session._learner._last_published  # which an event tells later
        until(lambda: max((e.round for e in seen.of(events.RoundSeen)), default=-1) >= sent)
        until(lambda: other._node.courier and other._node.courier._left_out)
        damaged = not mended
        if mended:
            other.close()
            newest = net()
            assert gm.align(newest, mailbox=box) == other.rounds_seen
            assert equal(model, newest)
        else:
            with pytest.raises(gm.PayloadCorrupt, match="blobs/rounds/"):
                other.close()
            assert numbers == [0, (sent + 1) // 2]
        assert other.rounds_seen == sent


def test_a_session_can_be_closed_whatever_python_thinks_of_its_thread() -> None:
    """After Ctrl-C in ``Thread.is_alive`` Python 3.12 takes the thread for ended."""
    with no_threads_left():
        session = gm.Session(
            net(), algorithm=ALGORITHM, mailbox=gm.MemoryMailbox(), callbacks=(), **QUICK
        )
        thread = session._thread._thread
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(thread, "is_alive", lambda: False)
            session.close()
        thread.join(10)
        assert not thread.is_alive()


def test_closing_twice_is_no_error_and_going_on_afterwards_is_one() -> None:
    model, seen = net(), Events()
    session = gm.Session(
        model, algorithm=ALGORITHM, mailbox=gm.MemoryMailbox(), callbacks=[seen], **QUICK
    )
    session.close()
    session.close()
    assert len(seen.of(events.Closed)) == 1
    with pytest.raises(gm.SessionClosed, match="new Session"):
        session.step(samples=1)
    with pytest.raises(ValueError, match="samples"):
        session.step(samples=0)
    with pytest.raises(gm.SessionClosed, match="new Session"), session:
        pytest.fail("a body that trains in it would run")
    assert session.rounds_seen == -1


@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt, SystemExit])
def test_an_exception_goes_on_unchanged_and_nothing_is_published(
    kind: type[BaseException],
) -> None:
    box, model, seen = gm.MemoryMailbox(), net(), Events()
    error = kind("stop")
    with no_threads_left():
        with (  # noqa: PT012 - the body of the session is what raises
            pytest.raises(kind) as caught,
            gm.Session(
                model, algorithm=ALGORITHM, mailbox=box, learner_id="a", callbacks=[seen], **QUICK
            ) as session,
        ):
            train_until(session, model, 2)
            before = parameters(model)
            raise error
        assert caught.value is error
        assert error.__context__ is None
        assert error.__cause__ is None
        assert keys(box, "leases/") == []
        after = keys(box)
        (closed,) = seen.of(events.Closed)
        assert not closed.clean
        assert all(torch.equal(before[n], p) for n, p in parameters(model).items())
        time.sleep(0.2)
        assert keys(box) == after
        with pytest.raises(gm.SessionClosed):
            session.step(samples=1)


@pytest.mark.parametrize(
    "how", ["awaits", "in a thread", "refuses to be cancelled", "blocks the loop"]
)
def test_an_exception_is_not_held_up_by_a_store_that_hangs(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited for the store, or as long as a clean exit may, would wait for ever here."""
    monkeypatch.setattr(gradientmail.session, "ABANDON_SECONDS", SOON)
    monkeypatch.setattr(gradientmail.session, "LEAVE_SECONDS", 1000.0)
    box, model, seen = Hanging(gm.MemoryMailbox(), how), net(), Events()
    with (  # noqa: PT012
        pytest.raises(Boom),
        gm.Session(model, algorithm=ALGORITHM, mailbox=box, callbacks=[seen], **QUICK) as session,
    ):
        train_until(session, model, 2)
        box.hang = True
        time.sleep(0.1)
        raise Boom
    (closed,) = seen.of(events.Closed)
    assert not closed.clean
    box.release.set()
    box.hang = False


@pytest.mark.parametrize("where", ["body", "close"])
def test_ctrl_c(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the body, and in ``close`` while it waits for a round that does not commit."""
    monkeypatch.setattr(gradientmail.session, "ABANDON_SECONDS", SOON)
    box = Hanging(gm.MemoryMailbox(), "awaits")
    model, seen = net(), Events()
    settings: dict[str, Any] = {**QUICK, "lease_timeout": 500.0}
    with no_threads_left(), pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with gm.Session(
            model, algorithm=ALGORITHM, mailbox=box, callbacks=[seen], **settings
        ) as session:
            train_until(session, model, 2)
            box.hang = True
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(12):
                train_step(model, optimizer, step)
                session.step(samples=6)
            interrupt_soon()
            if where == "body":
                time.sleep(90)
        raise AssertionError("close returned though its rounds did not commit")
    (closed,) = seen.of(events.Closed)
    assert not closed.clean


def test_ctrl_c_while_joining_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradientmail.session, "ABANDON_SECONDS", SOON)
    box = Hanging(gm.MemoryMailbox(), "awaits")
    box.hang = True
    with no_threads_left(), pytest.raises(KeyboardInterrupt):  # noqa: PT012
        interrupt_soon()
        gm.Session(net(), algorithm=ALGORITHM, mailbox=box, **QUICK)


def test_close_says_what_it_waits_for_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another learner is waited for that never publishes; quorum 2.

    The learner's clock goes 40 s at each look, so that nobody's lease has to run out in earnest.
    """
    ticks = itertools.count(0.0, 40.0)
    monkeypatch.setattr(learner, "monotonic", lambda: next(ticks))
    box, model, seen = gm.MemoryMailbox(), net(), Events()
    algorithm = gm.DiLoCo(sync_every=2, fragments=1, in_flight=1, quorum_size=2)
    idle = gm.Session(net(1), algorithm=algorithm, mailbox=box, learner_id="idle", **QUICK)
    with gm.Session(
        model, algorithm=algorithm, mailbox=box, learner_id="a", callbacks=[seen], **QUICK
    ) as session:
        initial = parameters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            train_step(model, optimizer, step)
            session.step(samples=6)
    (gave_up,), (waits,) = seen.of(events.GaveUp), seen.of(events.ClosingWaits)
    assert gave_up.rounds == waits.rounds == (0,)
    assert gave_up.waited_seconds == pytest.approx(waits.at_most_seconds)
    assert seen.of(events.Closed)[0].clean
    assert session.rounds_seen == -1
    assert all(torch.equal(initial[n], p) for n, p in parameters(model).items())
    idle.close()


def test_flush_on_close_publishes_final_rounds() -> None:
    box, model, seen = gm.MemoryMailbox(), net(), Events()
    algorithm = gm.DiLoCo(sync_every=100, fragments=2, in_flight=1, flush_on_close=True)
    with gm.Session(
        model, algorithm=algorithm, mailbox=box, learner_id="a", callbacks=[seen], **QUICK
    ) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            train_step(model, optimizer, step)
            session.step(samples=6)
        trained = parameters(model)
    published = [(e.round, e.steps, e.final) for e in seen.of(events.SnapshotPublished)]
    assert published == [(0, 3, True), (1, 3, True)]
    # All contributions final: master − Δ = anchor − (anchor − θ) = θ.
    assert session.rounds_seen == 1
    for name, value in parameters(model).items():
        torch.testing.assert_close(value, trained[name], rtol=1e-6, atol=1e-7)
    other = net(5)
    assert gm.align(other, mailbox=box) == 1
    assert equal(other, model)


def test_final_rounds_of_two_learners_close_together() -> None:
    """Both flush at once: their final snapshots meet, or follow one another; both agree."""
    box, models, seen = gm.MemoryMailbox(), [net(0), net(1)], [Events(), Events()]
    algorithm = gm.DiLoCo(sync_every=50, fragments=2, in_flight=2, flush_on_close=True)
    ready = threading.Barrier(2, timeout=90)

    def life(i: int) -> None:
        with gm.Session(
            models[i],
            algorithm=algorithm,
            mailbox=box,
            learner_id=f"n{i}",
            callbacks=[seen[i]],
            **QUICK,
        ) as session:
            ready.wait()
            optimizer = torch.optim.SGD(models[i].parameters(), lr=0.05)
            for step in range(3):
                train_step(models[i], optimizer, 10 * i + step)
                session.step(samples=6)
            ready.wait()

    together(lambda: life(0), lambda: life(1))
    for one in seen:
        published = one.of(events.SnapshotPublished)
        assert {e.final for e in published} == {True}
        assert one.of(events.GaveUp) == []
    last = [one.of(events.Closed)[0].rounds_seen for one in seen]
    spare = net(7)
    assert gm.align(spare, mailbox=box) == max(last)
    for number, model in zip(last, models, strict=True):
        assert number < max(last) or equal(model, spare)


def test_without_flush_local_steps_are_dropped() -> None:
    box, model = gm.MemoryMailbox(), net()
    initial = parameters(model)
    algorithm = gm.DiLoCo(sync_every=100, fragments=2)
    with gm.Session(model, algorithm=algorithm, mailbox=box, **QUICK) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            train_step(model, optimizer, step)
            session.step(samples=6)
        assert not all(torch.equal(initial[n], p) for n, p in parameters(model).items())
    assert all(torch.equal(initial[n], p) for n, p in parameters(model).items())
    assert session.rounds_seen == -1


@pytest.mark.parametrize(
    ("steps", "moved", "rounds", "flush", "told"),
    [
        (0, True, 0, False, (0, 2)),
        (0, False, 0, False, None),
        (3, True, 0, False, (3, 2)),
        (3, True, 0, True, None),
        (60, True, 0, False, (60, 1)),
        (0, False, 1, False, None),
        (0, True, 1, False, (0, 2)),
    ],
)
def test_training_that_is_in_no_round_is_told(
    steps: int, moved: bool, rounds: int, flush: bool, told: tuple[int, int] | None
) -> None:
    """``step`` was forgotten, or came too seldom; not when there was nothing to lose.

    Steps, and the fragments of two that have none of them in a round.
    """
    box, heard = gm.MemoryMailbox(), Events()
    algorithm = gm.DiLoCo(sync_every=100, fragments=2, flush_on_close=flush)
    if rounds:  # of an earlier session
        model = net()
        with gm.Session(model, algorithm=algorithm, mailbox=box, **QUICK) as session:
            train_until(session, model, 1)
    model = net()
    with gm.Session(model, algorithm=algorithm, mailbox=box, callbacks=[heard], **QUICK) as session:
        committed = parameters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(steps):
            train_step(model, optimizer, step)
            session.step(samples=6)
        if moved and not steps:
            train_step(model, optimizer, 0)
    found = [(event.steps, event.fragments, event.of) for event in heard.of(events.NothingShared)]
    assert found == ([] if told is None else [(*told, 2)])
    if told and told[1] == 2:
        assert all(torch.equal(committed[name], now) for name, now in parameters(model).items())


def test_what_an_earlier_session_has_shared_is_not_called_lost() -> None:
    box, model = gm.MemoryMailbox(), net()
    with gm.Session(model, algorithm=ALGORITHM, mailbox=box, **QUICK) as session:
        train_until(session, model, 3)
        state = session.state_dict()
    heard = Events()
    with gm.Session(model, algorithm=ALGORITHM, mailbox=box, callbacks=[heard], **QUICK) as session:
        session.load_state_dict(state)
    assert heard.of(events.NothingShared) == []


def test_a_model_that_was_never_finite_has_shared_nothing() -> None:
    box, model, heard = gm.MemoryMailbox(), net(), Events()
    other = gm.Session(net(), algorithm=ALGORITHM, mailbox=box, learner_id="well", **QUICK)
    sick = gm.Session(
        model, algorithm=ALGORITHM, mailbox=box, learner_id="sick", callbacks=[heard], **QUICK
    )
    with other, sick:
        while sick.rounds_seen < 4:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            sick.step(samples=6)
            other.step(samples=6)
            time.sleep(0.005)
    (event,) = heard.of(events.NothingShared)
    assert (event.steps, event.fragments) == (sick._learner.local_step, 2)


SCRIPT = textwrap.dedent(
    """
    import os, sys, time
    import gradientmail as gm
    import gradientmail.session
    from tests.session.models import ALGORITHM, QUICK, net, train_step
    import torch

    folder, *hows = sys.argv[1:]
    torch.optim.SGD(net().parameters(), lr=0.05)  # imports all there is
    quickly = gradientmail.session.ABANDON_SECONDS
    children = {}
    for how in hows:
        children[how] = os.fork()
        if not children[how]:
            break  # a child goes on below and ends as any interpreter does
    else:
        for how, pid in children.items():
            print(how, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        sys.exit()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{how}.{name}", os.O_WRONLY | os.O_CREAT), number)
    box = gm.FilesystemMailbox(f"{folder}/{how}")
    # A busy machine may need longer for the last words than who hangs is waited for.
    gradientmail.session.ABANDON_SECONDS = quickly if how == "hangs" else 60.0
    if how in ("hangs", "waits"):
        import asyncio
        from gradientmail.mailbox.wrapped import Call, WrappedMailbox
        class Hanging(WrappedMailbox):
            hang = False
            async def around(self, call, act):
                if self.hang and how == "hangs":
                    await asyncio.to_thread(time.sleep, 1000)
                if self.hang and call.operation == "put_if_absent" and call.key[:5] == "blobs":
                    await asyncio.sleep(1000)
                return await act()
        box = Hanging(box)
    model = net()
    session = gm.Session(model, algorithm=ALGORITHM, mailbox=box, learner_id="a", **QUICK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = 0
    while session.rounds_seen < 3:
        train_step(model, optimizer, step)
        session.step(samples=6)
        step += 1
        time.sleep(0.002)
    if how == "raises":
        raise SystemExit(3)
    if how in ("hangs", "waits"):
        box.hang = True
        for step in range(8):
            train_step(model, optimizer, step)
            session.step(samples=6)
        time.sleep(0.2)
    print("body ends", session.rounds_seen >= 3)
    """
)


def test_the_interpreter_exits_without_close(tmp_path: Path) -> None:
    hows = ("ends", "raises", "hangs", "waits")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path), *hows],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    assert done.stdout.splitlines() == ["ends 0", "raises 3", "hangs 0", "waits 0"]
    said = {how: (tmp_path / f"{how}.out").read_text() for how in hows}
    errors = {how: (tmp_path / f"{how}.err").read_text() for how in hows}
    assert said == {how: "" if how == "raises" else "body ends True\n" for how in hows}
    forgotten = f"{events.NeverClosed(learner='a')}\n"
    assert (errors["ends"], errors["raises"], errors["waits"]) == (forgotten,) * 3
    assert "Traceback" not in errors["hangs"]
    assert "Exception" not in errors["hangs"]
    for how in ("ends", "raises", "waits"):
        assert [p for p in (tmp_path / how / "leases").rglob("*") if p.is_file()] == []


def test_an_interpreter_that_exits_right_after_joining_tells_of_no_failure(tmp_path: Path) -> None:
    script = """
    import atexit, sys, time
    import torch
    import gradientmail as gm
    def show(event):
        print(type(event).__name__, flush=True)
    session = gm.Session(
        torch.nn.Linear(2, 1),
        algorithm=gm.DiLoCo(sync_every=4, fragments=2),
        mailbox=gm.FilesystemMailbox(sys.argv[1]),
        poll_interval=0.05,
        callbacks=(show,),
    )
    atexit.register(time.sleep, 0.5)  # the node works on, and can start no thread any more
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "Closed"
    assert "TaskFailed" not in done.stdout


def test_works_inside_a_running_event_loop() -> None:
    async def main() -> bool:
        model, box = net(), gm.MemoryMailbox()
        with gm.Session(model, algorithm=ALGORITHM, mailbox=box, **QUICK) as session:
            train_until(session, model, 3)
        other = net(1)
        assert gm.align(other, mailbox=box) == session.rounds_seen
        return equal(model, other)

    assert asyncio.run(main())


def test_a_callback_that_raises_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    seen = Events()

    def bad(event: events.Event) -> None:
        raise Boom(type(event).__name__)

    model = net()
    with gm.Session(
        model, algorithm=ALGORITHM, mailbox=gm.MemoryMailbox(), callbacks=[bad, seen], **QUICK
    ) as session:
        train_until(session, model, 2)
    assert len(seen.of(events.Closed)) == 1
    assert seen.of(events.TaskFailed) == []
    assert any("callback" in record.getMessage() for record in caplog.records)


def test_events_are_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="gradientmail")
    model = net()
    with gm.Session(
        model, algorithm=ALGORITHM, mailbox=gm.MemoryMailbox(), learner_id="me", **QUICK
    ) as session:
        train_until(session, model, 1)
    said = [record.getMessage() for record in caplog.records]
    assert "me joined before the first round" in said
    assert any(line.startswith("created the run: 67 parameters in 2 fragments") for line in said)
    assert any(
        line.startswith("round 0: committed version 1 of fragment 0 from me") for line in said
    )


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_is_left_when_the_block_has_ended(*, fails: bool) -> None:
    """Not for a moment: who looks at once finds none."""
    for name in ("a", "b", "c"):
        model, mailbox = net(), gm.MemoryMailbox()
        with (
            pytest.raises(RuntimeError) if fails else contextlib.nullcontext(),
            gm.Session(
                model,
                algorithm=ALGORITHM,
                mailbox=mailbox,
                learner_id=name,
                callbacks=(),
                **QUICK,
            ) as session,
        ):
            for step in range(6):
                train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step)
                session.step(samples=1)
            if fails:
                raise RuntimeError
        left = [thread.name for thread in threading.enumerate()]
        assert [one for one in left if one.startswith(f"gradientmail-{name}")] == []


def test_a_process_that_exits_on_sigterm_leaves_no_lease(tmp_path: Path) -> None:
    """As docs/your-training-loop.md has it for Slurm and spot machines."""
    script = """
    import signal, sys, time
    import torch
    import gradientmail as gm
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with gm.Session(torch.nn.Linear(2, 2), algorithm=gm.DiLoCo(2, 1, in_flight=1),
                    mailbox=gm.FilesystemMailbox(sys.argv[1]), learner_id="a") as session:
        print("trains", flush=True)
        while True:
            session.step(samples=1)
            time.sleep(0.01)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "trains\n"
        assert list(tmp_path.glob("leases/a/*.json"))
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    assert list(tmp_path.glob("leases/a/*.json")) == []
