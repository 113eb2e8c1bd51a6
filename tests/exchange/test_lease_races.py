"""Processes with one learner id, stopped and woken between any two calls of their mailbox.

Each begins when the one before has begun. They renew, leave in order, sleep for as long as they
like, and lose calls and answers. Whatever the order, only who is older than another ends, and in
the end one is left: the newest, if it has not left.

One order in 36,000 of these still ended the newest: an older one that slept between deciding to
delete a beat of its own and doing so deletes the newest one's, of the same number.
"""

import asyncio
import random
from collections.abc import Awaitable, Buffer, Callable, Iterable, Sequence

import pytest

from gradientmail.exchange import layout
from gradientmail.exchange.lease import Lease
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.memory import MemoryMailbox

PROCESSES = 4
STEPS = 120
DRAIN = 8
"""Renewals of each in the end, after the last fault: who renews less often catches up slowly."""


class Lost(Exception):
    """A call, or its answer."""


async def insist(call: Callable[[], Awaitable[None]]) -> None:
    """Until neither the call nor its answer is lost."""
    while True:
        try:
            return await call()
        except Lost:
            continue


class Life:
    """One process: its lease, and a mailbox that waits before each call and each answer."""

    def __init__(self, store: Mailbox, number: int, draw: random.Random) -> None:
        self.store, self.number, self.draw = store, number, draw
        self.lease = Lease(self, "a", f"t{number}")
        self.faults = 0.0
        self.turn: asyncio.Future[None] | None = None
        self.acquired = self.ended = self.left = False
        self.renewals = 0

    async def _call[T](self, call: Callable[[], Awaitable[T]]) -> T:
        await self._wait()
        if self.draw.random() < self.faults:
            raise Lost
        answer = await call()
        if self.draw.random() < self.faults:
            raise Lost
        return answer

    async def _wait(self) -> None:
        self.turn = asyncio.get_running_loop().create_future()
        await self.turn

    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        return await self._call(lambda: self.store.put_if_absent(key, data))

    async def get(self, key: str, /) -> Buffer | None:
        return await self._call(lambda: self.store.get(key))

    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        return await self._call(lambda: self.store.list(prefix, after=after))

    async def delete(self, keys: Iterable[str], /) -> None:
        await self._call(lambda: self.store.delete(keys))

    async def live(self, leaves: bool) -> None:
        await insist(self.lease.acquire)
        self.acquired = True
        while not self.ended:
            await self._wait()
            try:
                self.ended = not await self.lease.renew()
                self.renewals += 1
            except Lost:
                continue
            if leaves and self.draw.random() < 0.2:
                break
        await insist(self.lease.release)
        self.left = True

    @property
    def done(self) -> bool:
        return self.ended or self.left


async def history(seed: int) -> tuple[list[Life], Sequence[str]]:
    """One history: what the processes came to, and what is in the store. Asserts who ends."""
    draw, store = random.Random(seed), MemoryMailbox()
    lives: list[Life] = []
    tasks: list[asyncio.Task[None]] = []
    leaves = [draw.random() < 0.5 for _ in range(PROCESSES)]
    faults = draw.choice([0.0, 0.05])

    async def let_run(life: Life) -> None:
        """Until its next wait."""
        turn, life.turn = life.turn, None
        if turn is not None:
            turn.set_result(None)
        for _ in range(4):
            await asyncio.sleep(0)
        if life.ended:
            assert life is not lives[-1], seed

    awake = -1
    for _ in range(STEPS):
        if len(lives) < PROCESSES and all(one.acquired for one in lives) and draw.random() < 0.15:
            lives.append(Life(store, len(lives), draw))
            lives[-1].faults = faults
            tasks.append(asyncio.create_task(lives[-1].live(leaves[len(lives) - 1])))
            await asyncio.sleep(0)
        if lives:
            if draw.random() < 0.3:
                awake = draw.randrange(len(lives))
            await let_run(lives[min(awake, len(lives) - 1)])
    for one in lives:
        one.faults = 0.0
    while lives and not lives[-1].acquired:
        await let_run(lives[-1])
    before = [one.renewals for one in lives]
    while waiting := [
        one
        for one, count in zip(lives, before, strict=True)
        if not one.done and one.renewals < count + DRAIN
    ]:
        await let_run(draw.choice(waiting))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return lives, await store.list("")


@pytest.mark.parametrize("first", range(0, 800, 100))
def test_the_newest_goes_on_and_all_others_end(first: int) -> None:
    for seed in range(first, first + 100):
        lives, left = asyncio.run(history(seed))
        going = [one for one in lives if not one.done]
        newest = lives[-1]
        assert not newest.ended, seed
        assert len(going) <= 1, seed
        if not newest.left:
            assert going == [newest], seed
            assert layout.beat_key("a", newest.lease.beat) in left, seed
        elif not going:
            assert left == (), seed
