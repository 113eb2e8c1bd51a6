"""One NaN in a gradient, which the next step spreads to every parameter, in a real loop."""

import time

import pytest
import torch
from tests.session.models import QUICK, Events, net, parameters, together, train_step

import gradientmail as gm
from gradientmail import events

ALGORITHM = gm.DiLoCo(sync_every=8, fragments=2, in_flight=2, quorum_size=2)


def poison(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step whose gradient has one NaN, in the last layer's bias."""
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    bias = list(model.parameters())[-1]
    assert bias.grad is not None
    bias.grad[0] = float("nan")
    optimizer.step()


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_nan_that_spreads_harms_nobody_else_and_the_run_goes_on(kind: str) -> None:
    """With a round that waits for both. Adam's state stays sick until it is reset, as is told."""
    box, models, seen = gm.MemoryMailbox(), [net(0), net(1)], [Events(), Events()]
    sick_after: list[int] = []

    def life(learner: int) -> None:
        model = models[learner]
        with gm.Session(
            model,
            algorithm=ALGORITHM,
            mailbox=box,
            learner_id="sick" if learner == 0 else "well",
            callbacks=[seen[learner]],
            **QUICK,
        ) as session:

            def fresh() -> torch.optim.Optimizer:
                if kind == "adam":
                    return torch.optim.Adam(model.parameters(), lr=0.01)
                return torch.optim.SGD(model.parameters(), lr=0.01)

            optimizer, step, told = fresh(), 0, 0
            while session.rounds_seen < 14:
                if learner == 0 and session.rounds_seen >= 3 and not told:
                    # Until it is told: a commit that comes first heals what it is written over.
                    poison(model, optimizer)
                    train_step(model, optimizer, step)
                    sick_after.append(sum(not p.isfinite().all() for p in model.parameters()))
                else:
                    train_step(model, optimizer, 1000 * learner + step)
                session.step(samples=6)
                reports = len(seen[learner].of(events.ParametersNotFinite))
                if reports > told:  # what the event advises
                    told, optimizer = reports, fresh()
                step += 1
                time.sleep(0.004)

    together(lambda: life(0), lambda: life(1))
    # The backward pass has spread it: the whole model was sick, not the one element.
    assert set(sick_after) == {len(list(models[0].parameters()))}
    found = seen[0].of(events.ParametersNotFinite)
    assert 1 <= len(found) <= 2, [event.round for event in found]
    assert {name for event in found for name in event.tensors} == parameters(models[0]).keys()
    assert seen[1].of(events.ParametersNotFinite) == []
    rounds = {event.round: event for one in seen for event in one.of(events.RoundSeen)}
    rejected = {row for event in rounds.values() for row in event.rejected}
    # The closer may see only what the learner published again, once it was mended.
    assert rejected <= {("sick", "zero_steps")}
    assert 0 in [event.steps for event in seen[0].of(events.SnapshotPublished)]
    later = [event.learners for number, event in rounds.items() if number >= 10]
    assert ("sick", "well") in later
    spare = net(5)
    assert gm.align(spare, mailbox=box) >= 14
    for model in (*models, spare):
        assert all(p.isfinite().all() for p in model.parameters())
