"""Units that each go to one node: order, races, lost answers, failures, closing."""

import asyncio
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.patterns.waiting import keys, no_threads_left, started, threads, until

import gradientmail as gm
from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox.retrying import RetryingMailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.patterns.shared_queue import SharedQueue, claim_unit, shared_queue
from gradientmail.testing.faults import FaultyMailbox, fail_nth
from gradientmail.testing.simulated import Connection, SimulatedStore
from gradientmail.testing.virtual_time import VirtualClock, run_virtual


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    with no_threads_left():
        yield


def same[T](value: T) -> T:
    return value


def sharing(box: gm.Mailbox, learner: str = "a", count: int = 5, **changes: Any) -> Any:
    """A queue of units ``u0``, ``u1``, … of the values 0, 1, … in this order."""
    units = {f"u{i}": i for i in range(count)}
    given: dict[str, Any] = {"units": units, "load": same, **changes}
    return shared_queue(given.pop("units"), mailbox=box, learner_id=learner, **given)


def holder(box: gm.Mailbox, unit: str) -> str:
    return bytes(asyncio.run(box.get(f"units/{unit}")) or b"").decode()


def test_one_node_gets_all_in_the_order_of_the_mapping() -> None:
    box, loaded_on = gm.MemoryMailbox(), set[str]()

    def load(path: str) -> str:
        loaded_on.add(threading.current_thread().name)
        return path.upper()

    units = {"c": "z.bin", "a": "y.bin", "é b": "x.bin"}
    with shared_queue(units, mailbox=box, learner_id="n-1", load=load) as items:
        assert list(items) == ["Z.BIN", "Y.BIN", "X.BIN"]
        assert list(items) == []
    assert keys(box) == ["units/a", "units/c", "units/é b"]
    assert holder(box, "c") == "n-1"
    assert threading.current_thread().name not in loaded_on
    assert len(loaded_on) == 1


def test_each_unit_goes_to_one_of_many_nodes() -> None:
    box = gm.MemoryMailbox()

    def life(number: int) -> list[int]:
        with sharing(box, f"n{number}", 150, prefetch=3) as items:
            return list(items)

    lives = [started(lambda i=i: life(i)) for i in range(6)]
    got = [life.result(90) for life in lives]
    assert sorted(unit for units in got for unit in units) == list(range(150))
    assert all(units == sorted(units) for units in got)
    assert all(holder(box, f"u{unit}") == f"n{i}" for i, units in enumerate(got) for unit in units)


@pytest.mark.parametrize("seed", range(10))
def test_one_winner_of_each_unit_over_bad_links_under_virtual_time(seed: int) -> None:
    """Whatever answers are lost: the claim that is there is the one that its node knows of."""
    print("seed", seed)
    store = SimulatedStore(seed=seed)

    async def life(number: int) -> list[str]:
        link = Connection(latency_seconds=0.01, jitter_seconds=0.3, failures=0.4)
        clock = VirtualClock()
        box = RetryingMailbox(store.view(link), clock=clock, random=Random(number))
        return [f"u{i}" for i in range(30) if await claim_unit(box, clock, f"u{i}", f"n{number}")]

    async def main() -> list[list[str]]:
        return await asyncio.gather(*(life(i) for i in range(8)))

    got = run_virtual(main)
    assert Counter(unit for units in got for unit in units) == Counter(f"u{i}" for i in range(30))
    assert all(
        holder(store.mailbox, unit) == f"n{i}" for i, units in enumerate(got) for unit in units
    )
    assert sum(map(bool, got)) > 1


@pytest.mark.parametrize("strike", ["before", "after"])
@pytest.mark.parametrize("operation", ["put_if_absent", "get"])
@pytest.mark.parametrize("taken", [False, True])
def test_a_lost_answer_loses_no_unit(strike: Any, operation: Any, taken: bool) -> None:
    async def main() -> bool:
        inner, clock = gm.MemoryMailbox(), VirtualClock()
        if taken:
            await inner.put_if_absent("units/u", b"other")
        faulty = FaultyMailbox(inner, fail_nth(1, strike, operation))
        box = RetryingMailbox(faulty, clock=clock, random=Random(1))
        return await claim_unit(box, clock, "u", "a")

    assert run_virtual(main) is not taken


def test_a_claim_that_was_deleted_in_between_is_made_again() -> None:
    class Forgets(WrappedMailbox):
        forget = True

        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            if call.operation == "get" and self.forget:
                self.forget = False
                await self.inner.delete([call.key])
            return await act()

    async def main() -> bool:
        box = Forgets(gm.MemoryMailbox())
        return await claim_unit(box, VirtualClock(), "u", "a") and not box.forget

    assert run_virtual(main)


