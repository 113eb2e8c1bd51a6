"""A store that knows the protocol: it checks every write and delete against what a run may do.

All invariants of ``gradientmail.verification`` are checked at the moment of each commit, with the
deltas still there, and beside them those that only a witness can see: who comes before whom, and
that nothing is deleted while somebody may need it.
"""

import hashlib
import math
from collections.abc import Awaitable, Buffer, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import override

from gradientmail.backend.base import Backend
from gradientmail.collecting import judge
from gradientmail.errors import PayloadCorrupt, ProtocolError
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.layout import BlobKey
from gradientmail.exchange.payload import sha256_hex
from gradientmail.exchange.records import Manifest, Ref, RoundRecord, SnapshotRecord
from gradientmail.exchange.sealing import Payload
from gradientmail.handoff import Outgoing
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.run import Run, read_run
from gradientmail.sweeping import stale
from gradientmail.testing.recomputing import buffer_faults, delta_fault, delta_sha256
from gradientmail.testing.virtual_time import at_once
from gradientmail.verification import INVARIANTS, Violation
from gradientmail.verification.arithmetic import State
from gradientmail.verification.commits import Commits
from gradientmail.verification.reading import reading_exchange
from gradientmail.verification.structure import (
    MOST_BEATS,
    leftover_violations,
    record_violations,
)

WITNESSED: Mapping[str, str] = MappingProxyType(
    dict(INVARIANTS)
    | {
        "order": "a record comes after all that it names; a claim follows the commit before it",
        "deletes": "nothing is deleted that a node may still need",
        "deltas": "a delta is how far its learner's parameters were from their anchor when it was "
        "due, rounded once; without mixing, no longer than its steps can have gone",
        "buffers": "an averaged buffer moves by the weighted mean of its learners",
        "counts": "without mixing, no step of a learner counts in two commits of one fragment",
        "anchors": "what a learner measures its delta from is a committed version, to the byte",
        "told": "a node that says that it committed has committed",
        "lives": "nobody is called lost while it lives and reaches the store",
        "nodes": "a node ends with an error only when another process has its id",
        "progress": "a round commits within the stated time whenever one node and the store live",
        "convergence": "after quiet every live node holds the newest version of all fragments",
        "tidy": "after quiet nothing is left that no node needs",
    }
)
"""What a simulated world checks, by name."""


