"""Calls that a store refuses: what was to be sent is let go at once, without the collector.

Training loops that turn it off would run out of memory, and views that it finds are not safe from
it: Python 3.12 may crash where it clears one that is still exported.
"""

import asyncio
import errno
import gc
import weakref
from collections.abc import Awaitable, Buffer, Callable, Iterator
from typing import override

import numpy as np
import pytest

import gradientmail as gm
from gradientmail import events
from gradientmail.buffers import HOST
from gradientmail.calls import uncancelled
from gradientmail.committing import all_ended
from gradientmail.mailbox.s3_transfers import side_by_side

REFUSALS = {
    "full": OSError(errno.ENOSPC, "no space left on device"),
    "ended": SystemExit("enough"),
}


class Refusing(gm.MemoryMailbox):
    """Refuses every fourth call for a payload of one kind, once it is told to."""

    def __init__(self, operation: str, error: BaseException) -> None:
        super().__init__()
        self.operation, self.error = operation, error
        self.calls, self.refusing = 0, False

    def _count(self, operation: str, key: str) -> None:
        if self.refusing and operation == self.operation and key.startswith("blobs/"):
            self.calls += 1
            if self.calls % 4 == 0:
                raise type(self.error)(*self.error.args)

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        self._count("put", key)
        return await super().put_if_absent(key, data)

    @override
    async def get(self, key: str, /) -> bytes | None:
        self._count("get", key)
        return await super().get(key)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def lent_after(sessions: list[gm.Session], models: list[list[np.ndarray]], rounds: int) -> int:
    """Train all until they saw so many rounds more; bytes that the pool has lent then, at least."""
    goal, least = sessions[0].rounds_seen + rounds, 2**62
    while sessions[0].rounds_seen < goal:
        for session, model in zip(sessions, models, strict=True):
            for array in model:
                np.add(array, 1e-3, out=array)
            session.step(samples=1)
        least = min(least, HOST._lent) if sessions[0].rounds_seen > goal - 4 else least
    return least


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("operation", "refusal"),
    [("put", "full"), ("get", "full"), ("put", "ended"), ("get", "ended")],
)
def test_refused_calls_hold_no_memory(operation: str, refusal: str) -> None:
    box, heard = Refusing(operation, REFUSALS[refusal]), list[events.Event]()
    models = [[np.zeros(300_000, np.float32) for _ in range(2)] for _ in range(2)]
    sessions = [
        gm.Session(
            {str(i): array for i, array in enumerate(model)},
            algorithm=gm.DiLoCo(sync_every=4, fragments=2, overlap_steps=2),
            mailbox=box,
            learner_id=f"n{number}",
            poll_interval=0.005,
            callbacks=(heard.append,),
        )
        for number, model in enumerate(models)
    ]
    before = lent_after(sessions, models, 20)
    box.refusing = True
    after = lent_after(sessions, models, 32)
    box.refusing = False
    assert box.calls >= 32
    # Both hold what a round needs: of each refused one two payloads and more would be left.
    print(f"{before} bytes are lent, {after} after refusals")
    assert after <= before + 6 * 1_200_000
    for session in sessions:
        session.close()


class Refused(Exception):
    """Unlike those of the interpreter one that can be referred to weakly."""


async def fails() -> None:
    await asyncio.sleep(0)
    raise Refused


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "call",
    [
        lambda: asyncio.create_task(uncancelled(fails())),
        lambda: all_ended([fails(), fails()]),
        lambda: side_by_side(iter([fails()]), 2),
    ],
    ids=["uncancelled", "all_ended", "side_by_side"],
)
def test_an_error_does_not_hold_itself(call: Callable[[], Awaitable[object]]) -> None:
    """By way of the frames in its traceback, and with them whatever was to be sent."""

    async def main() -> None:
        found: list[weakref.ref[Refused]] = []
        try:
            await call()
        except Refused as error:
            found.append(weakref.ref(error))
        await asyncio.sleep(0.01)
        assert [one() for one in found] == [None]

    asyncio.run(main())
