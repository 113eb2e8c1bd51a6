"""A queue that nodes share: each unit of work goes to one of them.

A claim on a unit is an object ``units/{unit}`` whose body is the learner id, created once. Nobody
takes it back: what a node has claimed is its own, also after a restart with the same id.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Self, override

from gradientmail.arguments import check_mailbox, count_of
from gradientmail.blocking import STOP_SECONDS, Store
from gradientmail.clock import Clock
from gradientmail.errors import ProtocolError
from gradientmail.exchange import layout
from gradientmail.mailbox.base import Mailbox, get_at_most

CLOSE_SECONDS = 5.0
"""Leaving the context waits so long for a loader that is under way; then its thread is left."""


def shared_queue[V, T](
    units: Mapping[str, V],
    *,
    mailbox: Mailbox,
    learner_id: str,
    load: Callable[[V], T],
    prefetch: int = 8,
) -> "SharedQueue[V, T]":
    """A context manager that gives an iterator over the loaded units that are this node's.

    Units are claimed one at a time, in the order of the mapping, by whichever node comes first, and
    loaded on a background thread, ``prefetch`` items ahead at most. When the iterator ends nothing
    is left to claim; other nodes may still be at work on theirs. What was claimed and not taken
    when the context closes stays claimed; a node of the same ``learner_id`` gets it again.

    Args:
        units: for each unit its id, the same on all nodes, and what ``load`` is given, which may
            differ (a path, say). Ids are claimed once in a run: name another epoch's differently.
        mailbox: where the run is. While it cannot be reached, claims are tried again.
        learner_id: this node's.
        load: makes the item of a unit; called on the background thread, one call at a time.
        prefetch: units that are claimed beyond the one that was taken last.

    Raises:
        ValueError, TypeError: an argument is not usable; says which and why.

    The iterator raises what ``load`` or the mailbox raised, after the items loaded before.

    """
    check_mailbox(mailbox)
    if not isinstance(units, Mapping):
        raise TypeError(
            f"units must be a mapping of ids to what load is given, not {type(units).__name__}"
        )
    for unit in units:
        layout.unit_key(unit)
    if not callable(load):
        raise TypeError(f"load must be a function of one unit's value, not {load!r}")
    learner = layout.check_learner_id(learner_id)
    return SharedQueue(dict(units), mailbox, learner, load, count_of("prefetch", prefetch))


async def claim_unit(mailbox: Mailbox, clock: Clock, unit: str, learner: str) -> bool:
    """Claim a unit; whether it is this learner's now.

    The claim is read back whatever the put answered: an earlier attempt may have landed unheard,
    or an earlier process of this id made it.
    """
    key = layout.unit_key(unit)
    while True:
        await mailbox.put_if_absent(key, learner.encode())
        try:
            holder = await get_at_most(mailbox, key, len(learner.encode()))
        except ProtocolError:  # longer than this learner's id, so that it is another's
            return False
        if holder is not None:
            return bytes(holder) == learner.encode()
        await clock.sleep(1.0)  # somebody deleted it in between, so that it is free again


@dataclass(frozen=True, slots=True)
class _End:
    """After the last item: nothing more to claim, or what went wrong."""

    error: BaseException | None


class SharedQueue[V, T](AbstractContextManager["SharedQueue[V, T]"], Iterator[T]):
    """What ``shared_queue`` returns; any number of threads may take items from it."""

    def __init__(
        self,
        units: dict[str, V],
        mailbox: Mailbox,
        learner: str,
        load: Callable[[V], T],
        prefetch: int,
    ) -> None:
        """Start nothing: ``with`` does."""
        self._units = units
        self._mailbox = mailbox
        self._learner = learner
        self._load = load
        self._room = threading.Semaphore(prefetch)
        self._ready: queue.SimpleQueue[tuple[T] | _End] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._claiming: Future[bool] | None = None
        self._closed = False
        self._process = os.getpid()
        self._store: Store | None = None
        self._thread: threading.Thread | None = None

    @override
    def __enter__(self) -> Self:
        """Begin to claim and to load."""
        if self._store is not None:
            raise RuntimeError("a shared queue serves one with block; make another for the next")
        name = f"gradientmail-queue-{self._learner}"
        self._store = Store(self._mailbox, name)
        # A daemon, so that a loader that hangs does not keep the process alive.
        self._thread = threading.Thread(
            target=self._fill, args=(self._store,), name=f"{name}-load", daemon=True
        )
        self._thread.start()
        return self

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Claim nothing more, and end the threads; a loader that is under way is waited for."""
        if self._store is None or self._thread is None or self._process != os.getpid():
            return
        with self._lock:
            self._closed = True
            if self._claiming is not None:
                self._claiming.cancel()
        self._room.release()
        self._ready.put(_End(None))  # wakes a thread that waits for an item
        self._store.stop()
        self._thread.join(CLOSE_SECONDS if kind is None else STOP_SECONDS)

    @override
    def __next__(self) -> T:
        """Wait for the next item and take it."""
        self._check_usable()
        outcome = self._ready.get()
        if isinstance(outcome, _End):
            self._ready.put(outcome)  # for whoever asks again
            self._check_usable()
            if outcome.error is None:
                raise StopIteration
            raise outcome.error
        self._room.release()
        return outcome[0]

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                "a shared queue cannot be read in a child made by fork, where its threads do not "
                "run; make it there, with another learner_id, or read it in the parent"
            )
        if self._store is None:
            raise RuntimeError("a shared queue is read inside its with block")
        if self._closed:
            raise RuntimeError("this shared queue is closed; take items inside its with block")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a shared queue cannot be copied or sent to another process; make one there, with "
            "another learner_id"
        )

    # The background thread

    def _fill(self, store: Store) -> None:
        error: BaseException | None = None
        try:
            for item in self._items(store):
                self._ready.put((item,))
                del item
        except BaseException as raised:
            error = raised
        self._ready.put(_End(error))

    def _items(self, store: Store) -> Iterator[T]:
        """Load what can be claimed. A generator: a loader's StopIteration becomes an error."""
        for unit, value in self._units.items():
            self._room.acquire()
            claimed = self._claim(store, unit)
            if claimed is None:
                return
            if claimed:
                yield self._load(value)
            else:
                self._room.release()

    def _claim(self, store: Store, unit: str) -> bool | None:
        """Whether the unit is this node's now; None when the queue has been closed."""
        with self._lock:  # nothing is submitted to a loop that closing has begun to stop
            if self._closed:
                return None
            work = claim_unit(store.mailbox, store.clock, unit, self._learner)
            self._claiming = store.submit(work)
        return self._claiming.result()
