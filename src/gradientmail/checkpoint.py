"""``Session.state_dict`` and ``load_state_dict``: a node that stops and comes back as if paused.

The state holds what this node has and nobody else: its counters, its parameters where they differ
from the commits, and which commits those started from. A node that loads it stands where one stands
that was paused meanwhile. A fragment that the run has not committed since goes on with its local
steps. One that has been committed is aligned with that commit, exactly as a live learner does:
with ``mixing`` part of the local progress stays, without it none, since its delta would be one from
a version that no longer counts.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradientmail.backend.base import Array, Backend, Parameters
from gradientmail.events import NothingShared, StateRestored
from gradientmail.exchange.records import RoundRecord
from gradientmail.learner import Counts, Learner
from gradientmail.run import Fragment, Run, arrays_over

COUNTS_BELOW = 2**62

FORMAT = 1
"""Of the state; a later version reads older ones."""

_FRAGMENT = {"version": int, "anchor": str, "steps": int, "tokens": int, "trained": int}
_STATE = {
    "format": int,
    "run": str,
    "learner": str,
    "local_step": int,
    "since_published": int,
    "step_seconds": float,
    "in_flight": list,
    "fragments": list,
    "parameters": dict,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Saves and restores one node's state. Used on the training thread, between steps."""

    run: Run
    name: str
    """This node's learner id."""
    learner: Learner
    parameters: Parameters
    backend: Backend

    # Saving

    def save(self) -> dict[str, Any]:
        """The state: text, numbers, lists, dicts, and arrays of the model's framework, on the host.

        The arrays are copies, as large together as the model at most.
        """
        counts = self.learner.counts()
        arrays: dict[str, Array] = {}
        rows: list[dict[str, Any]] = []
        for fragment, version in zip(self.run.fragments, self.learner.versions, strict=True):
            p = fragment.index
            row = (version.number, version.payload.ref.sha256)
            row += (counts.steps[p], counts.tokens[p], counts.trained[p])
            rows.append(dict(zip(_FRAGMENT, row, strict=True)))
            if counts.trained[p] or self.run.algorithm.mixing:
                arrays.update(self._copy(fragment))
        return {
            "format": FORMAT,
            "run": self._run_id(),
            "learner": self.name,
            "local_step": counts.local_step,
            "since_published": counts.since_published,
            "step_seconds": counts.step_seconds,
            "in_flight": list(self.learner.in_flight()),
            "fragments": rows,
            "parameters": arrays,
        }

    def _copy(self, fragment: Fragment) -> dict[str, Array]:
        return self._copied(fragment)[1]

    def _copied(self, fragment: Fragment) -> tuple[memoryview, dict[str, Array]]:
        """The parameters as they are, as a payload and the arrays over it."""
        buffer = memoryview(bytearray(fragment.theta.nbytes))  # it may be kept for ever: not pooled
        arrays = arrays_over(self.backend, buffer, fragment.theta)
        self.parameters.capture(arrays)()
        return buffer, arrays

    def _run_id(self) -> str:
        refs = "".join(ref.sha256 for ref in self.run.manifest.init)
        return hashlib.sha256(refs.encode()).hexdigest()

    # Leaving

    def has_moved_unseen(self) -> bool:
        """Whether the model was trained, and no step counted."""
        return not self.learner.local_step and any(map(self._has_moved, self.run.fragments))

    def unshared(self, *, unseen: bool, reached: bool) -> NothingShared | None:
        """What to tell of fragments that no round has anything of, None when there is nothing.

        ``unseen`` was asked before commits were brought that came meanwhile; ``reached`` tells
        whether anything of this node was ever in time for a round.
        """
        counts, fragments = self.learner.counts(), len(self.run.fragments)
        steps = counts.local_step - self.learner.resumed_at
        left = sum(one >= steps for one in counts.steps) if reached else fragments
        if not (steps and left) and not unseen:
            return None
        every = -(-self.run.algorithm.sync_every // fragments)
        return NothingShared(
            learner=self.name, steps=steps, every=every, fragments=left, of=fragments
        )

    def _has_moved(self, fragment: Fragment) -> bool:
        """Whether parameters differ from the commit that they were aligned with."""
        buffer, _ = self._copied(fragment)
        committed = self.learner.versions[fragment.index].payload
        return any(
            buffer[slot.start : slot.stop] != committed.data(name)
            for name, slot in fragment.theta.slots.items()
            if name not in self.run.averaged
        )

    # Restoring

    def restore(
        self, state: Mapping[str, Any], history: Mapping[int, RoundRecord]
    ) -> StateRestored:
        """Put ``state`` into the model and the learner, which has made no step yet.

        ``history`` are the run's newest records. ``ValueError`` or ``TypeError``, nothing being
        changed, for a state that is none, or another run's.
        """
        if self.learner.local_step:
            raise RuntimeError(
                "load_state_dict comes before the first step: make the session, load its state, "
                "then train"
            )
        rows = self._checked(state)
        kept = [self._is_kept(p, row, state) for p, row in enumerate(rows)]
        staged = {p: self._staged(p, state["parameters"]) for p in range(len(rows))}
        counts, replaced = self._counts(state, kept, history)
        for fragment, version in zip(self.run.fragments, self.learner.versions, strict=True):
            p, mixing = fragment.index, self._mixing(fragment.index, kept, state)
            # First of all the commit: the user may have loaded a checkpoint over it.
            self.parameters.apply(self.parameters.stage(version.arrays))
            if staged[p] and mixing:
                self.parameters.apply(staged[p], mixing=1.0 - mixing)
        self.learner.resume(counts)
        return StateRestored(
            local_step=counts.local_step,
            kept=tuple(p for p, good in enumerate(kept) if good),
            moved=tuple(p for p, good in enumerate(kept) if not good),
            steps_replaced=replaced,
        )

    def _checked(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of the fragments, once everything is what ``save`` wrote, for this run."""
        _check("state", state, _STATE)
        if state["format"] != FORMAT:
            raise ValueError(f"the state has format {state['format']}; this version reads {FORMAT}")
        if not all(type(number) is int for number in state["in_flight"]):
            raise ValueError(
                "the state is not what state_dict() returned: its 'in_flight' is "
                f"{state['in_flight']!r:.80}"
            )
        rows: list[dict[str, Any]] = state["fragments"]
        if state["run"] != self._run_id() or len(rows) != len(self.run.fragments):
            raise ValueError(_ANOTHER_RUN)
        for p, (row, version) in enumerate(zip(rows, self.learner.versions, strict=True)):
            _check(f"state's fragment {p}", row, _FRAGMENT)
            if row["version"] > version.number:
                raise ValueError(
                    f"the state was saved at version {row['version']} of fragment {p}, and the "
                    f"mailbox has version {version.number}: it was set back, or is another copy. "
                    "Train on without load_state_dict"
                )
            same = row["version"] == version.number
            if same and row["anchor"] != version.payload.ref.sha256:
                raise ValueError(_ANOTHER_RUN)
        self._check_names(rows, state["parameters"])
        return rows

    def _check_names(self, rows: list[dict[str, Any]], arrays: Mapping[str, Array]) -> None:
        names = [{spec.name for spec in fragment.specs} for fragment in self.run.fragments]
        saved = [own for own, row in zip(names, rows, strict=True) if row["trained"]]
        for found, what in (
            (arrays.keys() - set().union(*names), "has parameters that the run does not have"),
            (set().union(*saved) - arrays.keys(), "lacks parameters that were in training"),
        ):
            if found:
                listed = ", ".join(sorted(map(repr, found))[:5]) + ", …" * (len(found) > 5)
                raise ValueError(
                    f"the state {what}: {listed}; pass what state_dict() returned, unchanged"
                )

    def _is_kept(self, p: int, row: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        """Whether the fragment's local steps go on.

        Under another name what was in flight may still be counted under the old one.
        """
        if row["version"] != self.learner.versions[p].number:
            return False
        pending = (number for number in state["in_flight"] if number > self.learner.rounds_seen)
        sent = any(self.run.schedule.fragment(number) == p for number in pending)
        return state["learner"] == self.name or not sent

    def _mixing(self, p: int, kept: list[bool], state: Mapping[str, Any]) -> float:
        """The share of the local parameters of fragment ``p`` that stays."""
        if kept[p]:
            return 1.0
        moved = state["fragments"][p]["version"] != self.learner.versions[p].number
        return self.run.algorithm.mixing if moved else 0.0

    def _staged(self, p: int, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        found = {}
        for spec in self.run.fragments[p].specs:
            if spec.name not in arrays:
                continue
            array, own = arrays[spec.name], self.learner.versions[p].arrays[spec.name]
            if not isinstance(array, type(own)):
                raise TypeError(
                    f"the state's {spec.name!r} is a {type(array).__module__}."
                    f"{type(array).__qualname__}, and state_dict() gave a {type(own).__module__}."
                    f"{type(own).__qualname__}"
                )
            array = self.backend.on_host(array)
            if (array.shape, array.dtype) != (own.shape, own.dtype):
                raise ValueError(
                    f"the state's {spec.name!r} is {array.dtype} of shape {tuple(array.shape)}, "
                    f"and the model's is {spec}"
                )
            found[spec.name] = array
        return self.parameters.stage(found) if found else {}

    def _counts(
        self, state: Mapping[str, Any], kept: list[bool], history: Mapping[int, RoundRecord]
    ) -> tuple[Counts, int]:
        """The counters to go on with, and how many local steps the run has replaced."""
        steps: list[int] = []
        tokens: list[int] = []
        trained: list[int] = []
        replaced = 0
        for p, row in enumerate(state["fragments"]):
            if kept[p]:
                steps.append(row["steps"])
                tokens.append(row["tokens"])
                trained.append(row["trained"])
                continue
            number = (self.learner.versions[p].number - 1) * len(kept) + p
            took = _taken(history.get(number), state["learner"])
            left = [max(row[name] - took[name], 0) for name in ("steps", "tokens")]
            share = self._mixing(p, kept, state)
            steps.append(math.floor(share * left[0]))
            tokens.append(math.floor(share * left[1]))
            trained.append(0)
            replaced = max(replaced, left[0])
        counts = Counts(
            local_step=state["local_step"],
            since_published=state["since_published"],
            step_seconds=state["step_seconds"],
            steps=tuple(steps),
            tokens=tuple(tokens),
            trained=tuple(trained),
        )
        return counts, replaced


_ANOTHER_RUN = (
    "the state was saved in another run than the one under this mailbox; train on without "
    "load_state_dict, or open the mailbox that it belongs to"
)


def _taken(record: RoundRecord | None, learner: str) -> dict[str, int]:
    parts = record.participants if record is not None else ()
    mine = next((part for part in parts if part.learner == learner), None)
    return {"steps": mine.steps if mine else 0, "tokens": mine.tokens if mine else 0}


def _check(what: str, value: object, kinds: Mapping[str, type]) -> None:
    """``TypeError`` unless it is a dict, ``ValueError`` for members that are not as saved."""
    if not isinstance(value, Mapping):
        raise TypeError(f"the {what} must be what state_dict() returned, not {value!r:.80}")
    for name, kind in kinds.items():
        member = value.get(name)
        good = isinstance(member, kind) and not isinstance(member, bool)
        if not good or (isinstance(member, int | float) and not 0 <= member < COUNTS_BELOW):
            raise ValueError(
                f"the {what} is not what state_dict() returned: its {name!r} is {member!r:.80}"
            )