class RecordingMailbox(MemoryMailbox):
    """A store in memory that collects violations, and a hash of everything that happened."""

    def __init__(
        self,
        *,
        backend: Backend,
        now: Callable[[], float],
        most_a_step: float = math.inf,
        averaged: Iterable[str] = (),
    ) -> None:
        """``backend`` computes commits again; ``now`` is when, for the history.

        No step of a learner moves a value further than ``most_a_step``. ``averaged`` are the
        models' buffers.
        """
        super().__init__()
        self.violations: list[Violation] = []
        self.records: list[RoundRecord] = []
        """Every commit, in order."""
        self.run: Run | None = None
        self.most_objects = 0
        self.most_beats = 0
        self.operations = 0
        """Writes and deletes that took effect."""
        self.committed_at = 0.0
        self._backend = backend
        self._now = now
        self._most_a_step = most_a_step
        self._averaged = frozenset(averaged)
        self._expected: dict[tuple[int, str], set[str]] = {}
        """By round and learner, the sha256 of the deltas that follow from its snapshots."""
        self._plain: dict[str, str] = {}
        """By key, the sha256 that compressed parameters have as safetensors."""
        self._history = hashlib.sha256()
        self._foreign: set[str] = set()
        self._exchange: Exchange | None = None
        self._commits: Commits | None = None
        self._states: dict[int, State | None] = {}
        self._shared: set[str] = set()
        self._counted: dict[tuple[str, int], int] = {}
        self._beat_at: dict[str, float] = {}
        """When each beat was created that is there."""

    @property
    def history(self) -> str:
        """A hash of all writes and deletes so far, with their times."""
        return self._history.hexdigest()

    @property
    def objects(self) -> Mapping[str, bytes]:
        """What is in the store now."""
        return MappingProxyType(self._objects)

    def plant(self, key: str, data: bytes) -> bool:
        """Put an object there as somebody would who keeps to nothing; not if one is there."""
        self._foreign.add(key)
        return at_once(self.put_if_absent(key, data))

    def share(self, learner: str) -> None:
        """Several processes have this id, one after the other or at once: steps begin anew."""
        self._shared.add(learner)

    def expect(self, learner: str, outgoing: Outgoing) -> None:
        """A learner has taken a snapshot of its parameters, and may publish its delta."""
        assert self.run is not None
        expected = self._expected.setdefault((outgoing.round, learner), set())
        expected.add(delta_sha256(self._backend, self.run, outgoing))

    def plain_sha256(self, theta: Ref) -> str:
        """The sha256 of committed parameters as safetensors, whatever codec stored them."""
        return self._plain.get(theta.key, theta.sha256)

    def tell(self, invariant: str, key: str, detail: str) -> None:
        """Note a violation."""
        assert invariant in WITNESSED, invariant
        self.violations.append(Violation(invariant, key, f"{detail} (at {self._now():.3f} s)"))

    # Every operation that changes something

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        created = await super().put_if_absent(key, data)
        if created:
            self._note("put", key)
            self.most_objects = max(self.most_objects, len(self._objects))
            if key not in self._foreign:
                self._created(key, self._objects[key])
        return created

    @override
    async def delete(self, keys: Iterable[str], /) -> None:
        wanted = tuple(keys)
        for key in wanted:
            if key in self._objects:
                self._note("delete", key)
                self._beat_at.pop(key, None)
                if key not in self._foreign:
                    self._deleting(key)
        await super().delete(wanted)

    def _note(self, what: str, key: str) -> None:
        self.operations += 1
        self._history.update(f"{self._now():.9f} {what} {key}\n".encode())

    def _created(self, key: str, data: bytes) -> None:
        if (number := layout.parse_round_key(key)) is not None:
            self._commit(number, key, data)
        elif (snapshot := layout.parse_snapshot_key(key)) is not None:
            self._snapshot(*snapshot, key, data)
        elif (blob := layout.parse_blob_key(key)) is not None:
            if hashlib.sha256(data).hexdigest() != blob.sha256:
                self.tell("payloads", key, "its bytes do not hash to its key")
        elif (claim := layout.parse_claim_key(key)) is not None:
            self._claim(*claim, key)
        elif (beat := layout.parse_beat_key(key)) is not None:
            self._beat_at[key] = self._now()
            self.most_beats = max(self.most_beats, len(self._beat_at))
            beats = sum(other.startswith(layout.beats_prefix(beat[0])) for other in self._objects)
            if beats > MOST_BEATS:
                self.tell("leases", key, f"{beats} beats")
        elif key == layout.MANIFEST:
            self._manifest(data)
        elif layout.parse_swept_key(key) is None:
            self.tell("order", key, "no node writes such an object")

    # What may come when

    def _manifest(self, data: bytes) -> None:
        self.run = read_run(Manifest.from_bytes(data))
        self._exchange = reading_exchange(self)
        self._commits = Commits(self.run, self._exchange, self._backend, self._tell_again)
        if self.run.averaged != self._averaged:
            self.tell("manifest", layout.MANIFEST, f"buffers are {sorted(self.run.averaged)}")
        for fragment in self.run.fragments:
            self._put(fragment.index, at_once(self._commits.initial(fragment)))

    def _put(self, fragment: int, state: State | None) -> None:
        """Hold a version that has been committed."""
        self._states[fragment] = state
        if state is not None and state.theta.ref.key.endswith(layout.ZSTD_EXT):
            self._plain[state.theta.ref.key] = sha256_hex(state.theta.buffer)

    def _claim(self, number: int | None, attempt: int, key: str) -> None:
        if number is not None and number > len(self.records):
            self.tell("order", key, f"claimed before round {number - 1} is committed")
        if attempt > 1 and layout.claim_key(number, attempt - 1) not in self._objects:
            late = number is not None and number < len(self.records)
            if not late:  # then the earlier ones were swept
                self.tell("order", key, "the claim before it is not there")

    def _snapshot(self, number: int, learner: str, key: str, data: bytes) -> None:
        record = SnapshotRecord.from_bytes(data)
        if number < len(self.records):
            return  # late: nobody will look at it
        if record.payload.key not in self._objects:
            self.tell("order", key, "its payload is not there yet")
        else:
            self._check_delta(record)
        if record.rounds_seen >= len(self.records):
            self.tell("anchors", key, f"has seen round {record.rounds_seen}, not committed yet")
        # With mixing a part of what was counted stays in the parameters, and is counted again.
        if self._counts_once(learner) and self.run is not None and record.steps:
            fragment = self.run.schedule.fragment(number)
            counted = self._counted.get((learner, fragment), 0)
            if not 0 < record.steps <= record.local_step - counted:
                self.tell(
                    "counts",
                    key,
                    f"{record.steps} steps at local step {record.local_step}, though those up to "
                    f"{counted} are in a commit",
                )

    def _counts_once(self, learner: str) -> bool:
        mixing = self.run is None or self.run.algorithm.mixing
        return not mixing and learner not in self._shared

    def _check_delta(self, record: SnapshotRecord) -> None:
        """Whether a delta can be merged, and is what its learner's snapshot gives."""
        delta = self._delta(record)
        if delta is None or self.run is None:
            return
        fault = delta_fault(self._backend, self.run, record, delta, self._most_a_step)
        if fault is not None:
            self.tell(fault[0], record.key, fault[1])
        expected = self._expected.get((record.round, record.learner))
        if expected is not None and record.steps and sha256_hex(delta.buffer) not in expected:
            self.tell("deltas", record.key, "its delta is not that of a snapshot, rounded once")

    def _delta(self, record: SnapshotRecord) -> Payload | None:
        """The payload of a snapshot; None, told, when it cannot be read."""
        run, exchange = self.run, self._exchange
        if run is None or exchange is None:
            return None
        fragment = run.fragments[run.schedule.fragment(record.round)]
        try:
            return at_once(exchange.fetch(record.payload, fragment.delta))
        except PayloadCorrupt as error:
            self.tell("snapshots", record.key, str(error))
            return None

    def _commit(self, number: int, key: str, data: bytes) -> None:
        if number != len(self.records) or self.run is None or self._commits is None:
            self.tell("records", key, f"round {len(self.records)} comes next")
            return
        record = RoundRecord.from_bytes(data)
        for violation in record_violations(self.run, number, record):
            self._tell_again(violation)
        fragment = self.run.schedule.fragment(number)
        deltas: dict[str, Payload] = {}
        for one in record.participants:
            self._counted[one.learner, fragment] = one.local_step
            delta = self._hash_delta(number, one.learner)
            if delta is not None:
                deltas[one.learner] = delta
        for ref in record.payloads:
            if ref.key not in self._objects:
                self.tell("order", key, f"{ref.key} is not there yet")
        old = self._states.get(fragment)
        new = at_once(self._commits.check(record, old, complete=True))
        self._put(fragment, new)
        if deltas and old and new and len(deltas) == len(record.participants):
            for text in buffer_faults(self._backend, self.run, record, deltas, old, new):
                self.tell("buffers", key, text)
        self._expected = {at: one for at, one in self._expected.items() if at[0] > number}
        self.records.append(record)
        self.committed_at = self._now()
        last, fragments = number, len(self.run.fragments)
        for violation in leftover_violations(self._objects, last, fragments):
            self._tell_again(violation)

    def _hash_delta(self, number: int, learner: str) -> Payload | None:
        """Without the exchange's own check, which may be what is broken; the delta, if whole."""
        key = layout.snapshot_key(number, learner)
        try:
            record = SnapshotRecord.from_bytes(self._objects.get(key, b""))
        except ProtocolError as error:
            self.tell("snapshots", key, str(error))
            return None
        ref = record.payload
        if hashlib.sha256(self._objects.get(ref.key, b"")).hexdigest() != ref.sha256:
            self.tell("snapshots", ref.key, "is not what its record says")
            return None
        return self._delta(record) if self._averaged else None

    def leftovers(self) -> list[str]:
        """What is there and no node needs; vandals' objects too."""
        if self.run is None:
            return []
        fragments, last = len(self.run.fragments), len(self.records) - 1
        return [key for key in self._objects if stale(key, last, fragments)]

    # What may go when

    def _deleting(self, key: str) -> None:
        reason = self._why_needed(key)
        if reason is not None:
            self.tell("deletes", key, reason)

    def _why_needed(self, key: str) -> str | None:
        if key == layout.MANIFEST or layout.parse_round_key(key) is not None:
            return "it is kept for good"
        last = len(self.records) - 1
        if (snapshot := layout.parse_snapshot_key(key)) is not None:
            open_ = snapshot[0] > last and self._counts(key, snapshot[0])
            return "its round is open and it counts" if open_ else None
        if (claim := layout.parse_claim_key(key)) is not None:
            return "its round is open" if claim[0] is None or claim[0] > last else None
        if (blob := layout.parse_blob_key(key)) is not None:
            return self._why_payload_needed(key, blob, last)
        return None

    def _why_payload_needed(self, key: str, blob: BlobKey, last: int) -> str | None:
        run = self.run
        if run is None:
            return "the run is being created"
        if blob.kind == "init":
            used = key in {ref.key for ref in run.manifest.init}
            return "the run begins with it" if used else None
        if blob.index > last:
            return "its round is open"
        if blob.kind == "snapshot" or blob.index <= last - 2 * len(run.fragments):
            return None
        used = key in {ref.key for ref in self.records[blob.index].payloads}
        return "its version may still be read" if used else None

    def beats_before(self, when: float) -> list[str]:
        """The beats that were created before ``when`` and are still there."""
        return [key for key, since in self._beat_at.items() if since < when]

    def check_sweep(self, key: str, kept: float) -> None:
        """Another learner deletes this beat: it is as old, and what it would leave is noted."""
        beat, since = layout.parse_beat_key(key), self._beat_at.get(key)
        if beat is None or since is None:
            return
        if self._now() - since < kept:
            self.tell("deletes", key, f"its learner renewed it {self._now() - since:.0f} s ago")
        noted = map(layout.parse_swept_key, self._objects)
        if not any(number is not None and number >= beat[1] for number in noted):
            self.tell("deletes", key, "nothing says that beats went so far")

    def _counts(self, key: str, number: int) -> bool:
        """Whether a snapshot can be merged; its learner may replace one that cannot."""
        run = self.run
        try:
            record = SnapshotRecord.from_bytes(self._objects[key])
        except ProtocolError:
            return False
        if run is None or record.payload.key not in self._objects:
            return False
        version = run.schedule.version(number) - 1
        return judge(record, digest=run.digest, base_version=version) is None

    def _tell_again(self, violation: Violation) -> None:
        self.tell(violation.invariant, violation.key, violation.detail)


class Witness(WrappedMailbox):
    """The store as one learner's processes reach it: what they delete of others is looked at."""

    def __init__(self, recording: RecordingMailbox, learner: str, kept_seconds: float) -> None:
        """Nobody who looks on for less than ``kept_seconds`` may sweep another's beat."""
        super().__init__(recording)
        self._recording = recording
        self._own = layout.beats_prefix(learner)
        self._kept_seconds = kept_seconds

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if call.operation == "delete":
            for key in call.keys:
                if not key.startswith(self._own):
                    self._recording.check_sweep(key, self._kept_seconds)
        return await act()
