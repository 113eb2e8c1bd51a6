"""What a delta and an averaged buffer must be, computed apart from the exchange.

By the precision's definition and plain sums, from what was there at that moment: no line of
``deltas``, ``merge`` or ``outer`` is used.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial

from gradientmail.algorithm.precision import decode_tensors, encode_tensors, fp32_array
from gradientmail.backend.base import Array, Backend
from gradientmail.exchange.payload import sha256_hex
from gradientmail.exchange.records import RoundRecord, SnapshotRecord
from gradientmail.exchange.sealing import Payload
from gradientmail.handoff import Outgoing
from gradientmail.run import Fragment, Run, arrays_over, payload_arrays
from gradientmail.verification.arithmetic import State
from gradientmail.verification.reading import memory

LENGTHENING = {"F8_E4M3": 1.0 + 2.0**-4, "F4": 1.2}
"""How much longer a delta may get when it is rounded.

A value rounds to no more than the largest of its tensor, or block, does; at most half a step of
16 up for E4M3, and from just over 5 to 6 for E2M1.
"""
ROUNDING = 1e-5
"""Relative error of the sums of a commit in fp32."""


def delta_sha256(backend: Backend, run: Run, outgoing: Outgoing) -> str:
    """Of the payload that follows from a snapshot: ``anchor − θ`` in fp32, rounded once."""
    fragment, dtype = run.fragments[outgoing.fragment], run.algorithm.delta_dtype
    buffer = fragment.delta.blank(memory)
    differences: dict[str, Array] = {}
    for spec in fragment.specs:
        differences[spec.name] = fp32_array(backend, spec, memory)
        anchor, theta = outgoing.anchor.arrays[spec.name], outgoing.blank.arrays[spec.name]
        backend.subtract(anchor, theta, differences[spec.name])
    out = arrays_over(backend, buffer, fragment.delta)
    encode_tensors(backend, differences, fragment.specs, dtype, out)
    return sha256_hex(buffer)


def delta_arrays(
    backend: Backend, run: Run, fragment: Fragment, delta: Payload
) -> dict[str, Array]:
    """A delta as a closer decodes it."""
    blank = partial(fp32_array, backend, take=memory)
    arrays, dtype = payload_arrays(backend, delta), run.algorithm.delta_dtype
    return decode_tensors(backend, arrays, dtype, fragment.specs, blank)


def delta_fault(
    backend: Backend, run: Run, record: SnapshotRecord, delta: Payload, most_a_step: float
) -> tuple[str, str] | None:
    """Invariant and text of what is wrong with a delta that can be read.

    No step of its learner moves a value by more than ``most_a_step``.
    """
    fragment = run.fragments[run.schedule.fragment(record.round)]
    decoded = delta_arrays(backend, run, fragment, delta)
    square = sum(map(backend.sum_of_squares, decoded.values()))
    count = sum(spec.count for spec in fragment.specs)
    longer = 1.01 * LENGTHENING.get(run.algorithm.delta_dtype or "", 1.0)
    furthest = longer * most_a_step * record.steps * math.sqrt(count)
    if not math.isfinite(square):
        return "snapshots", "its delta is not finite"
    if math.sqrt(square) > furthest and not run.algorithm.mixing:
        length = f"{math.sqrt(square):g} long, {record.steps} steps go {furthest:g}"
        return "deltas", f"its delta is {length} at most"
    return None


def buffer_faults(
    backend: Backend,
    run: Run,
    record: RoundRecord,
    deltas: Mapping[str, Payload],
    before: State,
    after: State,
) -> Iterator[str]:
    """Averaged buffers that a commit does not move by the weighted mean of ``deltas``, by learner.

    What they are is read from the masters of the two versions.
    """
    fragment = run.fragments[record.fragment]
    names = [spec.name for spec in fragment.specs if spec.name in run.averaged]
    if not names or any(one.steps <= 0 for one in record.participants):
        return  # none to look at, or told already
    weights = {one.learner: one.tokens**2 / one.steps for one in record.participants}
    whole = sum(weights.values())
    found = {who: delta_arrays(backend, run, fragment, one) for who, one in deltas.items()}
    states = before.arrays(backend), after.arrays(backend)
    for name in names:
        old, new = (list(state.master(name)) for state in states)
        for place, value in enumerate(old):
            moves = (weights[who] * list(one[name])[place] for who, one in found.items())
            goal = value - math.fsum(moves) / whole
            if not abs(new[place] - goal) <= ROUNDING * (abs(value) + abs(goal)):
                yield f"{name}[{place}] is {new[place]:g}, the mean of its learners is {goal:g}"
                break
