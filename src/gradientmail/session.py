"""The user's object: a node around a model and a mailbox, with the thread of its loop half."""

import atexit
import contextlib
import gc
from collections.abc import Callable, Iterable, Mapping
from random import Random
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

from gradientmail import opened
from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.arguments import (
    MOST_SAMPLES,
    bound,
    check_arguments,
    check_finite,
    check_formats,
    positive_integer,
    settings_of,
)
from gradientmail.backend import backend_for
from gradientmail.backend.base import Backend
from gradientmail.checkpoint import Checkpoint
from gradientmail.clock import MonotonicClock
from gradientmail.errors import SessionClosed
from gradientmail.events import (
    Announcer,
    BuffersStayLocal,
    Callback,
    Closed,
    GaveUp,
    NeverClosed,
    TaskFailed,
    checked,
    log_events,
)
from gradientmail.exchange.records import Manifest
from gradientmail.handoff import Handoff, Version
from gradientmail.learner import Learner
from gradientmail.loop_thread import LoopThread
from gradientmail.mailbox.base import Mailbox
from gradientmail.node import Node, planned
from gradientmail.run import Run, arrays_over

LEAVE_SECONDS = 30.0
"""A clean exit gives the store so long to take the last words."""
ABANDON_SECONDS = 0.8
"""An exit by exception gives it so long to delete the lease."""


