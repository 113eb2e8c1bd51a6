"""No payload is copied on its way: by addresses, from the model's snapshot to the next model.

What was freed may lie again where something else does, so all that is compared is kept.
"""

import asyncio
from collections.abc import Awaitable, Buffer, Callable, Coroutine, Mapping
from typing import Any, override

import numpy as np
import pytest
import torch
from tests.node.worlds import World, train_until

from gradientmail import courier
from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.merge import Fold
from gradientmail.algorithm.outer import OuterStep, Transition
from gradientmail.backend.base import Backend
from gradientmail.deltas import Delta
from gradientmail.exchange import layout
from gradientmail.handoff import Outgoing
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.run import Fragment
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import SimulatedNode

ROUNDS = 6


def place(memory: Buffer) -> range:
    """The addresses of its bytes."""
    found = np.frombuffer(memory, np.uint8)
    return range(found.ctypes.data, found.ctypes.data + found.nbytes)


def lie_in(arrays: Mapping[str, torch.Tensor], memory: range) -> bool:
    """Whether all of them lie there."""
    ends = [(array.data_ptr(), array.data_ptr() + array.nbytes) for array in arrays.values()]
    return all(memory.start <= start < stop <= memory.stop for start, stop in ends)


class Places(WrappedMailbox):
    """Where the objects lie that the store is given and gives, by key; those it gives, for good."""

    def __init__(self, inner: Mailbox) -> None:
        super().__init__(inner)
        self.put: dict[str, range] = {}
        self.got: dict[str, range] = {}
        self._given: list[memoryview] = []

    @override
    def put_if_absent(self, key: str, data: Buffer, /) -> Coroutine[Any, Any, bool]:
        self.put[key] = place(data)
        return super().put_if_absent(key, data)

    @override
    async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
        result = await act()
        if call.operation != "get" or not result:
            return result
        self._given.append(memoryview(bytearray(result)).toreadonly())
        self.got[call.key] = place(self._given[-1])
        return self._given[-1]


def train(world: World, see: Callable[[SimulatedNode], object] = id) -> tuple[Places, Places]:
    """What one that closes all rounds has stored and got, and one that only takes part.

    ``see`` is shown each of them after every step.
    """

    async def step_on(node: SimulatedNode) -> None:
        while world.archive.rounds() < ROUNDS:
            await node.train(1)
            see(node)

    async def main() -> None:
        await closer.join()
        await train_until(closer, lambda: world.archive.rounds() > 0)
        await other.join()
        await asyncio.gather(step_on(closer), step_on(other))
        await closer.kill()
        await other.kill()

    closer, other = world.node("closer", wrap=Places), world.node("other", wrap=Places)
    run_virtual(main)
    assert isinstance(closer.mailbox, Places)
    assert isinstance(other.mailbox, Places)
    return closer.mailbox, other.mailbox


@pytest.mark.parametrize("dtype", [None, "BF16", "F4"])
def test_what_is_stored_lies_where_it_was_made(
    monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    """A delta where the snapshot was taken, or encoded; a commit where the outer step wrote it."""
    deltas, written = list[Delta](), list[Mapping[str, torch.Tensor]]()
    over = list[bool]()
    make, move = courier.make_delta, OuterStep.move

    def make_delta(backend: Backend, fragment: Fragment, outgoing: Outgoing, *args: Any) -> Delta:
        deltas.append(make(backend, fragment, outgoing, *args))
        over.append(lie_in(outgoing.blank.arrays, place(deltas[-1].buffer)))
        return deltas[-1]

    def moves(self: OuterStep, backend: Backend, specs: Any, change: Transition) -> tuple[str, ...]:
        written.extend((change.new.theta, change.new.outer, change.update))
        return move(self, backend, specs, change)

    monkeypatch.setattr(courier, "make_delta", make_delta)
    monkeypatch.setattr(OuterStep, "move", moves)
    algorithm = DiLoCo(sync_every=8, fragments=2, delta_dtype=dtype, commit_dtype=dtype)
    closer, other = train(World(algorithm))
    snapshots = [*payloads(closer.put, "snapshot"), *payloads(other.put, "snapshot")]
    commits = payloads(closer.put, "round")
    assert len(snapshots) >= 2 * (ROUNDS - 1)
    assert len(commits) >= ROUNDS * (2 if dtype is None else 3)
    made = [place(delta.buffer) for delta in deltas]
    assert [stored for stored in snapshots if stored not in made] == []
    assert set(over) == {dtype is None}
    kinds = [arrays for arrays in written if arrays]
    assert [one for one in commits if not any(lie_in(arrays, one) for arrays in kinds)] == []


def payloads(found: Mapping[str, range], kind: str) -> list[range]:
    """Where those of one kind lie."""
    blobs = ((layout.parse_blob_key(key), where) for key, where in found.items())
    return [where for blob, where in blobs if blob is not None and blob.kind == kind]


def test_what_the_store_gave_is_what_is_merged_and_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contribution lies there; so do the parameters, which a snapshot is subtracted from."""
    merged = list[Mapping[str, torch.Tensor]]()
    held = dict[str, Mapping[str, torch.Tensor]]()
    add = Fold.add

    def adds(self: Fold, arrays: Mapping[str, torch.Tensor], *args: Any) -> bool:
        merged.append(arrays)
        return add(self, arrays, *args)

    def see(node: SimulatedNode) -> None:
        if node.settings.learner == "other":
            held.update((one.payload.ref.key, one.arrays) for one in node.learner.versions)

    monkeypatch.setattr(Fold, "add", adds)
    closer, other = train(World(DiLoCo(sync_every=8, fragments=2)), see)
    contributions = payloads(closer.got, "snapshot")
    assert len(contributions) >= ROUNDS - 2
    assert all(any(lie_in(arrays, given) for arrays in merged) for given in contributions)
    assert len(held) >= ROUNDS - 2
    assert [key for key, arrays in held.items() if not lie_in(arrays, other.got[key])] == []
