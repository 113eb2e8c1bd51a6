"""Nodes that wait for each other: counting, late ones, faults, races, processes."""

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.patterns.waiting import keys, no_threads_left, started, until

import gradientmail as gm
from gradientmail import events
from gradientmail.clock import Clock
from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox.retrying import RetryingMailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.patterns.barrier import Barrier, Meeting
from gradientmail.testing.faults import FaultyMailbox, fail_nth
from gradientmail.testing.simulated import Connection, SimulatedStore
from gradientmail.testing.virtual_time import VirtualClock, run_virtual


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    with no_threads_left():
        yield


def barrier(box: gm.Mailbox, learner: str) -> Barrier:
    return Barrier(mailbox=box, learner_id=learner, poll_interval=0.01)


def test_all_pass_when_all_have_come() -> None:
    box = gm.MemoryMailbox()
    waits = [started(lambda i=i: barrier(box, f"n{i}").wait("warm", parties=3)) for i in range(2)]
    until(lambda: len(keys(box)) == 2)
    assert not any(wait.done() for wait in waits)
    assert barrier(box, "n2").wait("warm", parties=3) == {"n0", "n1", "n2"}
    assert [wait.result(90) for wait in waits] == [{"n0", "n1", "n2"}] * 2
    assert keys(box) == ["barriers/warm/n0", "barriers/warm/n1", "barriers/warm/n2"]
    assert asyncio.run(box.get("barriers/warm/n0")) == b""


def test_coming_again_counts_once_and_who_is_late_passes_at_once() -> None:
    box = gm.MemoryMailbox()
    assert barrier(box, "a").wait("x", parties=1) == {"a"}
    for _ in range(2):  # the second as after a restart: another object of the same id
        with pytest.raises(TimeoutError, match=r"'x': 1 of 2 learners had arrived \(a\)"):
            barrier(box, "a").wait("x", parties=2, timeout=0.03)
    assert barrier(box, "b").wait("x", parties=2, timeout=0) == {"a", "b"}
    assert barrier(box, "late").wait("x", parties=2, timeout=0) == {"a", "b", "late"}
    assert barrier(box, "a").wait("y", parties=1) == {"a"}  # another name starts anew


def test_an_arrival_stays_after_a_timeout() -> None:
    box = gm.MemoryMailbox()
    with pytest.raises(TimeoutError, match="arrival stays"):
        barrier(box, "a").wait("x", parties=2, timeout=0.01)
    assert keys(box) == ["barriers/x/a"]
    assert barrier(box, "b").wait("x", parties=2, timeout=0) == {"a", "b"}


def test_what_does_not_belong_is_not_counted() -> None:
    box = gm.MemoryMailbox()
    for junk in ("NOT-AN-ID", ".DS_Store", "b/c", "notes.txt"):
        asyncio.run(box.put_if_absent(f"barriers/x/{junk}", b""))
    asyncio.run(box.put_if_absent("barriers/xx/b", b""))
    with pytest.raises(TimeoutError, match=r"1 of 2 learners had arrived \(a\)"):
        barrier(box, "a").wait("x", parties=2, timeout=0.01)