class Session:
    """A node of a run: one model in training, in exchange with others through a mailbox.

    Constructing it joins: it creates the run from the model's parameters or loads the newest
    committed ones into the model, and returns with this learner's lease held. Use it as a context
    manager around the training loop and call ``step`` after every optimizer step. When it has
    ended, the model holds the newest committed parameters.

    Args:
        model: a ``torch.nn.Module`` or an ``mlx.nn.Module``, whose trainable parameters are
            exchanged, or a dict of NumPy arrays by name, whose floating ones are. They are written
            in place; an MLX module's are replaced in their places, as MLX arrays are values.
        algorithm: the run's options; all nodes of a run have the same.
        mailbox: where the run is.
        learner_id: 1 to 64 of ``a-z``, ``0-9``, ``-``, unique among the run's live nodes; one that
            restarts may keep its own. Default: host name and process id.
        poll_interval: seconds between looks at the mailbox: requests cost money, waiting time.
        backend: what merges rounds when this node closes them. Default: the model's own framework,
            on the host; ``TorchDeviceBackend()`` does it on a CUDA device.
        compression: ``"off"`` or ``"zstd"``, of what this node uploads.
        lease_every: seconds between signs of life; half of ``lease_timeout`` at most.
        lease_timeout: seconds without one after which a learner counts as gone.
        callbacks: called with every event (``gradientmail.events``); see there for the thread.
        buffers: ``"average"`` exchanges floating-point buffers too, such as batch norm's: a commit
            holds their weighted mean. The same on all nodes. ``"local"``: an event names them.

    Raises:
        SchemaMismatch: the run there trains a model with other parameters.
        RunConfigMismatch: the run there has other options.
        PayloadCorrupt, ProtocolError: its parameters, or other objects of it, cannot be read.
        MailboxRefused, OSError: the store will not do it. One that is away is waited for.
        ValueError, TypeError: an argument is not usable; says which and why.

    """

    _closed_because = "this session is closed; make a new Session to train on"

    def __init__(
        self,
        model: object,
        *,
        algorithm: DiLoCo,
        mailbox: Mailbox,
        learner_id: str | None = None,
        poll_interval: float = 1.0,
        backend: Backend | None = None,
        compression: Literal["off", "zstd"] = "off",
        lease_every: float = 60.0,
        lease_timeout: float = 120.0,
        callbacks: Iterable[Callback] = (log_events,),
        buffers: Literal["local", "average"] = "local",
    ) -> None:
        """Join the run. Blocks until the model holds its newest parameters."""
        self._closed = False
        check_arguments(algorithm, mailbox, compression, backend)
        settings = settings_of(learner_id, poll_interval, lease_every, lease_timeout, compression)
        self._settings = settings
        self._algorithm = algorithm
        self._announce = Announcer(checked(callbacks))
        self._backend = backend_for(model)
        self._merging = self._backend if backend is None else backend
        self._parameters = bound(self._backend, model, buffers)
        self._model = model  # so that its id stays its own
        self.identity = self._parameters.identity | {id(model)}
        for each in {self._backend, self._merging}:
            check_formats(each, self._parameters.schema, algorithm)
        self._pool = self._backend.pool()
        self._thread = LoopThread(f"gradientmail-{settings.learner}")
        self._handoff = Handoff(wake=self._wake, tell_here=self._announce)
        self._node = Node(
            mailbox,
            settings,
            self._handoff,
            clock=MonotonicClock(),
            random=Random(),
            offload=self._thread.offload,
            hashing=self._thread.hash,
            take=self._pool.take,
            announce=self._announce,
        )
        try:
            self._learner = self._join()
        except BaseException:
            self._end(clean=False, joined=False)
            raise
        self._begin()

    # Joining

    def _begin(self) -> None:
        self._step: Callable[[int], None] = self._learner.step
        atexit.register(self._abandon)
        opened.opened(self)
        if self._parameters.local_buffers:
            self._handoff.announce(BuffersStayLocal(buffers=self._parameters.local_buffers))

    def _join(self) -> Learner:
        schema, call = self._parameters.schema, self._thread.call
        averaged, algorithm = self._parameters.averaged, self._algorithm
        manifest = call(self._node.look(schema, algorithm, averaged))
        if manifest is None:
            opened.give_way_to(self)
            largest = max(fragment.theta.nbytes for fragment in planned(schema, algorithm))
            manifest = call(self._node.find(largest)) or self._create()
        run, versions = call(self._node.enter(manifest, schema, algorithm, self._backend, averaged))
        opened.give_way_to(self)  # not before it is known that this one can join
        call(self._node.hold_lease())
        for version in versions:
            self._parameters.apply(self._parameters.stage(version.arrays))
        return self._start(run, versions)

    def _create(self) -> Manifest:
        """Copy the model's parameters and create the run from them."""
        schema = self._parameters.schema
        check_finite(self._parameters)
        buffers = []
        for fragment in planned(schema, self._algorithm):
            buffer = fragment.theta.blank(self._pool.take)
            self._parameters.capture(arrays_over(self._backend, buffer, fragment.theta))()
            buffers.append(buffer)
        return self._thread.call(
            self._node.create(schema, self._algorithm, buffers, self._parameters.averaged)
        )

    def _start(self, run: Run, versions: list[Version]) -> Learner:
        courier = self._thread.call(
            self._node.start(
                run,
                versions,
                parameters=self._parameters,
                backend=self._backend,
                merging=self._merging,
            )
        )
        learner = Learner(
            self._parameters,
            versions,
            learner=self._settings.learner,
            rounds_seen=self._node.rounds_seen,
            algorithm=self._algorithm,
            schedule=run.schedule,
            handoff=self._handoff,
            make_blank=courier.blanks.make,
        )
        self._checkpoint = Checkpoint(
            run, self._settings.learner, learner, self._parameters, self._backend
        )
        return learner

    def _wake(self) -> None:
        """Tell the loop to look at the handoff."""
        if (courier := self._node.courier) is not None:
            self._thread.notify(courier.woken.set)

    # Training

    def step(self, *, samples: int) -> None:
        """Count one optimizer step over ``samples`` samples, and exchange what is due.

        Call it after every optimizer step, from one thread. It does no I/O; with nothing due it
        takes microseconds, otherwise it copies a fragment. It waits only if the algorithm has
        ``overlap_steps``.

        Raises:
            ValueError, TypeError: ``samples`` is no positive integer, or the model has changed.
            LearnerReplaced, or whatever else ended the work in the background for good.
            SessionClosed: the session has been closed.

        """
        if type(samples) is not int or not 0 < samples <= MOST_SAMPLES:
            samples = positive_integer(samples)
        self._step(samples)

    @property
    def learner_id(self) -> str:
        """This node's name in the run."""
        return self._settings.learner

    @property
    def rounds_seen(self) -> int:
        """The newest committed round that the model holds, −1 in a fresh run."""
        return self._learner.rounds_seen

    @property
    def batch_size(self) -> int | None:
        """``⌈global_batch_size / live learners⌉``; None without a ``global_batch_size``."""
        whole = self._algorithm.global_batch_size
        return None if whole is None else -(-whole // max(self._handoff.live, 1))

    # Stopping and starting again

    def state_dict(self) -> dict[str, Any]:
        """What this node has that no commit holds, to be saved beside model and optimizer.

        Text, numbers, lists, dicts and arrays of the model's framework in host memory, copied, as
        large as the model at most: ``torch.save`` writes it and ``torch.load`` reads it with
        ``weights_only=True``. Call it between steps, on the thread that trains.

        Raises:
            SessionClosed: the session has been closed, and the model holds the newest commit.

        """
        self._check_open("take the state_dict before its end")
        return self._checkpoint.save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called, as if this node had been paused since.

        Call it before the first step. It writes all exchanged parameters: those that ``state``
        holds, or where the run has committed newer ones, these (of which ``mixing`` keeps a share
        of the local ones). The event ``StateRestored`` tells which. With another ``learner_id``
        than the state's, what was in flight is left to the old name.

        Raises:
            ValueError, TypeError: ``state`` is not usable, or another run's; nothing has changed.
            RuntimeError: this session has made a step.
            SessionClosed: the session has been closed.

        """
        self._check_open("load its state into an open one")
        records = self._thread.call(self._node.history())
        self._handoff.announce(self._checkpoint.restore(state, records))

    def _check_open(self, advice: str) -> None:
        if self._closed:
            raise SessionClosed(f"this session is closed; {advice}")

    # Leaving

    def close(self) -> None:
        """Leave the run: wait for this learner's rounds in flight, then hold the newest commit.

        Local steps since a fragment's last snapshot are dropped, or with ``flush_on_close``
        published first. Gives up when nothing has landed for ``lease_timeout`` and the takeover
        timeout together. Closing twice is no error. ``PayloadCorrupt`` when a newest commit cannot
        be read, after some tries: the model then holds the newest ones that can.
        """
        if self._closed:
            return
        self._thread.check_waitable()
        try:
            self._leave()
        except BaseException:
            self._end(clean=False)
            raise
        self._end(clean=True)

    def _leave(self) -> None:
        unseen = self._checkpoint.has_moved_unseen()
        missed = self._learner.leave(self._node.patience)
        courier, failed, patience = self._node.courier, None, self._node.patience()
        if missed:
            self._announce(GaveUp(rounds=missed, waited_seconds=patience))
        elif courier is not None:
            try:
                failed = self._thread.call(courier.bring_newest(), patience)
            except TimeoutError:
                error = f"they could not be looked for or fetched within {patience:g} s"
                self._announce(TaskFailed(task="fetch", error=error, repeated=False))
            self._learner.take_news()
            if event := self._checkpoint.unshared(unseen=unseen, reached=courier.in_time >= 0):
                self._announce(event)
        self._learner.settle()
        if failed is not None:
            raise failed

    def _end(self, *, clean: bool, joined: bool = True) -> None:
        """Stop the node and its thread. Waits little unless ``clean``."""
        if self._closed:
            return
        self._closed, self._step = True, self._refuse  # so that nobody else does what follows
        try:
            self._say_last_words(LEAVE_SECONDS if clean else ABANDON_SECONDS, finish=clean)
        except KeyboardInterrupt:  # whatever it waited for; the lease goes all the same
            self._say_last_words(ABANDON_SECONDS, finish=False)
            raise
        finally:
            try:
                while self._handoff.events:
                    self._announce(self._handoff.events.popleft())
                if joined:
                    name, seen = self.learner_id, self.rounds_seen
                    self._announce(Closed(learner=name, rounds_seen=seen, clean=clean))
            finally:
                self._thread.stop(0.3)
                self._node.let_go()  # the session's name outlives its ``with`` block
                if joined and self._thread.was_made_here():  # elsewhere a step may be under way
                    self._learner.let_go()
                self._pool.trim()

    def _say_last_words(self, patience: float, *, finish: bool) -> None:
        opened.closed(self)
        atexit.unregister(self._abandon)
        with contextlib.suppress(TimeoutError):  # the store hangs; the lease will run out
            self._thread.call(self._node.leave(patience=patience, finish=finish), patience + 0.3)

    def _abandon(self) -> None:
        """At interpreter exit, when nobody closed the session. In a forked child it is not ours."""
        if self._thread.is_here():
            self._announce(NeverClosed(learner=self.learner_id))
            self._end(clean=False)
            gc.collect()  # cancelled calls hold views of buffers, whose classes are about to go

    def _refuse(self, _: int) -> None:
        raise SessionClosed(self._closed_because)

    # Towards other sessions of this process

    def give_way(self) -> None:
        """Close at once: a new session takes over the model."""
        self._closed_because = "this session was closed: another Session was made with its model"
        self._handoff.fail(SessionClosed(self._closed_because))  # in case a step waits
        self._end(clean=False)

    def check_lease(self) -> None:
        """Look soon whether the learner id is still this session's."""
        self._thread.notify(self._node.check_lease)

    def disown(self) -> None:
        """Refuse to train, in a child made by fork."""
        self._closed_because = (
            "a child made by fork cannot use its parent's session; make a new one with another id"
        )
        self._step = self._refuse

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Session cannot be copied or pickled: its threads and its lease belong to this "
            "process. Copy the model, save model.state_dict() and session.state_dict(), or make "
            "another Session with another learner_id"
        )

    def __enter__(self) -> Self:
        """Nothing more: constructing it joined. ``SessionClosed`` if it has been closed."""
        if self._closed:
            self._refuse(0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; if the body raised, leave at once, publish and await nothing."""
        if kind is None:
            self.close()
        elif self._thread.is_here():  # a child made by fork has nothing to leave
            self._end(clean=False)
