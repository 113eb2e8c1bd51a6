"""Work on tensors and on payloads' bytes leaves the event loop: hashing, deltas, merging, steps."""

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.node.worlds import World, train_until
from tests.session.models import QUICK

import gradientmail as gm
from gradientmail.algorithm import outer_parts
from gradientmail.backend.base import Backend
from gradientmail.backend.numpy import NumpyBackend
from gradientmail.backend.torch import TorchBackend
from gradientmail.exchange import compression, exchange
from gradientmail.exchange.sealing import Sealing
from gradientmail.testing.virtual_time import run_virtual

ARITHMETIC = [
    name
    for name, found in vars(Backend).items()
    if callable(found)
    and not name.startswith("_")
    and name not in ("bind", "bind_with_buffers", "pool", "array", "part", "on_host")
]
HASHING = {
    "hash_until": Sealing,
    "sha256_hex": exchange,
    "compress": compression,
    "decompress": compression,
}


class Away:
    """Offloads as a world does, and knows whether it is in something offloaded."""

    def __init__(self) -> None:
        self.depth = 0

    async def __call__[**P, T](
        self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self.depth += 1
        try:
            return work(*args, **kwargs)
        finally:
            self.depth -= 1


def watch[T](
    patched: pytest.MonkeyPatch, backend: type[Backend], where: Callable[[], T]
) -> dict[str, Counter[T]]:
    """By name of the work, how often it was done where: a backend's arithmetic, and hashing."""
    found: defaultdict[str, Counter[T]] = defaultdict(Counter)

    def watch_one(owner: object, name: str) -> None:
        work = getattr(owner, name)

        def done(*args: Any, **named: Any) -> Any:
            found[name][where()] += 1
            return work(*args, **named)

        patched.setattr(owner, name, done)

    for name in ARITHMETIC:
        watch_one(backend, name)
    for name, owner in HASHING.items():
        watch_one(owner, name)
    return found


@pytest.mark.parametrize("merge", [gm.Rda(), gm.WeightedMean()], ids=["rda", "mean"])
@pytest.mark.parametrize(
    ("delta_dtype", "commit_dtype", "compressed", "work"),
    [
        (None, None, False, {"hash_until", "subtract_squares"}),
        ("F4", "F4", False, {"hash_until", "encode_difference", "decode", "add_decoded"}),
        ("BF16", "BF16", True, {"compress", "decompress", "subtract_squares", "add"}),
    ],
    ids=["plain", "F4", "compressed BF16"],
)
def test_a_node_offloads_all_work_on_tensors_and_bytes(
    delta_dtype: str | None,
    commit_dtype: str | None,
    compressed: bool,
    work: set[str],
    merge: gm.Rda | gm.WeightedMean,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing and following, with three contributions a round: two are kept, then all summed."""
    algorithm = gm.DiLoCo(
        sync_every=8,
        fragments=2,
        quorum_size=3,
        delta_dtype=delta_dtype,
        commit_dtype=commit_dtype,
        merge=merge,
    )
    monkeypatch.setattr(outer_parts, "PART", 1)  # so that there is something to hash early
    world, away = World(algorithm), Away()

    async def main() -> dict[str, Counter[bool]]:
        team = [world.node(name, compressed=compressed) for name in "abc"]
        for node in team:
            node.offload = away
            await node.join()
        with monkeypatch.context() as patched:
            found = watch(patched, TorchBackend, lambda: away.depth > 0)
            enough = (train_until(node, lambda: world.archive.rounds() >= 4) for node in team)
            await asyncio.gather(*enough)
        for node in team:
            await node.kill()
        return found

    found = run_virtual(main)
    print({name: dict(count) for name, count in found.items()})
    assert {"sha256_hex", "accumulate", "nesterov", *work} <= found.keys()
    assert {name for name, count in found.items() if count[False]} == set()


def test_a_session_offloads_to_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to the loop's nor to the one that trains; work on tensors to one thread alone."""
    model = {name: np.ones(9, np.float32) for name in "ab"}
    algorithm = gm.DiLoCo(sync_every=4, fragments=2, overlap_steps=1)
    mailbox = gm.MemoryMailbox()
    with gm.Session(model, algorithm=algorithm, mailbox=mailbox, callbacks=(), **QUICK) as session:
        with monkeypatch.context() as patched:
            found = watch(patched, NumpyBackend, lambda: threading.current_thread().name)
            while session.rounds_seen < 4:
                for array in model.values():
                    np.multiply(array, 0.99, out=array)
                session.step(samples=1)
        own = session._thread._thread.name
    print(found)
    assert {"hash_until", "subtract_squares", "nesterov"} <= found.keys()
    hashing = {thread for name in HASHING for thread in found.pop(name, ())}
    assert hashing <= {f"{own}-hashes-1", f"{own}-hashes-2"}
    assert {thread for threads in found.values() for thread in threads} == {f"{own}-tensors-1"}