def test_a_restarted_node_gets_its_own_units_again_and_no_others() -> None:
    box = gm.MemoryMailbox()
    with sharing(box, "a", 3) as items:
        assert list(items) == [0, 1, 2]
    with sharing(box, "b", 5) as items:
        assert list(items) == [3, 4]
    with sharing(box, "a", 6) as items:
        assert list(items) == [0, 1, 2, 5]


# How far ahead


@pytest.mark.parametrize("prefetch", [1, 3])
def test_so_many_units_are_claimed_ahead_and_no_more(prefetch: int) -> None:
    box, loading, most = gm.MemoryMailbox(), 0, 0

    def load(value: int) -> int:
        nonlocal loading, most
        loading += 1
        most = max(most, loading)
        threading.Event().wait(0.005)
        loading -= 1
        return value

    with sharing(box, "a", 20, load=load, prefetch=prefetch) as items:
        for taken in range(5):
            until(lambda n=taken: len(keys(box)) == n + prefetch)
            threading.Event().wait(0.03)
            assert len(keys(box)) == taken + prefetch
            assert next(items) == taken
    assert most == 1


# Failures


def test_a_loaders_failure_comes_after_the_items_before_it_and_again() -> None:
    def load(value: int) -> int:
        if value == 2:
            raise OSError("shard 2 cannot be read")
        return value

    box = gm.MemoryMailbox()
    with sharing(box, load=load) as items:
        until(lambda: len(keys(box)) == 3)
        got: list[int] = []
        with pytest.raises(OSError, match="shard 2"):  # noqa: PT012 - what came before counts
            for item in items:
                got.append(item)  # noqa: PERF402 - extend would lose them
        assert got == [0, 1]
        with pytest.raises(OSError, match="shard 2"):
            next(items)
    assert len(keys(box)) == 3


@pytest.mark.parametrize(
    ("error", "seen"), [(StopIteration(), RuntimeError), (SystemExit(3), SystemExit)]
)
def test_a_loader_cannot_end_the_queue_as_if_it_were_exhausted(
    error: BaseException, seen: type[BaseException]
) -> None:
    def load(value: int) -> int:
        raise error

    with sharing(gm.MemoryMailbox(), load=load) as items, pytest.raises(seen):
        list(items)


class Scripted(WrappedMailbox):
    """Raises ``error`` from the third put on."""

    def __init__(self, inner: gm.Mailbox, error: Exception) -> None:
        super().__init__(inner)
        self.error: Exception | None = error
        self.puts = 0

    async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
        if call.operation == "put_if_absent":
            self.puts += 1
            if self.puts >= 3 and self.error is not None:
                raise self.error
        return await act()


def test_a_stores_failure_comes_after_the_items_before_it() -> None:
    box = Scripted(gm.MemoryMailbox(), PermissionError("not yours"))
    with sharing(box) as items:
        until(lambda: box.puts >= 3)
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(PermissionError, match="not yours"):
            next(items)


def test_a_store_that_is_away_is_waited_for() -> None:
    box = Scripted(gm.MemoryMailbox(), MailboxUnavailable("the link is down"))
    with sharing(box) as items:
        rest = started(lambda: list(items))
        until(lambda: box.puts > 3)
        box.error = None
        assert rest.result(90) == [0, 1, 2, 3, 4]


# Closing


class Boom(Exception):
    """What the body of a queue raises."""


@pytest.mark.parametrize("error", [None, Boom()])
def test_leaving_in_the_middle_ends_the_threads(error: Exception | None) -> None:
    box, raised = gm.MemoryMailbox(), None
    queue = sharing(box, count=1000, prefetch=2)
    try:
        with queue as items:
            assert next(items) == 0
            if error:
                raise error
    except Boom as caught:
        raised = caught
    assert raised is error
    until(lambda: not threads())
    claimed = len(keys(box))
    assert claimed <= 3
    with pytest.raises(RuntimeError, match="closed"):
        next(queue)
    threading.Event().wait(0.05)
    assert len(keys(box)) == claimed


@pytest.mark.parametrize("operation", ["put_if_absent", "get"])
def test_a_store_that_does_not_answer_holds_nobody_up(operation: str) -> None:
    class Hangs(WrappedMailbox):
        reached = False

        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            if call.operation == operation:
                self.reached = True
                await asyncio.Event().wait()
            return await act()

    box = Hangs(gm.MemoryMailbox())
    with sharing(box) as items:
        waiting = started(lambda: next(items))
        until(lambda: box.reached)
    with pytest.raises(RuntimeError, match="closed"):
        waiting.result(90)
    until(lambda: not threads())


def test_a_loader_under_way_is_waited_for_and_its_item_dropped() -> None:
    go, loading = threading.Event(), threading.Event()

    def load(value: int) -> int:
        loading.set()
        go.wait(90)
        return value

    box = gm.MemoryMailbox()
    with sharing(box, load=load):
        loading.wait(90)
        threading.Timer(0.1, go.set).start()
    until(lambda: not threads())
    assert len(keys(box)) == 1


