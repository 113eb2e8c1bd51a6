"""Mailboxes that fail, hang, are slow, are cut off or count, around any other mailbox.

They are wrappers and can be stacked. Each is for one event loop at a time.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Buffer, Callable
from random import Random
from typing import Literal, override

from gradientmail.clock import Clock
from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call, Operation, WrappedMailbox

type Strike = Literal["before", "after"]
"""Whether the store has acted when the call fails."""

type Decide = Callable[[Operation, str], Strike | None]
"""Whether, and how, a call fails, by its operation and its (first) key or prefix."""


class FaultyMailbox(WrappedMailbox):
    """Fails the calls that ``decide`` names, with ``MailboxUnavailable``.

    ``"before"``: the store never hears of the call. ``"after"``: it acts and the answer is lost,
    which is what makes a put ambiguous.
    """

    def __init__(self, inner: Mailbox, decide: Decide) -> None:
        """``decide`` is asked once a call, before it acts."""
        super().__init__(inner)
        self.decide = decide

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """Act, or do not, and raise."""
        strike = self.decide(call.operation, call.key)
        if strike != "before":
            result = await act()
            if strike is None:
                return result
        raise MailboxUnavailable(f"injected: {call.operation} {call.key!r} failed {strike} acting")


def fail_nth(number: int, strike: Strike, *operations: Operation) -> Decide:
    """Fail only the ``number``-th call, from 1, of ``operations`` (of all when none is named)."""
    seen = 0

    def decide(operation: Operation, key: str) -> Strike | None:
        nonlocal seen
        del key
        if operations and operation not in operations:
            return None
        seen += 1
        return strike if seen == number else None

    return decide


def fail_randomly(random: Random, probability: float) -> Decide:
    """Fail each call with ``probability``, half of these before and half after the store acts."""

    def decide(operation: Operation, key: str) -> Strike | None:
        del operation, key
        draw = random.random()
        if draw >= probability:
            return None
        return "before" if 2 * draw < probability else "after"

    return decide


class PartitionedMailbox(WrappedMailbox):
    """Fails every call while ``connected`` is False; also one whose answer comes back then."""

    def __init__(self, inner: Mailbox, *, connected: bool = True) -> None:
        """Start ``connected`` or not."""
        super().__init__(inner)
        self.connected = connected

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """Act if connected; raise if not, before or after."""
        if self.connected:
            result = await act()
            if self.connected:
                return result
        raise MailboxUnavailable(f"injected: no connection for {call.operation} {call.key!r}")


class HangingMailbox(WrappedMailbox):
    """Between ``hang()`` and ``release()`` calls neither act nor fail."""

    def __init__(self, inner: Mailbox) -> None:
        """Start released."""
        super().__init__(inner)
        self._released = asyncio.Event()
        self._released.set()

    def hang(self) -> None:
        """Hold every call that begins from now on."""
        self._released.clear()

    def release(self) -> None:
        """Let all calls go on."""
        self._released.set()

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """Wait, then act."""
        await self._released.wait()
        return await act()


class SlowMailbox(WrappedMailbox):
    """Takes ``seconds`` on ``clock`` to reach the store, and as long to bring its answer."""

    def __init__(self, inner: Mailbox, *, clock: Clock, seconds: float) -> None:
        """``seconds`` is one way, and may be changed at any time."""
        super().__init__(inner)
        self.seconds = seconds
        self._clock = clock

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """Sleep, act, sleep."""
        await self._clock.sleep(self.seconds)
        result = await act()
        await self._clock.sleep(self.seconds)
        return result


class CountingMailbox(WrappedMailbox):
    """Counts calls by operation, and the bytes of objects."""

    def __init__(self, inner: Mailbox) -> None:
        """Start at zero."""
        super().__init__(inner)
        self.calls: Counter[Operation] = Counter()
        """Calls begun, by operation."""
        self.sent_bytes = 0
        """Bytes passed to ``put_if_absent``, whatever it answered."""
        self.received_bytes = 0
        """Bytes that ``get`` returned."""

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """Count and act."""
        self.calls[call.operation] += 1
        self.sent_bytes += call.sent
        result = await act()
        self.received_bytes += received_bytes(call, result)
        return result


def received_bytes(call: Call, result: object) -> int:
    """The size of the object that ``call`` returned, 0 when it was not a ``get`` of one."""
    if call.operation != "get" or not isinstance(result, Buffer):
        return 0
    with memoryview(result) as view:
        return view.nbytes
