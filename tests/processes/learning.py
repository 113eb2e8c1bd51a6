"""What the learners do that tests run as processes."""

import time
from typing import Any

import torch

import gradientmail as gm
from gradientmail.backend import backend_for
from gradientmail.events import Event, TaskFailed

ALGORITHM = gm.DiLoCo(sync_every=4, fragments=2, in_flight=2)


def warm() -> None:
    """Import what a learner needs, for all that are forked from here."""
    model = torch.nn.Linear(1, 1)
    backend_for(model)
    torch.optim.SGD(model.parameters(), lr=0.01)  # it imports a good deal more


def learn(
    mailbox: gm.Mailbox, learner: str, rounds: int, *, pause: float, **settings: Any
) -> tuple[gm.Session, torch.nn.Module]:
    """Train until killed, or until so many rounds more are seen if ``rounds`` is not 0.

    Prints ``joined <newest round>`` when it has joined, and what failed. ``pause`` is the seconds
    between steps. Returns the closed session and its model.
    """
    torch.set_num_threads(1)
    torch.manual_seed(len(learner))
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def tell(event: Event) -> None:
        if isinstance(event, TaskFailed):
            print(f"failed {event}", flush=True)

    with gm.Session(
        model,
        algorithm=ALGORITHM,
        mailbox=mailbox,
        learner_id=learner,
        callbacks=[tell],
        **settings,
    ) as session:
        print(f"joined {session.rounds_seen}", flush=True)
        goal = session.rounds_seen + rounds if rounds else 10**9
        while session.rounds_seen < goal:
            loss = model(torch.randn(4, 40)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.step(samples=4)
            time.sleep(pause)
    return session, model
