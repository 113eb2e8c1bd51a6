"""The work of a round without the library: what an exchange costs at least, on this machine, now.

The same bytes are copied, subtracted, hashed, written, read, summed and stepped, in plain calls of
PyTorch, hashlib and the file system, one after the other on one thread beside the training, and
the files stay for as long as the wire format has them: no records, no leases, no election, no
faults, nothing checked.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import torch
from measure import bare_step


class BareSession:
    """Stands where ``gm.Session`` stands in ``exchange.py``; node 0 merges every round."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        rank: int,
        nodes: int,
        fragments: int,
        every: int,
        poll: float,
        folder: Path,
        tell: Callable[[str, int], None],
    ) -> None:
        """fp32 ``parameters``, split evenly; ``tell`` hears of snapshots and commits as they land.

        ``every``: steps from one snapshot to the next at least. ``poll``: seconds between looks.
        """
        self.rounds_seen = -1
        share = len(parameters) // fragments
        self._fragments = [
            [one.data for one in parameters[p * share : (p + 1) * share or None]]
            for p in range(fragments)
        ]
        sizes = [sum(map(torch.numel, own)) for own in self._fragments]
        self._theta = [
            torch.cat([one.detach().reshape(-1) for one in own]) for own in self._fragments
        ]
        self._momentum = [torch.zeros(0 if rank else size) for size in sizes]
        self._snapshot, self._fetched = torch.zeros(max(sizes)), torch.zeros(max(sizes))
        self._rank, self._nodes, self._every, self._poll = rank, nodes, every, poll
        self._folder, self._tell = folder, tell
        self._steps = 0
        self._work: threading.Thread | None = None
        self._complete = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """See the round in flight through, unless the others have left without it."""
        if self._work is not None:
            self._work.join()
            self.rounds_seen += self._complete
        (self._folder / f"left-{self._rank}").touch()

    def step(self, samples: int) -> None:
        """Copy a commit in if one has come, then a snapshot out if one is due."""
        self._steps += samples > 0
        if self._work is not None:
            if self._work.is_alive() or not self._complete:
                return
            self._work = None
            self.rounds_seen += 1
            fragment = self.rounds_seen % len(self._fragments)
            own = self._fragments[fragment]
            torch._foreach_copy_(own, self._parts(self._theta[fragment], own))
        if self._steps >= self._every:
            self._steps = 0
            number = self.rounds_seen + 1
            own = self._fragments[number % len(self._fragments)]
            torch._foreach_copy_(self._parts(self._snapshot, own), own)
            self._work = threading.Thread(target=self._exchange, args=(number,))
            self._work.start()

    @staticmethod
    def _parts(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        count = sum(map(torch.numel, like))
        parts = flat[:count].split([one.numel() for one in like])
        return [part.view_as(one) for part, one in zip(parts, like, strict=True)]

    def _exchange(self, number: int) -> None:
        self._complete = False
        fragment = number % len(self._fragments)
        theta, momentum = self._theta[fragment], self._momentum[fragment]
        merged = self._snapshot[: theta.numel()]
        torch.sub(merged, theta, out=merged)
        self._put(number, f"delta-{self._rank}", merged)
        self._tell("published", number)
        if self._rank:
            self._complete = self._get(number, "theta", 0, theta)
            if self._complete:
                self._remove(number)
            return
        merged.norm()
        for other in range(1, self._nodes):
            found = self._fetched[: theta.numel()]
            if not self._get(number, f"delta-{other}", other, found):
                return
            found.norm()
            torch.dot(merged, found)
            merged.add_(found)
        bare_step(theta, merged, momentum)
        self._put(number, "theta", theta)
        self._put(number, "momentum", momentum)
        self._tell("committed", number)
        self._complete = True
        self._remove(number)

    def _put(self, number: int, name: str, tensor: torch.Tensor) -> None:
        data = memoryview(tensor.numpy()).cast("B")
        hashlib.sha256(data).digest()
        path = self._folder / f"{number}-{name}"
        with path.with_suffix(".new").open("wb", buffering=0) as file:
            file.write(data)
        path.with_suffix(".new").rename(path)

    def _remove(self, number: int) -> None:
        """What the sweep after commit ``number`` would: its deltas, and the commit 2·P before."""
        (self._folder / f"{number}-delta-{self._rank}").unlink()
        if not self._rank:
            for path in self._folder.glob(f"{number - 2 * len(self._fragments)}-*"):
                path.unlink()

    def _get(self, number: int, name: str, of: int, into: torch.Tensor) -> bool:
        """Read what node ``of`` wrote; whether it had not left without writing it."""
        path, left = self._folder / f"{number}-{name}", self._folder / f"left-{of}"
        while not path.exists():
            if left.exists() and not path.exists():
                return False
            time.sleep(self._poll)
        data = memoryview(into.numpy()).cast("B")
        with path.open("rb", buffering=0) as file:
            file.readinto(data)
        hashlib.sha256(data).digest()
        return True
