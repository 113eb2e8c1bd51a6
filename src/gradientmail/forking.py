"""Locks that a child made by fork can use.

A fork copies memory and one thread. A lock that another thread held at that moment stays held in
the child for good, and what it protects may be half changed: a DataLoader worker would hang in the
first buffer that it takes. So the thread that forks takes these locks first, as ``logging`` does
with its own, and gives them back on both sides.
"""

import os
import threading
from weakref import WeakSet

_locks: "WeakSet[threading.Lock]" = WeakSet()
_forking = threading.Lock()
_held: list[threading.Lock] = []


def lock_over_forks() -> threading.Lock:
    """A new lock that no fork finds held by another thread.

    Hold it for moments only, and take no other lock inside.
    """
    made = threading.Lock()
    with _forking:
        _locks.add(made)
    return made


def _hold_all() -> None:
    _forking.acquire()
    for one in tuple(_locks):
        one.acquire()
        _held.append(one)


def _let_go() -> None:
    while _held:
        _held.pop().release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_all, after_in_parent=_let_go, after_in_child=_let_go)
