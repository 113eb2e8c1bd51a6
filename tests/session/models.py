"""Small models and training loops for sessions with real threads."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import gradientmail as gm
from gradientmail.events import Event

QUICK: dict[str, Any] = {"poll_interval": 0.02, "lease_every": 0.5, "lease_timeout": 60.0}
"""Settings of a session that must not make a test wait, nor lose a learner on a busy machine."""

ALGORITHM = gm.DiLoCo(sync_every=4, fragments=2, in_flight=2)


class Keeping(gm.MemoryMailbox):
    """Where payloads are never swept, so that every commit can be computed again."""

    async def delete(self, keys: Iterable[str]) -> None:
        await super().delete(key for key in keys if key.startswith("leases/"))


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """A small network with drawn parameters."""
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return torch.nn.Sequential(*layers).to(dtype)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One optimizer step on data that ``seed`` draws."""
    draw = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    x = torch.randn(6, 4, generator=draw).to(dtype)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_until(session: gm.Session, model: torch.nn.Module, rounds: int) -> None:
    """Train until so many rounds were seen."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(100_000):
        if session.rounds_seen >= rounds:
            return
        train_step(model, optimizer, step)
        session.step(samples=6)
        time.sleep(0.002)
    raise AssertionError("no round was committed")


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters now, copied."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    """Whether two models hold the same bits."""
    a, b = parameters(left), parameters(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Events(list[Event]):
    """A callback that keeps what it gets."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def of[E: Event](self, kind: type[E]) -> list[E]:
        """The events of one kind."""
        return [event for event in self if isinstance(event, kind)]


def together(*works: Callable[[], object]) -> None:
    """Run each in a thread of its own; raise what the first one raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a node has not ended"


def session_threads() -> list[str]:
    """Names of the threads of sessions that are still there."""
    return [t.name for t in threading.enumerate() if t.name.startswith("gradientmail-")]


@contextmanager
def no_threads_left() -> Iterator[None]:
    """Fail if a session's thread outlives the body."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("gradientmail-"):
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} has not ended"
