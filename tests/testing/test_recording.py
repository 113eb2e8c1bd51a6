"""The store that checks, with deltas of every format."""

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.precision import encode_tensors, scale_name
from gradientmail.backend.numpy import NumpyBackend
from gradientmail.clock import inline
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.payload import PayloadLayout
from gradientmail.exchange.records import Manifest, SnapshotRecord
from gradientmail.exchange.sealing import Payload, Sealing
from gradientmail.node import planned
from gradientmail.run import arrays_over
from gradientmail.schema import TensorSpec, schema_digest
from gradientmail.testing.recording import RecordingMailbox
from gradientmail.verification.reading import memory

BACKEND = NumpyBackend()
SCHEMA = (TensorSpec("w", "F32", (64,)),)
VALUES = np.linspace(-1, 1, 64, dtype=np.float32)
NAN = {"F32": b"\0\0\xc0\x7f", "F16": b"\0\x7e", "BF16": b"\xc0\x7f", "F8_E4M3": b"\x7f"}


async def _store(
    exchange: Exchange, key_of: Callable[[str, str], str], of: PayloadLayout, buffer: memoryview
) -> Payload:
    return await exchange.store(await exchange.seal(Sealing(buffer, of), key_of))


async def _publish(dtype: str | None, damage: bytes | None, *, compressed: bool) -> list[str]:
    """What the store tells of a run's first snapshot."""
    store = RecordingMailbox(backend=BACKEND, now=lambda: 0.0)
    exchange = Exchange(store, offload=inline, take=memory, compressed=compressed)
    algorithm = DiLoCo(sync_every=1, fragments=1, in_flight=1, delta_dtype=dtype)
    fragment = planned(SCHEMA, algorithm)[0]
    theta = fragment.theta.blank(memory)
    first = await _store(exchange, partial(layout.init_blob_key, 0), fragment.theta, theta)
    manifest = Manifest(
        schema=SCHEMA,
        plan=(("w",),),
        algorithm=algorithm.to_json(),
        init=(first.ref,),
        created_by="a",
    )
    await exchange.create_manifest(manifest)
    delta = fragment.delta.blank(memory)
    out = arrays_over(BACKEND, delta, fragment.delta)
    encode_tensors(BACKEND, {"w": VALUES.copy()}, fragment.specs, dtype, out)
    if damage is not None:
        name = scale_name("w") if dtype == "F4" else "w"
        start = fragment.delta.slots[name].start
        delta[start : start + len(damage)] = damage
    key_of = partial(layout.snapshot_blob_key, 0, "a")
    payload = await _store(exchange, key_of, fragment.delta, delta)
    record = SnapshotRecord(
        learner="a",
        round=0,
        local_step=1,
        steps=1,
        tokens=8,
        base_version=0,
        rounds_seen=-1,
        step_seconds=1.0,
        schema_digest=schema_digest(SCHEMA),
        final=False,
        payload=payload.ref,
    )
    await exchange.put_snapshot(record)
    return [f"{one.invariant}: {one.detail}" for one in store.violations]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", [None, "F32", "F16", "BF16", "F8_E4M3", "F4"])
def test_a_delta_that_is_not_finite_is_told_whatever_its_format(
    dtype: str | None, compressed: bool
) -> None:
    nan = b"\xff" if dtype == "F4" else NAN[dtype or "F32"]
    assert asyncio.run(_publish(dtype, None, compressed=compressed)) == []
    assert asyncio.run(_publish(dtype, nan, compressed=compressed)) == [
        "snapshots: its delta is not finite (at 0.000 s)"
    ]
