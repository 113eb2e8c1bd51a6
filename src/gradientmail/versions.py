"""The committed versions that a node holds, one a fragment, and how it gets newer ones."""

from collections.abc import Callable, Sequence

from gradientmail.algorithm.outer import apply_update
from gradientmail.backend.base import Backend
from gradientmail.clock import Offload
from gradientmail.errors import PayloadCorrupt
from gradientmail.event import Event
from gradientmail.events import TaskFailed
from gradientmail.exchange.exchange import REPAIR, Exchange
from gradientmail.exchange.records import RoundRecord, Update
from gradientmail.exchange.sealing import Payload
from gradientmail.failures import in_words
from gradientmail.handoff import Version
from gradientmail.run import Fragment, Run, arrays_over, payload_arrays


class Versions:
    """What an update of the next commit is added to. Used on the loop's thread."""

    def __init__(
        self,
        run: Run,
        exchange: Exchange,
        versions: Sequence[Version],
        *,
        backend: Backend,
        offload: Offload,
        announce: Callable[[Event], None],
    ) -> None:
        """``versions`` are what the model holds."""
        self._run = run
        self._exchange = exchange
        self._newest = list(versions)
        self._backend = backend
        self._offload = offload
        self._announce = announce

    def put(self, fragment: int, version: Version) -> None:
        """Hold a newer one."""
        self._newest[fragment] = version

    def clear(self) -> None:
        """Hold none; nothing can be asked for afterwards."""
        self._newest.clear()

    async def theta(self, record: RoundRecord) -> Payload | None:
        """The parameters of a commit: held, or rebuilt from the update, or fetched.

        None when a newer commit has replaced them. ``PayloadCorrupt`` naming the key when they
        cannot be read, or are gone though nothing has.
        """
        fragment = self._run.fragments[record.fragment]
        held = self._exchange.held(record.theta)
        if held is not None:
            return held
        base = self._newest[record.fragment]
        if record.update is not None and base.number == record.version - 1:
            rebuilt = await self._rebuild(fragment, base, record, record.update)
            if rebuilt is not None:
                return rebuilt
        payload = await self._exchange.fetch(record.theta, fragment.theta)
        if payload is None:
            successor = await self._exchange.round(record.round + len(self._run.fragments))
            if successor is None:
                raise PayloadCorrupt(f"{record.theta.key} is missing from the mailbox. {REPAIR}")
        return payload

    async def _rebuild(
        self, fragment: Fragment, base: Version, record: RoundRecord, update: Update
    ) -> Payload | None:
        """``Θ_old + update`` if that gives the committed bytes, else None."""
        if fragment.update is None:
            return None
        try:
            payload = await self._exchange.fetch(update.payload, fragment.update)
        except PayloadCorrupt as error:
            self._announce(TaskFailed(task="fetch", error=in_words(error), round=record.round))
            return None
        if payload is None:
            return None
        buffer = await self._offload(self._add_update, fragment, base, payload)
        if await self._exchange.sha256(buffer) != update.theta_digest:
            return None
        return self._exchange.hold(record.theta, buffer, fragment.theta)

    def _add_update(self, fragment: Fragment, base: Version, update: Payload) -> memoryview:
        buffer = fragment.theta.blank(self._exchange.take)
        apply_update(
            self._backend,
            fragment.specs,
            base.arrays,
            payload_arrays(self._backend, update),
            self._run.algorithm.commit_dtype,
            arrays_over(self._backend, buffer, fragment.theta),
            self._exchange.take,
        )
        return buffer
