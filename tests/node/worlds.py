"""Small worlds to test nodes in: a model, a store that remembers everything, nodes that can die."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Awaitable, Buffer, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Literal, override

import numpy as np
import torch
from safetensors.numpy import save

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.events import Event
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.node import Settings
from gradientmail.testing.simulated import Connection, SimulatedStore
from gradientmail.testing.virtual_time import VirtualClock
from gradientmail.testing.world import SimulatedNode, Training

SHAPES = {"a.weight": (3, 4), "b.weight": (5,), "c.bias": (2, 2), "embed.weight": (4, 3)}


class Tiny(torch.nn.Module):
    """Four parameters in four modules; ``seed`` draws their values."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            part, _, own = name.partition(".")
            module = torch.nn.Module()
            value = torch.randn(shape, generator=draw).to(dtype)
            module.register_parameter(own, torch.nn.Parameter(value))
            self.add_module(part, module)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters now, copied."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    """Whether two models hold the same bits."""
    a, b = values(left), values(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def drift(pull: int) -> Callable[[object, int], None]:
    """A change a step that depends on the node and the step, as gradients of other data do."""

    def change(model: object, local_step: int) -> None:
        draw = torch.Generator().manual_seed(1000 * pull + local_step)
        assert isinstance(model, torch.nn.Module)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
                parameter.add_(noise, alpha=0.05)

    return change


class Archive(MemoryMailbox):
    """A store that also keeps what was deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.ever: dict[str, list[bytes]] = {}
        """Every object that was ever created, by key, oldest first."""
        self.deleted: list[str] = []

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        created = await super().put_if_absent(key, data)
        if created:
            self.ever.setdefault(key, []).append(bytes(data))
        return created

    @override
    async def delete(self, keys: Iterable[str], /) -> None:
        wanted = tuple(keys)
        self.deleted += wanted
        await super().delete(wanted)

    def now(self, prefix: str = "") -> list[str]:
        """The keys that exist."""
        return [key for key in self._keys if key.startswith(prefix)]

    def rounds(self) -> int:
        """How many records there are."""
        return len(self.now("rounds/"))

    def plant(self, key: str, data: bytes) -> None:
        """Put an object there as somebody else would."""
        assert key not in self._objects, f"{key} exists"
        with contextlib.suppress(StopIteration):  # it waits for nothing
            self.put_if_absent(key, data).send(None)


