"""What users do by mistake gets an error that says so, and never a session that stands still."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Buffer, Callable, Iterable
from typing import Any

import pytest
import torch
from tests.session.models import ALGORITHM, QUICK, Events, net, no_threads_left, train_step

import gradientmail as gm
from gradientmail import events
from gradientmail.events import Event


def run_until(session: gm.Session, model: torch.nn.Module, rounds: int) -> bool:
    """Train until so many rounds were seen, 80 s at most; whether they were."""
    optimizer, ends = torch.optim.SGD(model.parameters(), lr=0.05), time.monotonic() + 80
    while session.rounds_seen < rounds and time.monotonic() < ends:
        train_step(model, optimizer, session.rounds_seen + 2)
        session.step(samples=1)
        time.sleep(0.001)
    return session.rounds_seen >= rounds


def test_a_callback_cannot_close_the_session_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It runs on the thread that closing waits for."""
    model, sessions = net(), list[gm.Session]()

    def close(event: Event) -> None:
        if isinstance(event, events.RoundCommitted) and event.round == 0:
            sessions[0].close()

    box = gm.MemoryMailbox()
    with no_threads_left():
        session = gm.Session(model, algorithm=ALGORITHM, mailbox=box, callbacks=[close], **QUICK)
        sessions.append(session)
        with session:
            assert run_until(session, model, 3)
    assert "cannot be closed from a callback" in caplog.text


class Odd(BaseException):
    """As ``pytest.fail`` raises: no ``Exception``."""


ENDS = [SystemExit, KeyboardInterrupt, asyncio.CancelledError, Odd]


def trained_with(box: gm.Mailbox, callback: Callable[[Event], object]) -> bool:
    """Train four rounds with ``overlap_steps=0``, which waits for the loop; and close."""
    model, done = net(), list[bool]()
    algorithm = gm.DiLoCo(sync_every=4, fragments=2, overlap_steps=0)
    session = gm.Session(model, algorithm=algorithm, mailbox=box, callbacks=[callback], **QUICK)
    thread = threading.Thread(target=lambda: done.append(run_until(session, model, 4)), daemon=True)
    thread.start()
    thread.join(90)
    session.close()
    return done == [True]