@pytest.mark.parametrize("name", ["", "a/b", "/", "a\nb", "a\x00", "\x85", ".", "..", "x" * 1100])
def test_a_bad_name_is_refused(name: str) -> None:
    box = gm.MemoryMailbox()
    with pytest.raises(ValueError, match=r"barrier name|key"):
        barrier(box, "a").wait(name, parties=1)
    assert keys(box) == []


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"parties": 0}, ValueError, "parties must be 1 or more, not 0"),
        ({"parties": -3}, ValueError, "parties"),
        ({"parties": 1.0}, TypeError, "parties"),
        ({"parties": True}, TypeError, "parties"),
        ({"name": 3}, TypeError, "barrier name"),
        ({"timeout": -1}, ValueError, "timeout"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
        ({"timeout": "1"}, TypeError, "timeout"),
        ({"learner_id": "Not An Id"}, ValueError, "Not An Id"),
        ({"poll_interval": 0}, ValueError, "poll_interval"),
        ({"mailbox": "runs/x"}, TypeError, r"open_mailbox\('runs/x'\)"),
    ],
)
def test_a_bad_argument_is_named(changes: dict[str, Any], kind: type[Exception], said: str) -> None:
    given: dict[str, Any] = {"mailbox": gm.MemoryMailbox(), "learner_id": "a", "name": "x"}
    given |= {"parties": 1} | changes
    own = {key: given[key] for key in ("mailbox", "learner_id", "poll_interval") if key in given}
    waits = {key: given[key] for key in ("parties", "timeout") if key in given}
    with pytest.raises(kind, match=said):
        Barrier(**own).wait(given["name"], **waits)


@pytest.mark.parametrize(
    "timeout", [None, float("inf"), 1e300, pytest.param(10**400, id="10**400"), 60]
)
def test_timeouts_may_be_long(timeout: float | None) -> None:
    assert barrier(gm.MemoryMailbox(), "a").wait("x", parties=1, timeout=timeout) == {"a"}


# Faults


@pytest.mark.parametrize("strike", ["before", "after"])
@pytest.mark.parametrize("operation", ["put_if_absent", "list"])
def test_a_failure_for_now_is_repeated(strike: Any, operation: Any) -> None:
    async def main() -> bool:
        inner, clock = gm.MemoryMailbox(), VirtualClock()
        faulty = FaultyMailbox(inner, fail_nth(1, strike, operation))
        box = RetryingMailbox(faulty, clock=clock, random=Random(1))
        done = await Meeting(box, clock, "x", "a", 1, 1.0).complete(60.0)
        return done and await inner.list("") == ("barriers/x/a",)

    assert run_virtual(main, limit_seconds=60)


class Saying(WrappedMailbox):
    """Raises ``error`` from every call, while it has one."""

    def __init__(self, inner: gm.Mailbox, error: Exception | None) -> None:
        super().__init__(inner)
        self.error = error
        self.calls = 0

    async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return await act()


def test_a_store_that_is_away_is_waited_for_and_told(caplog: pytest.LogCaptureFixture) -> None:
    box = Saying(gm.MemoryMailbox(), MailboxUnavailable("the link is down"))
    with pytest.raises(TimeoutError, match=r"0 of 1 .* may not have been written.*link is down"):
        barrier(box, "a").wait("x", parties=1, timeout=0)
    assert any("the link is down" in record.getMessage() for record in caplog.records)
    waiting = started(lambda: barrier(box, "a").wait("x", parties=1))
    before = box.calls
    until(lambda: box.calls > before + 1)
    box.error = None
    assert waiting.result(90) == {"a"}


@pytest.mark.parametrize("error", [PermissionError("not yours"), TimeoutError("its own")])
def test_what_repeating_does_not_mend_is_raised_as_it_is(error: Exception) -> None:
    box = Saying(gm.MemoryMailbox(), error)
    with pytest.raises(type(error), match=str(error)):
        barrier(box, "a").wait("x", parties=1, timeout=600)


def test_a_store_that_does_not_answer_does_not_outlast_the_timeout() -> None:
    class Hangs(WrappedMailbox):
        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="0 of 1 learners"):
        barrier(Hangs(gm.MemoryMailbox()), "a").wait("x", parties=1, timeout=0.05)


# Races


