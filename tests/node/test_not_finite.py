"""A NaN in one learner never reaches the others, and does not stop the run."""

import math
from collections.abc import Callable

import pytest
import torch
from tests.node.history import check_history, records
from tests.node.worlds import Tiny, World, drift, happened, model_of, values

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.events import ParametersNotFinite
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import train_together

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