@pytest.mark.parametrize("end", ENDS)
def test_a_callback_that_ends_the_program_does_not_end_the_loop(
    end: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """With ``overlap_steps=0`` the training would wait for a thread that is gone."""

    def leave(event: Event) -> None:
        if isinstance(event, events.RoundCommitted) and event.round == 0:
            raise end

    with no_threads_left():
        assert trained_with(gm.MemoryMailbox(), leave)
    assert "failed on RoundCommitted" in caplog.text


class Ending(gm.MemoryMailbox):
    """Raises what would end the program, once; in a task of its own if so asked."""

    def __init__(self, end: type[BaseException], operation: str, *, in_a_task: bool) -> None:
        super().__init__()
        self.end, self.operation, self.in_a_task = end, operation, in_a_task
        self.calls = 0

    async def _raise(self) -> None:
        raise self.end("enough")

    async def _count(self, operation: str, key: str) -> None:
        if operation != self.operation or not key.startswith("blobs/"):
            return
        self.calls += 1
        if self.calls == 4:
            await (asyncio.create_task(self._raise()) if self.in_a_task else self._raise())

    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        await self._count("put", key)
        return await super().put_if_absent(key, data)

    async def delete(self, keys: Iterable[str], /) -> None:
        wanted = tuple(keys)
        await self._count("delete", min(wanted, default=""))
        await super().delete(key for key in wanted)


@pytest.mark.parametrize("in_a_task", [False, True])
@pytest.mark.parametrize("operation", ["put", "delete"])
@pytest.mark.parametrize("end", ENDS)
def test_a_mailbox_that_ends_the_program_does_not_end_the_loop(
    end: type[BaseException], operation: str, in_a_task: bool
) -> None:
    """It failed, and is asked again."""
    box, heard = Ending(end, operation, in_a_task=in_a_task), Events()
    with no_threads_left():
        assert trained_with(box, heard)
    assert box.calls > 4
    assert any(end.__name__ in event.error for event in heard.of(events.TaskFailed))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mailbox": gm.MemoryMailbox}, "the class MemoryMailbox"),
        ({"callbacks": print}, "iterable of functions"),
        ({"callbacks": [None]}, "None is none"),
        ({"backend": "torch"}, "or a backend such as NumpyBackend"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused(changes: dict[str, Any], said: str) -> None:
    options: dict[str, Any] = {"algorithm": ALGORITHM, "mailbox": gm.MemoryMailbox(), **QUICK}
    options |= changes
    with no_threads_left(), pytest.raises(TypeError, match=said):
        gm.Session(net(), **options)


@pytest.mark.parametrize("name", ["poll_interval", "lease_every", "lease_timeout"])
def test_seconds_that_no_float_can_hold_are_refused(name: str) -> None:
    options: dict[str, Any] = QUICK | {name: 10**400}
    with no_threads_left(), pytest.raises(ValueError, match=f"^{name} must be a positive number"):
        gm.Session(net(), algorithm=ALGORITHM, mailbox=gm.MemoryMailbox(), **options)


def test_align_refuses_the_class_of_a_mailbox() -> None:
    box: Any = gm.MemoryMailbox
    with pytest.raises(TypeError, match="the class MemoryMailbox"):
        gm.align(net(), mailbox=box)


def test_samples_that_no_record_can_hold_are_refused_at_once() -> None:
    """They would make every later snapshot of the fragment unreadable."""
    model = net()
    with gm.Session(
        model, algorithm=ALGORITHM, mailbox=gm.MemoryMailbox(), callbacks=[], **QUICK
    ) as session:
        with pytest.raises(ValueError, match="samples must be a positive integer"):
            session.step(samples=sys.maxsize)
        assert run_until(session, model, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_run_begins_with_parameters_that_are_not_finite(value: float) -> None:
    """No delta of theirs could ever be published. Joining replaces them, and is fine."""
    sick, box = net(), gm.MemoryMailbox()
    with torch.no_grad():
        next(sick.parameters()).view(-1)[0] = value
    options: dict[str, Any] = {"algorithm": ALGORITHM, "mailbox": box, "callbacks": [], **QUICK}
    with no_threads_left(), pytest.raises(ValueError, match=r"0\.(weight|bias)"):
        gm.Session(sick, learner_id="sick", **options)
    assert asyncio.run(box.get("manifest.json")) is None
    gm.Session(net(), learner_id="sick", **options).close()
    with gm.Session(sick, **options):
        assert all(bool(parameter.isfinite().all()) for parameter in sick.parameters())


def test_samples_of_all_steps_together_fit_a_record() -> None:
    model, heard = net(), Events()
    with gm.Session(
        model, algorithm=ALGORITHM, mailbox=gm.MemoryMailbox(), callbacks=[heard], **QUICK
    ) as session:
        session.step(samples=2**40)
        assert run_until(session, model, 2)
    assert heard.of(events.SnapshotRejected) == []


def test_compression_without_its_extra_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that joins would otherwise fail to publish, again and again."""
    options: dict[str, Any] = {"algorithm": ALGORITHM, "mailbox": gm.MemoryMailbox(), **QUICK}
    with gm.Session(net(), callbacks=[], **options):
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(gm.MissingExtra, match=r"gradientmail\[zstd\]"):
            gm.Session(net(), compression="zstd", learner_id="b", **options)


FORKED = """
    import os, sys, time
    import torch
    import gradientmail as gm

    def tell(event):
        if os.getpid() != parent:
            print("CHILD", event, flush=True)

    parent = os.getpid()
    session = gm.Session(
        torch.nn.Linear(3, 3), algorithm=gm.DiLoCo(sync_every=2, fragments=1, in_flight=1),
        mailbox=gm.MemoryMailbox(), poll_interval=0.02, callbacks=[tell],
    )
    session.step(samples=1)
    child = os.fork()
    if child == 0:
        try:
            session.close()
        except RuntimeError as error:
            print("child", error, flush=True)
        try:
            with session:
                raise ValueError
        except ValueError:
            sys.exit(7)  # which runs what is registered for the exit
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    while session.rounds_seen < 2:
        session.step(samples=1)
        time.sleep(0.001)
    session.close()
    print("closed", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_its_parents_session_alone() -> None:
    program = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKED)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "cannot use or close its parent's session" in lines[0]
    assert lines[1:] == ["status 7", "closed"]


class Unspeakable(gm.MemoryMailbox):
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def test_a_mailbox_that_cannot_say_what_it_is_serves_as_well() -> None:
    heard = Events()
    with gm.Session(
        net(), algorithm=ALGORITHM, mailbox=Unspeakable(), callbacks=(heard,), **QUICK
    ) as session:
        session.step(samples=1)
    assert [event.mailbox for event in heard.of(gm.events.Joined)] == [""]
    assert no_threads_left()
