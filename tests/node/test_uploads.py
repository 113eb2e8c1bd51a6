"""What goes on while a commit uploads, in virtual time: its other payloads, the next round."""

import asyncio
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import override

import pytest
from tests.node.worlds import World, train_until

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.clock import Flag
from gradientmail.exchange import layout
from gradientmail.exchange.layout import BlobKey
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.testing.virtual_time import run_virtual

PATIENCE = 100.0
"""Virtual seconds after which an upload no longer waits for what should go on meanwhile."""


class Patient(WrappedMailbox):
    """Each put of a commit's payload waits until what should go on meanwhile has begun."""

    def __init__(self, inner: Mailbox) -> None:
        super().__init__(inner)
        self.began: defaultdict[int, Flag] = defaultdict(Flag)
        """By round, set when it has."""
        self.in_time: dict[BlobKey, bool] = {}
        """By payload, whether its put was held no longer than until then."""

    @abstractmethod
    def look(self, operation: str, blob: BlobKey) -> None:
        """A call begins that puts or gets a payload."""

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        blob = layout.parse_blob_key(call.key)
        if blob is None:
            return await act()
        held = blob.kind == "round" and call.operation == "put_if_absent"
        if held:
            self.in_time[blob] = True
        self.look(call.operation, blob)
        if held:
            try:
                await asyncio.wait_for(self.began[blob.index].wait(), PATIENCE)
            except TimeoutError:
                self.in_time[blob] = False
        return await act()

    def all_in_time(self, rounds: int) -> bool:
        """Whether no upload of the first rounds was held longer."""
        print(sorted((blob.index, found) for blob, found in self.in_time.items()))
        return all(found for blob, found in self.in_time.items() if blob.index < rounds)

    def payloads(self, rounds: int) -> int:
        """How many the commits of the first rounds had."""
        return sum(blob.index < rounds for blob in self.in_time)


class AwaitsNextRound(Patient):
    """For a get of another learner's delta of the next round."""

    @override
    def look(self, operation: str, blob: BlobKey) -> None:
        if operation == "get" and blob.kind == "snapshot" and blob.learner == "other":
            self.began[blob.index - 1].set()


def test_the_next_rounds_snapshots_are_fetched_while_a_commit_uploads() -> None:
    """The upload ends only then: whoever fetched them afterwards would let it wait."""
    world = World(DiLoCo(sync_every=8, fragments=2, in_flight=2, quorum_size=2))

    async def main() -> AwaitsNextRound:
        closer, other = world.node("closer", wrap=AwaitsNextRound), world.node("other")
        await closer.join()
        training = asyncio.ensure_future(train_until(closer, lambda: world.archive.rounds() >= 6))
        await asyncio.sleep(1.5)  # it has the role
        await other.join()
        await asyncio.gather(training, train_until(other, training.done))
        await closer.kill()
        await other.kill()
        assert isinstance(closer.mailbox, AwaitsNextRound)
        return closer.mailbox

    mailbox = run_virtual(main)
    assert mailbox.all_in_time(5)
    assert mailbox.payloads(5) == 5 * 2


class AwaitsTheOthers(Patient):
    """For the puts of all payloads of the commit."""

    wanted = 0

    @override
    def look(self, operation: str, blob: BlobKey) -> None:
        if sum(one.index == blob.index for one in self.in_time) == self.wanted:
            self.began[blob.index].set()


@pytest.mark.parametrize(("commit_dtype", "payloads"), [(None, 2), ("F4", 3), ("BF16", 3)])
def test_the_payloads_of_a_commit_are_uploaded_together(
    commit_dtype: str | None, payloads: int
) -> None:
    """Theta, outer state and update: none ends before all have begun."""
    world = World(DiLoCo(sync_every=8, fragments=2, commit_dtype=commit_dtype))

    async def main() -> AwaitsTheOthers:
        node = world.node("alone", wrap=AwaitsTheOthers)
        assert isinstance(node.mailbox, AwaitsTheOthers)
        node.mailbox.wanted = payloads
        await node.join()
        await train_until(node, lambda: world.archive.rounds() >= 4)
        await node.kill()
        return node.mailbox

    mailbox = run_virtual(main)
    assert mailbox.all_in_time(4)
    assert mailbox.payloads(4) == 4 * payloads
