"""A NaN in one learner never reaches the others, and does not stop the run."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import override

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from safetensors.torch import load as load_torch
from tests.node.history import check_history, contribution, records
from tests.node.worlds import (
    Tiny,
    World,
    delta_payload,
    drift,
    happened,
    model_of,
    plant_snapshot,
    values,
)

from gradientmail.algorithm.diloco import DiLoCo, WeightedMean
from gradientmail.backend.torch import TorchBackend
from gradientmail.events import ParametersNotFinite, ParametersOutOfRange
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import train_together
from gradientmail.verification import verify

ALGORITHM = DiLoCo(sync_every=4, fragments=2, in_flight=2, quorum_size=2)


def sick_once(pull: int, at: int, value: float = math.nan) -> Callable[[object, int], None]:
    """Train, but at one step make every parameter but one sick, as a backward pass does."""
    well = drift(pull)

    def change(model: object, local_step: int) -> None:
        well(model, local_step)
        if local_step == at:
            assert isinstance(model, torch.nn.Module)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name != "b.weight":
                        parameter.view(-1)[0] = value

    return change


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sick_learner_publishes_nothing_of_it_and_is_put_back(value: float) -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        nodes = [world.node("sick", change=sick_once(0, 7, value)), world.node("well")]
        await train_together(nodes, 24)
        found = check_history(world.archive)
        rejected = [(r["round"], *row) for r in found for row in r["rejected"]]
        assert [row[1:] for row in rejected] == [("sick", "zero_steps")]
        number = rejected[0][0]
        snapshots = world.archive.ever[f"snapshots/{number:010d}/sick.json"]
        assert b'"steps":0' in snapshots[0]
        assert b'"tokens":0' in snapshots[0]
        (event,) = happened(nodes[0], ParametersNotFinite)
        assert event.round == number
        assert event.tensors == ("a.weight", "c.bias", "embed.weight")
        assert event.beyond == ()
        assert happened(nodes[1], ParametersNotFinite) == []
        # It contributes again afterwards, with steps counted from its repair.
        later = [r for r in found if r["round"] > number + 1]
        counted = [{p["learner"]: p["steps"] for p in r["participants"]} for r in later]
        assert all(row.keys() == {"sick", "well"} for row in counted)
        assert max(row["sick"] for row in counted) <= 4
        for node in nodes:
            assert all(v.isfinite().all() for v in values(model_of(node)).values())
        assert len(found) >= 10

    run_virtual(main, limit_seconds=2000)


@pytest.mark.parametrize("learners", [1, 2])
def test_a_run_goes_on_when_all_learners_were_sick_at_once(learners: int) -> None:
    async def main() -> None:
        algorithm = DiLoCo(sync_every=4, fragments=2, in_flight=2)
        world = World(algorithm)
        nodes = [world.node(f"n{i}", change=sick_once(i, 7)) for i in range(learners)]
        await train_together(nodes, 40)
        found = check_history(world.archive)
        assert len(found) >= 10
        for node in nodes:
            assert len(happened(node, ParametersNotFinite)) == 1
            assert all(v.isfinite().all() for v in values(model_of(node)).values())

    run_virtual(main, limit_seconds=5000)


def test_the_deltas_of_rejected_snapshots_go_with_their_round() -> None:
    def always(model: object, local_step: int) -> None:
        assert isinstance(model, torch.nn.Module)
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)

    async def main() -> None:
        world = World(DiLoCo(sync_every=8, fragments=8, in_flight=2))
        nodes = [world.node("sick", change=always, poll=0.1), world.node("well", poll=0.1)]
        for node in nodes:
            await node.join()
        training = asyncio.gather(*(node.train(60) for node in nodes))
        most: list[int] = []
        while not training.done():
            await asyncio.sleep(0.5)
            kept = world.archive.now("blobs/snapshots/")
            most.append(len({key.split("/")[2] for key in kept}))
        assert len(records(world.archive)) >= 30
        assert max(most) <= 3  # two in flight, and the one that is swept just now
        for node in nodes:
            await node.kill()

    run_virtual(main, limit_seconds=900)


def test_a_model_that_stays_sick_hurts_only_its_node() -> None:
    def always(model: object, local_step: int) -> None:
        assert isinstance(model, torch.nn.Module)
        if local_step > 5:
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)

    async def main() -> None:
        world = World(ALGORITHM)
        nodes = [world.node("sick", change=always), world.node("well")]
        await train_together(nodes, 30)
        found = check_history(world.archive)
        assert len(found) >= 12
        for record in found[4:]:
            assert [p["learner"] for p in record["participants"]][-1] == "well"
        assert records(world.archive)[-1]["version"] >= 6

    run_virtual(main, limit_seconds=2000)


def test_bf16_deltas_that_overflow_are_not_published() -> None:
    """Finite parameters whose difference is not: ±3e38 apart in F32."""

    def jump(model: object, local_step: int) -> None:
        assert isinstance(model, torch.nn.Module)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-3e38 if local_step == 5 else 0.5)

    async def main() -> None:
        world = World(ALGORITHM)
        model = Tiny(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(3e38)
        nodes = [world.node("wild", change=jump, model=model), world.node("well")]
        await train_together(nodes, 20)
        for record in records(world.archive):
            for row in record["participants"]:
                assert row["steps"] > 0
        for node in nodes:
            assert all(v.isfinite().all() for v in values(model_of(node)).values())

    run_virtual(main, limit_seconds=2000)


@pytest.mark.parametrize("dtype", [None, "F16", "F8_E4M3", "F4"])
def test_a_delta_too_large_for_its_format_does_not_stop_a_node_alone(dtype: str | None) -> None:
    """Finite parameters, and a difference that nobody could decode: 6e38, or 1e5 as a half."""
    far = 1e5 if dtype == "F16" else 3e38

    def jump(model: object, local_step: int) -> None:
        assert isinstance(model, torch.nn.Module)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-far if local_step == 5 else 0.9 * far)

    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2, delta_dtype=dtype))
        model = Tiny(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(far)
        node = world.node("a", change=jump, model=model)
        await node.join()
        await node.train(40)
        told = happened(node, ParametersNotFinite)
        assert told
        for event in told:
            assert event.tensors
            assert event.beyond == event.tensors
        assert len(records(world.archive)) >= 10
        for record in records(world.archive):
            assert [row["learner"] for row in record["participants"]] == ["a"]
        assert all(v.isfinite().all() for v in values(model_of(node)).values())
        await node.kill()

    run_virtual(main, limit_seconds=2000)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4"])
@pytest.mark.parametrize(("far", "held"), [(2e38, True), (3.3e38, False)])
def test_a_delta_that_its_format_can_hold_is_published_however_large(
    dtype: str, far: float, *, held: bool
) -> None:
    """E4M3 has 2e38 as 144 or 160 times 2¹²⁰; 3.3e38 would be 256 times that, which is infinite."""

    def jump(model: object, local_step: int) -> None:
        assert isinstance(model, torch.nn.Module)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-far if local_step == 3 else 0.0)

    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=1, in_flight=1, delta_dtype=dtype))
        model = Tiny(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        node = world.node("a", change=jump, model=model)
        await node.join()
        await node.train(4)
        await asyncio.sleep(2.0)
        told = happened(node, ParametersNotFinite)
        snapshot = json.loads(world.archive.ever["snapshots/0000000000/a.json"][0])
        if held or dtype == "F4":
            assert (told, snapshot["steps"]) == ([], 4)
        else:
            assert snapshot["steps"] == 0
        await node.kill()

    run_virtual(main, limit_seconds=2000)


def test_a_second_round_of_the_same_illness_is_mended_once() -> None:
    """Two rounds are published sick before the first is found so; one repair, one event."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=2, fragments=2, in_flight=2, quorum_size=2))
        nodes = [world.node("sick", change=sick_once(0, 7)), world.node("well")]
        await train_together(nodes, 30)
        check_history(world.archive)
        assert len(happened(nodes[0], ParametersNotFinite)) == 1

    run_virtual(main, limit_seconds=2000)


