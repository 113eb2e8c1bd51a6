"""One store in memory and many nodes, each with a connection of its own, under virtual time.

Times are the running event loop's (``gradientmail.testing.virtual_time``). Everything random comes
from the store's seed and the order in which the views were made, so a world repeats itself.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import override

from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.testing.faults import received_bytes
from gradientmail.testing.virtual_time import passing


@dataclass(frozen=True, slots=True)
class Connection:
    """How a node reaches the store."""

    latency_seconds: float = 0.0
    """One way."""
    jitter_seconds: float = 0.0
    """Up to so much is added to every way, drawn uniformly."""
    bytes_per_second: float = math.inf
    """Of an object on its way; calls do not slow each other down."""
    failures: float = 0.0
    """The part of the calls that fail, half of them after the store has acted."""
    timeout_seconds: float = 5.0
    """What a call takes to fail when the connection is cut."""


class SimulatedMailbox(WrappedMailbox):
    """One node's view of the store. All its attributes may be changed at any time."""

    def __init__(self, inner: Mailbox, connection: Connection, random: Random) -> None:
        """``SimulatedStore.view`` makes these."""
        super().__init__(inner)
        self.connection = connection
        self.connected = True
        """False is a partition: what is sent is lost, and what comes back, too."""
        self._random = random
        self._running = asyncio.Event()
        self.resume()

    def pause(self) -> None:
        """Stop every call of this node where it is."""
        self._paused = True
        self._running.clear()

    def resume(self) -> None:
        """Let them go on."""
        self._paused = False
        self._running.set()

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """Send, act, bring the answer; one of the three may fail."""
        draw = self._random.random() / max(self.connection.failures, 1e-300)
        await self._way(call.sent)
        if draw < 0.5 or self._paused or not self.connected:
            await self._hinder(call, lost=draw < 0.5)
        result = await act()
        await self._way(received_bytes(call, result))
        if draw < 1 or self._paused or not self.connected:
            await self._hinder(call, lost=draw < 1)
        return result

    def _way(self, nbytes: int) -> Awaitable[None]:
        """To the store or back. A world takes more of these than of all else: no task, no frame."""
        link = self.connection
        jitter = link.jitter_seconds * self._random.random()
        return passing(link.latency_seconds + jitter + nbytes / link.bytes_per_second)

    async def _hinder(self, call: Call, *, lost: bool) -> None:
        """Wait while this node is stopped; fail when it is cut off, or the message ``lost``."""
        await self._running.wait()
        if not self.connected:
            await asyncio.sleep(self.connection.timeout_seconds)
        elif not lost:
            return
        raise MailboxUnavailable(f"simulated: {call.operation} {call.key!r} got no answer")


class SimulatedStore:
    """A store that many nodes see, each through a view of its own."""

    def __init__(self, *, seed: int) -> None:
        """Make an empty store."""
        self.mailbox = MemoryMailbox()
        """The store itself, at once and without faults, to look into."""
        self.views: list[SimulatedMailbox] = []
        """Every view, in the order in which they were made."""
        self._seed = seed

    def view(self, connection: Connection | None = None) -> SimulatedMailbox:
        """Connect another node."""
        random = Random(f"{self._seed}/{len(self.views)}")
        view = SimulatedMailbox(self.mailbox, connection or Connection(), random)
        self.views.append(view)
        return view