@pytest.mark.parametrize("seed", range(10))
def test_many_nodes_over_bad_links_under_virtual_time(seed: int) -> None:
    """Nobody passes before enough have come, all pass in the end, each counted once."""
    print("seed", seed)
    random = Random(seed)
    parties, nodes = 12, 20
    store = SimulatedStore(seed=seed)
    arrived: list[tuple[str, float]] = []

    class Noting(WrappedMailbox):
        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            done = await act()
            if done is True:
                arrived.append((call.key, asyncio.get_running_loop().time()))
            return done

    store.mailbox = Noting(store.mailbox)  # type: ignore[assignment]

    async def life(number: int, clock: Clock) -> tuple[float, frozenset[str]]:
        link = Connection(latency_seconds=0.05, jitter_seconds=0.5, failures=0.3)
        learner = f"n{number % 15}"  # five come twice, as after a restart
        box = RetryingMailbox(store.view(link), clock=clock, random=random)
        await clock.sleep(random.uniform(0, 40))
        meeting = Meeting(box, clock, "x", learner, parties, 1.0)
        assert await meeting.complete(10_000.0)
        return asyncio.get_running_loop().time(), meeting.arrived

    async def main() -> list[tuple[float, frozenset[str]]]:
        return await asyncio.gather(*(life(i, VirtualClock()) for i in range(nodes)))

    passed = run_virtual(main, limit_seconds=1000)
    assert len({key for key, _ in arrived}) == len(arrived) == 15
    enough_at = arrived[parties - 1][1]
    assert all(at > enough_at and len(ids) >= parties for at, ids in passed)


def test_a_timeout_is_on_the_clock_and_the_last_look_is_at_its_end() -> None:
    async def main() -> tuple[bool, bool, float]:
        box, clock = gm.MemoryMailbox(), VirtualClock()
        first = await Meeting(box, clock, "x", "a", 2, 7.0).complete(10.0)
        ended = clock.now()

        async def come() -> None:
            await clock.sleep(9.0)
            await Meeting(box, clock, "x", "b", 2, 7.0).complete(0.0)

        other = asyncio.ensure_future(come())
        second = await Meeting(box, clock, "x", "a", 2, 7.0).complete(10.0)
        await other
        return first, second, ended

    assert run_virtual(main) == (False, True, 10.0)


def test_inside_a_running_loop() -> None:
    async def cell() -> frozenset[str]:
        return barrier(gm.MemoryMailbox(), "a").wait("x", parties=1)

    assert asyncio.run(cell()) == {"a"}


def test_a_sessions_lease_is_renewed_while_its_node_waits() -> None:
    import torch

    box = gm.MemoryMailbox()
    beats: list[int] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.LeaseRenewed):
            beats.append(event.beat)

    with gm.Session(
        torch.nn.Linear(2, 2),
        algorithm=gm.DiLoCo(4, 1, in_flight=1),
        mailbox=box,
        learner_id="a",
        poll_interval=0.02,
        lease_every=0.02,
        callbacks=[note],
    ):
        waiting = started(lambda: barrier(box, "a").wait("x", parties=2))
        until(lambda: keys(box, "barriers/"))
        before = len(beats)
        until(lambda: len(beats) > before + 3)
        barrier(box, "b").wait("x", parties=2)
        assert waiting.result(90) == {"a", "b"}


PROGRAM = textwrap.dedent(
    """
    import sys
    import gradientmail as gm
    from gradientmail.patterns.barrier import Barrier

    folder, learner, parties = sys.argv[1:]
    here = Barrier(mailbox=gm.FilesystemMailbox(folder), learner_id=learner, poll_interval=0.02)
    print(*sorted(here.wait("start", parties=int(parties))))
    """
)


def test_processes_over_a_folder_one_killed_and_started_again(tmp_path: Path) -> None:
    def start(learner: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path), learner, "4"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    box = gm.FilesystemMailbox(tmp_path)
    nodes = {name: start(name) for name in ("a", "b", "c")}
    try:
        until(lambda: len(keys(box, "barriers/start/")) == 3)
        nodes["b"].kill()
        nodes["b"].communicate(timeout=90)
        nodes["b"] = start("b")
        nodes["d"] = start("d")
        said = {name: node.communicate(timeout=100)[0] for name, node in nodes.items()}
    finally:
        for node in nodes.values():
            node.kill()
            node.wait()
    assert said == dict.fromkeys("abcd", "a b c d\n")
