"""One run of nodes whose models are of different frameworks, under virtual time."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx import nn
from tests.node.history import check_history
from tests.node.worlds import SHAPES, Archive, Tiny, World, happened, train_until

import gradientmail as gm
from gradientmail.events import RoundCommitted
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import SimulatedNode

DTYPES = {torch.float32: mx.float32, torch.float16: mx.float16, torch.bfloat16: mx.bfloat16}
NUMPY = {torch.float32: "f4", torch.float16: "f2", torch.bfloat16: ml_dtypes.bfloat16}


def tiny_mlx(seed: int, dtype: torch.dtype) -> nn.Module:
    """The twin of ``Tiny``, with other values."""
    model = nn.Module()
    for number, (name, shape) in enumerate(SHAPES.items()):
        part, _, own = name.partition(".")
        module = nn.Module()
        draw = mx.random.normal(shape, key=mx.random.key(100 * seed + number))
        setattr(module, own, draw.astype(DTYPES[dtype]))
        setattr(model, part, module)
    return model


def tiny_numpy(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """The same as a dict of arrays."""
    draw = np.random.default_rng(seed)
    return {
        name: draw.standard_normal(shape).astype(NUMPY[dtype]) for name, shape in SHAPES.items()
    }


MODELS: dict[str, Callable[[int, torch.dtype], object]] = {
    "mlx": tiny_mlx,
    "numpy": tiny_numpy,
    "torch": Tiny,
}


def drift(pull: int) -> Callable[[object, int], None]:
    """A change a step, the same numbers in every framework."""

    def change(model: object, local_step: int) -> None:
        draw = np.random.default_rng([pull, local_step])
        for name, shape in SHAPES.items():
            part, _, own = name.partition(".")
            noise = 0.05 * draw.standard_normal(shape).astype(np.float32)
            if isinstance(model, dict) and not isinstance(model, nn.Module):
                model[name] += noise.astype(model[name].dtype)
                continue
            module = getattr(model, part)
            old = getattr(module, own)
            if isinstance(model, nn.Module):
                setattr(module, own, (old + mx.array(noise.tolist())).astype(old.dtype))
            else:
                with torch.no_grad():
                    old.add_(torch.from_numpy(noise).to(old.dtype))

    return change


def contents(model: object) -> dict[str, bytes]:
    """The bytes of the parameters."""
    found = {}
    for name in SHAPES:
        part, _, own = name.partition(".")
        if isinstance(model, dict) and not isinstance(model, nn.Module):
            found[name] = model[name].tobytes()
            continue
        value = getattr(getattr(model, part), own)
        if isinstance(value, mx.array):
            mx.eval(value)
            found[name] = memoryview(value).tobytes()
        else:
            found[name] = bytes(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found


def closers(*nodes: SimulatedNode) -> list[list[int]]:
    """The rounds that each node committed."""
    return [[event.round for event in happened(node, RoundCommitted)] for node in nodes]


def participants(archive: Archive, number: int) -> list[str]:
    record = json.loads(archive.ever[f"rounds/{number:010d}.json"][0])
    return [part["learner"] for part in record["participants"]]


@pytest.mark.parametrize(
    ("one", "other"),
    [("torch", "mlx"), ("mlx", "torch"), ("torch", "numpy"), ("numpy", "torch")],
)
@pytest.mark.parametrize(
    ("dtype", "delta_dtype", "commit_dtype"),
    [
        (torch.float32, None, None),
        (torch.float32, "BF16", "BF16"),
        (torch.float32, "F8_E4M3", None),
        (torch.float32, "F4", "F4"),
        (torch.bfloat16, None, None),
        (torch.bfloat16, "F4", "F4"),
        (torch.float16, "F16", "F8_E4M3"),
    ],
)
def test_both_take_part_both_close_rounds_and_all_end_equal(
    one: str, other: str, dtype: torch.dtype, delta_dtype: str | None, commit_dtype: str | None
) -> None:
    """The first closes the rounds of both. It leaves, and the other closes its own alone.

    Once the first has come back, the other goes on closing the rounds of both.
    """
    algorithm = gm.DiLoCo(
        sync_every=4,
        fragments=2,
        quorum_size=2,
        delta_dtype=delta_dtype,
        commit_dtype=commit_dtype,
    )
    world = World(algorithm)
    plain = dtype == torch.float32 and delta_dtype is None

    def node(name: str, framework: str, seed: int) -> SimulatedNode:
        compressed = framework != "torch" and not plain
        model = MODELS[framework](seed, dtype)
        return world.node(name, change=drift(seed), model=model, compressed=compressed)

    first, second, again = node("first", one, 1), node("second", other, 2), node("again", one, 3)

    async def main() -> None:
        await first.join()
        await second.join()
        await asyncio.gather(first.train(17), second.train(17))
        await first.close()
        await train_until(second, lambda: world.archive.rounds() >= 12)
        await again.join()
        await asyncio.gather(again.train(12), second.train(12))
        await asyncio.gather(again.close(), second.close())

    run_virtual(main)
    if plain:
        check_history(world.archive)
    by_first, by_second, by_again = closers(first, second, again)
    assert by_first[:8] == list(range(8))
    assert by_second == list(range(len(by_first), world.archive.rounds()))
    assert by_again == []
    together = [participants(world.archive, number) for number in (*range(8), *by_second[-4:])]
    assert together == [["first", "second"]] * 8 + [["again", "second"]] * 4
    expected = contents(second.training.model)
    assert contents(again.training.model) == expected
    for fresh in (make(7, dtype) for make in MODELS.values()):
        assert gm.align(fresh, mailbox=world.archive) == world.archive.rounds() - 1
        assert contents(fresh) == expected
