"""The sessions that are open in this process.

A notebook's cell is run again while the session that it made before is still open. Two sessions
that write into one model would undo each other, so the new one closes the old one first; and a
session that lost its learner id to another one is told at once instead of at its next beat.
"""

import os
from typing import Protocol

from gradientmail.forking import lock_over_forks


class OpenSession(Protocol):
    """What a session is asked by others of its process. Any thread."""

    identity: frozenset[int]
    """Objects of the model, by id: two sessions that share one train one model."""

    @property
    def learner_id(self) -> str:
        """Its name in its run."""
        ...

    def give_way(self) -> None:
        """Close at once: another session takes over the model."""
        ...

    def check_lease(self) -> None:
        """Look soon whether the learner id is still this session's."""
        ...

    def disown(self) -> None:
        """Be useless from now on, in a child made by fork."""
        ...


_lock = lock_over_forks()
_sessions: dict[int, OpenSession] = {}


def sessions_with(identity: frozenset[int]) -> list[OpenSession]:
    """Those that train this model."""
    with _lock:
        return [one for one in _sessions.values() if one.identity & identity]


def give_way_to(session: OpenSession) -> None:
    """Close the sessions that train the model of ``session``, which is about to join."""
    for other in sessions_with(session.identity):
        other.give_way()


def opened(session: OpenSession) -> None:
    """``session`` has joined."""
    with _lock:
        others = [one for one in _sessions.values() if one.learner_id == session.learner_id]
        _sessions[id(session)] = session
    for other in others:  # in another run, perhaps: each asks its own mailbox
        other.check_lease()


def closed(session: OpenSession) -> None:
    """``session`` has ended, or was never opened."""
    with _lock:
        _sessions.pop(id(session), None)


def _forget_all() -> None:
    """In a child made by fork, where the sessions' threads do not run."""
    for session in _sessions.values():
        session.disown()
    _sessions.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
