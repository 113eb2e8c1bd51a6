"""Children beside a live session: they neither hang nor inherit its threads' locks."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.session.models import QUICK, net, train_step
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gradientmail as gm
from gradientmail.buffers import HOST, BufferPool

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def in_a_child(work: Callable[[], object]) -> str:
    """Run ``work`` in a child made by fork; its end, ``hangs`` after a while."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    ends = time.monotonic() + 90
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return {0: "works", 1: "raises", 2: "is wrong"}[os.waitstatus_to_exitcode(status)]
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hangs"


def test_a_fork_waits_for_whoever_is_in_the_pool() -> None:
    """A thread is inside ``take`` when another one forks; the child takes from the same pool."""
    inside = threading.Event()

    def allocate(nbytes: int) -> memoryview:
        inside.set()
        time.sleep(0.2)
        return memoryview(bytearray(nbytes))

    pool = BufferPool(allocate=allocate)
    thread = threading.Thread(target=pool.take, args=(100,))
    thread.start()
    inside.wait(90)
    assert in_a_child(lambda: pool.take(200).nbytes == 200) == "works"
    thread.join(90)
    assert pool.take(300).nbytes == 300


def test_a_fork_waits_for_whoever_is_in_the_mailbox() -> None:
    box = gm.MemoryMailbox()
    box._lock.acquire()
    threading.Timer(0.2, box._lock.release).start()

    def put() -> bool:
        return asyncio.run(box.put_if_absent("x", b""))

    assert in_a_child(put) == "works"
    assert put()


def test_a_child_cannot_train_in_its_parents_session_but_in_its_own() -> None:
    box, model = gm.MemoryMailbox(), net()
    parent = gm.Session(
        model, algorithm=gm.DiLoCo(4, 2), mailbox=box, learner_id="a", callbacks=[], **QUICK
    )

    def step() -> bool:
        with pytest.raises(gm.SessionClosed, match="child made by fork"):
            parent.step(samples=1)
        with gm.Session(  # the store in memory is the child's own copy
            model, algorithm=gm.DiLoCo(4, 2), mailbox=box, learner_id="b", callbacks=[], **QUICK
        ) as own:
            own.step(samples=1)
        return gm.align(model, mailbox=box) == -1

    assert in_a_child(step) == "works"
    parent.step(samples=1)
    parent.close()
    assert asyncio.run(box.list("leases/")) == ()


class Shards(Dataset[torch.Tensor]):
    """Reads through a mailbox, and uses buffers of the package, in the worker."""

    def __init__(self, box: gm.Mailbox) -> None:
        self.box = box

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        assert len(HOST.take(2**17)) == 2**17
        asyncio.run(self.box.put_if_absent(f"seen/{index}-{time.monotonic_ns()}", b""))
        return torch.full((4,), float(index))


def test_workers_by_fork_beside_a_session_that_exchanges_at_every_step(tmp_path: Any) -> None:
    box, model = gm.FilesystemMailbox(tmp_path), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithm = gm.DiLoCo(sync_every=2, fragments=2)
    with gm.Session(model, algorithm=algorithm, mailbox=box, callbacks=[], **QUICK) as session:
        for _ in range(3):
            loader = DataLoader(Shards(box), batch_size=6, num_workers=2, timeout=100)
            for number, batch in enumerate(loader):
                assert batch[:, 0].tolist() == [float(number * 6 + i) for i in range(6)]
                train_step(model, optimizer, number)
                session.step(samples=6)
    assert len(asyncio.run(box.list("seen/"))) == 72
    assert session.rounds_seen >= 0


def test_workers_by_spawn_beside_a_session() -> None:
    model, box = net(), gm.MemoryMailbox()
    data = TensorDataset(torch.arange(8.0))
    with gm.Session(
        model, algorithm=gm.DiLoCo(2, 2), mailbox=box, callbacks=[], **QUICK
    ) as session:
        loader = DataLoader(
            data, batch_size=4, num_workers=1, multiprocessing_context="spawn", timeout=100
        )
        got: list[float] = []
        for (batch,) in loader:
            got += batch.tolist()
            session.step(samples=4)
    assert got == list(range(8))
