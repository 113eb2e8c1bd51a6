"""The recorded runs of the published version: every payload is what its record says."""

from collections.abc import Iterator, Mapping

import pytest
from tests.exchange.wire import GOLDEN, RUNS, recorded, take

from gradientmail.exchange import compression, layout
from gradientmail.exchange.payload import PayloadLayout, Slot, sha256_hex
from gradientmail.exchange.records import Manifest, Ref, RoundRecord, SnapshotRecord
from gradientmail.schema import TensorSpec, schema_digest

every_run = pytest.mark.parametrize("run", RUNS)


def manifest_of(run: str) -> Manifest:
    """The run's manifest."""
    return Manifest.from_bytes(recorded(run, "manifest.json")["manifest.json"])


def coded(specs: list[TensorSpec], dtype: str | None) -> PayloadLayout:
    """The tensors at the precision of a payload (F4: padded to blocks of 32, scales beside)."""
    if dtype is None:
        return PayloadLayout(specs)
    assert dtype == "F4"
    blocks = {spec.name: -(-spec.count // 32) for spec in specs}
    data = [TensorSpec(name, "F4", (32 * n,)) for name, n in blocks.items()]
    scales = [TensorSpec(f"{name}.scale", "F8_E8M0", (n,)) for name, n in blocks.items()]
    return PayloadLayout(data + scales)


def payloads(run: str) -> Iterator[tuple[Ref, PayloadLayout, str | None]]:
    """Every ref of a run, the layout that it must have, and theta's digest if one is recorded."""
    manifest = manifest_of(run)
    specs = {spec.name: spec for spec in manifest.schema}
    fragments = [[specs[name] for name in names] for names in manifest.plan]
    delta, commit = (manifest.algorithm[f"{what}_dtype"] for what in ("delta", "commit"))
    for p, ref in enumerate(manifest.init):
        yield ref, PayloadLayout(fragments[p]), None
    for data in recorded(run, "snapshots/*/*.json").values():
        snapshot = SnapshotRecord.from_bytes(data)
        fragment = fragments[snapshot.round % len(fragments)]
        yield snapshot.payload, coded(fragment, delta), None
    for data in recorded(run, "rounds/*.json").values():
        record = RoundRecord.from_bytes(data)
        fragment = fragments[record.fragment]
        update = record.update
        digest = None if update is None else update.theta_digest
        yield record.theta, PayloadLayout(fragment), digest
        kept = ["momentum"] if update is None else ["master", "momentum"]
        outer = [TensorSpec(f"{k}.{s.name}", "F32", s.shape) for k in kept for s in fragment]
        yield record.outer, PayloadLayout(outer), None
        if update is not None:
            yield update.payload, coded(fragment, commit), None


@every_run
def test_every_payload_is_what_its_record_says(run: str) -> None:
    seen = set()
    for ref, payload_layout, theta_digest in payloads(run):
        stored = (GOLDEN / run / ref.key).read_bytes()
        assert len(stored) == ref.size
        assert sha256_hex(stored) == ref.sha256
        payload = memoryview(stored)
        if ref.blob.ext == layout.ZSTD_EXT:
            payload = compression.decompress(payload_layout, stored, take)
            again = compression.compress(payload_layout, payload, take)
            assert compression.decompress(payload_layout, again, take) == payload
        slots: Mapping[str, Slot] = payload_layout.check(payload)
        assert slots is payload_layout.slots, ref.key
        assert payload[: len(payload_layout.header)] == payload_layout.header
        assert theta_digest in (None, sha256_hex(payload))
        seen.add(ref.key)
    assert seen == set(recorded(run, "blobs/**/*.safetensors*"))


@every_run
def test_snapshots_carry_the_digest_of_the_schema(run: str) -> None:
    digest = schema_digest(manifest_of(run).schema)
    for data in recorded(run, "snapshots/*/*.json").values():
        assert SnapshotRecord.from_bytes(data).schema_digest == digest


@every_run
def test_rounds_follow_their_arithmetic(run: str) -> None:
    fragments = len(manifest_of(run).plan)
    for key, data in recorded(run, "rounds/*.json").items():
        record = RoundRecord.from_bytes(data)
        r = layout.parse_round_key(key)
        assert r is not None
        assert (record.round, record.fragment) == (r, r % fragments)
        assert record.version == r // fragments + 1
        for one in record.participants:
            assert one.weight == one.tokens**2 / one.steps


@every_run
def test_the_copy_is_the_recording(run: str) -> None:
    original = GOLDEN.parents[2] / "shared" / "fixtures" / run
    if not original.is_dir():
        pytest.skip("the recordings are not beside this clone")
    copied = recorded(run, "**/*.*")
    assert copied == {
        path.relative_to(original).as_posix(): path.read_bytes()
        for path in original.rglob("*.*")
        if path.is_file()
    }