@dataclass
class World:
    """One store and the nodes around it."""

    algorithm: DiLoCo
    seed: int = 0
    store: SimulatedStore = field(init=False)
    archive: Archive = field(init=False)
    nodes: list[SimulatedNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        print(f"seed {self.seed}")
        self.store = SimulatedStore(seed=self.seed)
        self.archive = Archive()
        self.store.mailbox = self.archive

    def node(
        self,
        name: str,
        *,
        step_seconds: float = 1.0,
        poll: float = 0.25,
        lease_every: float = 5.0,
        lease_timeout: float = 15.0,
        connection: Connection | None = None,
        wrap: Callable[[Mailbox], Mailbox] | None = None,
        change: Callable[[object, int], None] | None = None,
        clock: VirtualClock | None = None,
        model: object = None,
        samples: int = 8,
        compressed: bool = False,
    ) -> SimulatedNode:
        """A node that has not joined yet."""
        view: Mailbox = self.store.view(connection)
        number = len(self.nodes)
        node = SimulatedNode(
            mailbox=view if wrap is None else wrap(view),
            settings=Settings(name, poll, lease_every, lease_timeout, compressed),
            algorithm=self.algorithm,
            training=Training(
                model=Tiny(number) if model is None else model,
                change=drift(number) if change is None else change,
                step_seconds=step_seconds,
                samples=samples,
            ),
            seed=1000 * self.seed + number,
            clock=VirtualClock() if clock is None else clock,
        )
        self.nodes.append(node)
        return node


def model_of(node: SimulatedNode) -> torch.nn.Module:
    """The model a node trains."""
    model = node.training.model
    assert isinstance(model, torch.nn.Module)
    return model


def happened[E: Event](node: SimulatedNode, kind: type[E]) -> list[E]:
    """The events of one kind at a node."""
    return [event for event in node.events if isinstance(event, kind)]


class MortalMailbox(WrappedMailbox):
    """A node's connection that tells when the node dies: before or after its n-th call acts.

    Looking for an object again is not counted: polls are all alike. From the n-th
    call on no call of the node acts or returns, which is what the others see of SIGKILL.
    """

    def __init__(self, inner: Mailbox, at: int, strike: Literal["before", "after"]) -> None:
        super().__init__(inner)
        self.at = at
        self.strike = strike
        self.count = 0
        self.last = ""
        """The call at which the node died."""
        self.dead = asyncio.Event()
        self._looked: set[str] = set()

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        again = call.operation == "get" and call.key in self._looked
        self._looked.add(call.key)
        self.count += not again
        if self.count == self.at and not self.last:
            self.last = f"{call.operation} {call.key}"
            if self.strike == "after":
                await act()
            self.dead.set()
        if self.dead.is_set():
            await asyncio.Event().wait()
        return await act()


def mortal(at: int, strike: Literal["before", "after"] = "before") -> Callable[[Mailbox], Mailbox]:
    """``wrap`` for a node that dies at its ``at``-th call."""
    return partial(MortalMailbox, at=at, strike=strike)


async def live_and_die(node: SimulatedNode, steps: int) -> bool:
    """Join, train and close until the node's mailbox kills it; whether it lived to the end."""

    async def life() -> None:
        await node.join()
        await node.train(steps)
        await node.close()

    mailbox = node.mailbox
    assert isinstance(mailbox, MortalMailbox)
    living, dying = asyncio.ensure_future(life()), asyncio.ensure_future(mailbox.dead.wait())
    await asyncio.wait((living, dying), return_when=asyncio.FIRST_COMPLETED)
    if mailbox.dead.is_set():
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        await node.kill()
        return False
    dying.cancel()
    await living
    return True


async def train_until(node: SimulatedNode, enough: Callable[[], bool], limit: int = 5000) -> None:
    """Take steps until ``enough()``."""
    for _ in range(limit):
        if enough():
            return
        await node.train(1)
    raise AssertionError(f"not enough after {limit} steps")


def shuffled(seed: int) -> Random:
    """A random number generator for a schedule of the test's own."""
    return Random(f"schedule {seed}")


def delta_payload(archive: Archive, fragment: int, scale: float = 0.01) -> bytes:
    """A delta of an F32 run's fragment, every element ``scale``."""
    manifest = json.loads(archive.ever["manifest.json"][0])
    shapes = {row["name"]: row["shape"] for row in manifest["schema"]}
    names = manifest["plan"][fragment]
    return save({name: np.full(shapes[name], scale, np.float32) for name in names})


def snapshot_record(
    archive: Archive, number: int, learner: str, payload: bytes, **changes: object
) -> dict[str, Any]:
    """A snapshot record as a learner of the run would write it, with ``changes``."""
    manifest = json.loads(archive.ever["manifest.json"][0])
    rows = [[row["name"], row["dtype"], row["shape"]] for row in manifest["schema"]]
    digest = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    sha256 = hashlib.sha256(payload).hexdigest()
    key = f"blobs/snapshots/{number:010d}/{learner}/{sha256}.safetensors"
    return {
        "learner": learner,
        "round": number,
        "local_step": 3,
        "steps": 3,
        "tokens": 24,
        "base_version": number // len(manifest["plan"]),
        "rounds_seen": number - 1,
        "step_seconds": 1.0,
        "schema_digest": digest,
        "final": False,
        "payload": {"key": key, "sha256": sha256, "size": len(payload)},
        **changes,
    }


def plant_snapshot(
    archive: Archive,
    number: int,
    learner: str,
    payload: bytes,
    *,
    stored: bytes | None = b"",
    **changes: object,
) -> None:
    """Put a snapshot there; ``stored`` is what really lies under the payload's key, if not it."""
    record = snapshot_record(archive, number, learner, payload, **changes)
    if stored is not None:
        archive.plant(record["payload"]["key"], stored or payload)
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    archive.plant(f"snapshots/{number:010d}/{learner}.json", text.encode())