class Jittery(WrappedMailbox):
    """A store whose uploads of deltas take between no time and eight seconds."""

    def __init__(self, inner: Mailbox, seed: int) -> None:
        super().__init__(inner)
        self.random = Random(seed)

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if call.operation == "put_if_absent" and call.key.startswith("blobs/snapshots/"):
            await asyncio.sleep(8.0 * self.random.random() ** 2)
        return await act()


@pytest.mark.parametrize("in_flight", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_learner_that_was_sick_step_after_step_publishes_again(in_flight: int, seed: int) -> None:
    """Old snapshots are found sick while newer ones of earlier rounds are, too; none is lost."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=8, fragments=4, in_flight=in_flight))
        well = drift(0)

        def change(model: object, local_step: int) -> None:
            well(model, local_step)
            if 20 <= local_step < 40:
                sick_once(0, local_step)(model, local_step)

        node = world.node("a", change=change, wrap=partial(Jittery, seed=seed))
        await node.join()
        await node.train(60)
        before = world.archive.rounds()
        await node.train(150)
        assert world.archive.rounds() >= before + 12
        check_history(world.archive)
        await node.kill()

    run_virtual(main, limit_seconds=5000)


def test_huge_finite_contributions_leave_the_run_finite() -> None:
    """Whatever a learner sends that is finite, the committed parameters and momentum are."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2, quorum_size=2))
        node = world.node("a")
        await node.join()
        for number in range(6):
            payload = delta_payload(world.archive, number % 2, 3.3e38)
            plant_snapshot(world.archive, number, "z", payload)
        await node.train(40)
        found = records(world.archive)
        assert sum("z" in [p["learner"] for p in r["participants"]] for r in found) >= 4
        assert happened(node, ParametersOutOfRange)
        for number, record in enumerate(found):
            for kind in ("theta", "outer"):
                arrays = load(world.archive.ever[record[kind]["key"]][0])
                for name, array in arrays.items():
                    assert np.isfinite(array).all(), (number, name)
        await node.kill()

    run_virtual(main, limit_seconds=2000)


@pytest.mark.parametrize("commit_dtype", [None, "F32", "F16", "F4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_held_in_range_is_no_violation(
    dtype: torch.dtype, commit_dtype: str | None
) -> None:
    """Neither with the deltas still there, nor after the sweeps."""

    async def main() -> tuple[dict[str, bytes], dict[str, bytes]]:
        algorithm = DiLoCo(
            sync_every=4,
            fragments=2,
            in_flight=2,
            quorum_size=2,
            delta_dtype="F32",
            commit_dtype=commit_dtype,
        )
        world = World(algorithm)
        node = world.node("a", model=Tiny(0, dtype))
        await node.join()
        for number in range(6):
            payload = delta_payload(world.archive, number % 2, 3.3e38)
            plant_snapshot(world.archive, number, "z", payload)
        await node.train(26)
        held = {event.round for event in happened(node, ParametersOutOfRange)}
        assert held >= {2, 3, records(world.archive)[-1]["round"]}
        ever = {key: found[0] for key, found in world.archive.ever.items()}
        left = dict(world.archive._objects)
        await node.kill()
        return {k: found for k, found in ever.items() if not k.startswith("leases/")}, left

    ever, left = run_virtual(main, limit_seconds=2000)
    report = asyncio.run(verify(ever, backend=TorchBackend(), swept=False))
    assert report.violations == ()
    assert report.rounds == report.recomputed > 10
    report = asyncio.run(verify(left, backend=TorchBackend()))
    assert report.violations == ()
    assert report.consistent >= 2


def test_updates_too_small_for_bf16_add_up_in_the_master() -> None:
    """A learner moves by a few bf16 steps a round, of which the outer step takes a fiftieth."""
    ulp = 2.0**-7  # between bf16 values from 1 to 2

    def down(model: object, local_step: int) -> None:
        del local_step
        assert isinstance(model, torch.nn.Module)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(ulp)

    async def main() -> None:
        algorithm = DiLoCo(
            sync_every=2,
            fragments=1,
            in_flight=1,
            outer_lr=0.02,
            outer_momentum=0.0,
            merge=WeightedMean(),
        )
        world = World(algorithm)
        model = Tiny(0, torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.5)
        node = world.node("a", change=down, model=model)
        await node.join()
        await node.train(100)
        found = records(world.archive)
        assert len(found) >= 30
        master, kept = 1.5, 0
        for number, record in enumerate(found):
            snapshot = contribution(world.archive, number, record["participants"][0])
            delta = load_torch(world.archive.ever[snapshot["payload"]["key"]][0])
            moved = delta["b.weight"][0].item()
            assert ulp <= moved <= 3 * ulp
            master -= 0.02 * moved
            outer = load_torch(world.archive.ever[record["outer"]["key"]][0])
            theta = load_torch(world.archive.ever[record["theta"]["key"]][0])
            held = outer["master.b.weight"][0]
            assert held.item() == pytest.approx(master, rel=1e-5)
            assert theta["b.weight"][0].item() == held.to(torch.bfloat16).item()
            kept += theta["b.weight"][0].item() == 1.5
        # Each update alone is rounded away, as the first ones show; together they arrive.
        assert kept >= 5
        assert model_of(node).get_parameter("b.weight")[0].item() < 1.5 - 0.5 * ulp
        await node.kill()

    run_virtual(main, limit_seconds=2000)