def test_closing_races_with_claiming() -> None:
    """At whatever moment it comes, nothing hangs and no coroutine is left behind."""
    for turn in range(60):
        with sharing(gm.MemoryMailbox(), count=400, prefetch=400):
            threading.Event().wait(turn * 2e-4)
        until(lambda: not threads())


# Use


def test_it_is_read_inside_its_block_and_serves_once() -> None:
    queue = sharing(gm.MemoryMailbox())
    with pytest.raises(RuntimeError, match="inside its with block"):
        next(queue)
    with queue as items:
        assert isinstance(items, SharedQueue)
        assert list(items) == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="one with block"), queue:
        pass
    with pytest.raises(TypeError, match="another learner_id"):
        pickle.dumps(queue)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"prefetch": 0}, ValueError, "prefetch must be 1 or more"),
        ({"prefetch": 2.0}, TypeError, "prefetch"),
        ({"units": ["a"]}, TypeError, "units must be a mapping"),
        ({"units": {"a/b": 1}}, ValueError, "unit id 'a/b'"),
        ({"units": {"": 1}}, ValueError, "unit id"),
        ({"units": {3: 1}}, TypeError, "unit id 3"),
        ({"load": None}, TypeError, "load"),
        ({"learner": "Not An Id"}, ValueError, "Not An Id"),
        ({"box": Path("x")}, TypeError, "open_mailbox"),
    ],
)
def test_a_bad_argument_is_named(changes: dict[str, Any], kind: type[Exception], said: str) -> None:
    box = gm.MemoryMailbox()
    given: dict[str, Any] = {"box": box, **changes}
    with pytest.raises(kind, match=said):
        sharing(**given)
    assert keys(box) == []


def test_no_units_are_no_error() -> None:
    with sharing(gm.MemoryMailbox(), count=0) as items:
        assert list(items) == []


def test_inside_a_running_loop_with_a_loader_that_runs_one() -> None:
    async def ask(value: int) -> int:
        await asyncio.sleep(0)
        return value

    def load(value: int) -> int:
        return asyncio.run(ask(value))

    async def cell() -> list[int]:
        with sharing(gm.MemoryMailbox(), load=load) as items:
            return list(items)

    assert asyncio.run(cell()) == [0, 1, 2, 3, 4]


FORKED = textwrap.dedent(
    """
    import os, gradientmail as gm
    from gradientmail.patterns.shared_queue import shared_queue

    units = dict.fromkeys("abc")
    with shared_queue(
        units, mailbox=gm.MemoryMailbox(), learner_id="a", load=print, prefetch=1
    ) as items:
        child = os.fork()
        if not child:
            try:
                next(items)
            except RuntimeError as error:
                print(error, flush=True)
        else:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(list(items)))
    """
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_and_ends() -> None:
    program = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(program, capture_output=True, text=True, timeout=110, check=True)
    assert "child made by fork" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 3"


PROGRAM = textwrap.dedent(
    """
    import sys, time
    import gradientmail as gm
    from gradientmail.patterns.shared_queue import shared_queue

    folder, learner, pause = sys.argv[1:]
    units = {f"u{i:02}": i for i in range(40)}
    with shared_queue(
        units, mailbox=gm.FilesystemMailbox(folder), learner_id=learner, load=str, prefetch=2
    ) as items:
        for item in items:
            print(item, flush=True)
            time.sleep(float(pause))
    """
)


def test_processes_over_a_folder_one_killed_and_started_again(tmp_path: Path) -> None:
    """Each unit is done by one learner id; by the killed one perhaps twice."""

    def start(learner: str, pause: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path), learner, str(pause)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    box = gm.FilesystemMailbox(tmp_path)
    nodes = [start("killed", 60.0)]
    try:
        until(lambda: len(keys(box, "units/")) == 3)
        nodes[0].kill()
        before = nodes[0].communicate(timeout=100)[0].split()
        nodes = [start("killed", 0.01), start("b", 0.01), start("c", 0.01)]
        got = [node.communicate(timeout=110)[0].split() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert sorted(item for items in got for item in items) == sorted(map(str, range(40)))
    assert before in ([], ["0"])
    assert got[0][:3] == ["0", "1", "2"]


def test_a_claim_far_too_large_is_another_s_and_never_read(tmp_path: Path) -> None:
    (tmp_path / "units").mkdir()
    with (tmp_path / "units" / "u1").open("wb") as file:
        os.truncate(file.fileno(), 2**42)  # sparse: reading it would take all memory
    box = gm.FilesystemMailbox(tmp_path)
    with sharing(box, count=3) as items:
        assert list(items) == [0, 2]
