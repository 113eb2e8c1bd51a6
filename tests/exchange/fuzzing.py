"""Every decoder of bytes that others may have written, as a target of fuzzing.

Also a script for atheris (https://github.com/google/atheris), which is no dependency::

    uv pip install atheris
    uv run --no-sync tests/exchange/fuzzing.py [target] -max_total_time=60

A target takes any bytes and must end quietly: with a value that holds what its docstring promises,
or with the documented error.
"""

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

if __name__ == "__main__":
    import atheris  # type: ignore[import-not-found]

    sys.path.insert(0, str(Path(__file__).parents[2]))
    with atheris.instrument_imports(include=["gradientmail.exchange", "gradientmail.run"]):
        pass

from tests.exchange.wire import GOLDEN, RUNS, own_bytes, random_data

from gradientmail.errors import PayloadCorrupt, ProtocolError
from gradientmail.exchange import compression, layout
from gradientmail.exchange.exchange import _open
from gradientmail.exchange.payload import PayloadLayout, sha256_hex
from gradientmail.exchange.records import (
    Beat,
    Claim,
    Manifest,
    Ref,
    RoundRecord,
    SnapshotRecord,
)
from gradientmail.run import read_run
from gradientmail.schema import TensorSpec

type Target = Callable[[bytes], object]

SPECS = (
    TensorSpec("w", "F32", (5, 3)),
    TensorSpec("h", "BF16", (7,)),
    TensorSpec("q", "F4", (32,)),
    TensorSpec("q.scale", "F8_E8M0", (1,)),
    TensorSpec("é", "F8_E4M3", ()),
)
LAYOUT = PayloadLayout(SPECS)
PAYLOAD = bytes(own_bytes(LAYOUT, random_data(list(SPECS))))
TAKEN_AT_MOST = LAYOUT.most_bytes


def take(nbytes: int) -> memoryview:
    """A buffer, which must not be larger than the schema says."""
    assert nbytes <= TAKEN_AT_MOST + 2048, f"{nbytes} bytes taken"
    return memoryview(bytearray(nbytes))


STORED = bytes(compression.compress(LAYOUT, PAYLOAD, take))


def record(
    decode: Callable[[bytes], Beat | Claim | Manifest | RoundRecord | SnapshotRecord],
) -> Target:
    """What is read comes out again, and is read as the same."""

    def target(data: bytes) -> object:
        try:
            found = decode(data)
        except ProtocolError:
            return None
        assert decode(found.to_bytes()) == found
        return found

    return target


def manifest(data: bytes) -> object:
    """A manifest, and the run that it describes."""
    try:
        found = Manifest.from_bytes(data)
        return read_run(found).fragments
    except ProtocolError:
        return None


def payload(data: bytes) -> object:
    """A payload's header: the slots lie within it, one after the other."""
    try:
        slots = LAYOUT.check(data)
    except PayloadCorrupt:
        return None
    ends = [(slot.start, slot.stop) for slot in slots.values()]
    assert slots.keys() == LAYOUT.slots.keys()
    assert all(0 < start <= stop <= len(data) for start, stop in ends)
    return ends


def frame(data: bytes) -> object:
    """A zstd frame."""
    try:
        out = compression.decompress(LAYOUT, data, take)
    except PayloadCorrupt:
        return None
    assert out.nbytes == LAYOUT.nbytes
    return out


def stored(data: bytes) -> object:
    """A stored payload under a ref that fits it, as a closer opens it."""
    sha = sha256_hex(data)
    for extension in (layout.RAW_EXT, layout.ZSTD_EXT):
        ref = Ref(layout.round_blob_key(1, sha, extension), sha, len(data))
        try:
            _open(memoryview(data), ref, LAYOUT, take)
        except PayloadCorrupt as error:
            named = ref.key in str(error)
        else:
            named = True
        assert named
    return None


def keys(data: bytes) -> object:
    """A key of any kind: what a parser reads is what a builder makes."""
    key = data.decode("utf-8", "surrogateescape" if len(data) % 2 else "replace")
    return check_key_parsers(key)


def check_key_parsers(key: str) -> bool:
    """Whether a parser takes the key; then exactly its builder must give it."""
    made: list[str] = []
    if (number := layout.parse_round_key(key)) is not None:
        made.append(layout.round_key(number))
    if (snapshot := layout.parse_snapshot_key(key)) is not None:
        made.append(layout.snapshot_key(*snapshot))
    if (claim := layout.parse_claim_key(key)) is not None:
        made.append(layout.claim_key(*claim))
    if (beat := layout.parse_beat_key(key)) is not None:
        made.append(layout.beat_key(*beat))
    if (blob := layout.parse_blob_key(key)) is not None:
        made.append(blob.key)
    if (arrival := layout.parse_arrival_key(key)) is not None:
        made.append(layout.arrival_key(*arrival))
    assert made in ([], [key]), (key, made)
    return bool(made)


TARGETS: dict[str, Target] = {
    "claim": record(Claim.from_bytes),
    "beat": record(Beat.from_bytes),
    "snapshot": record(SnapshotRecord.from_bytes),
    "round": record(RoundRecord.from_bytes),
    "manifest": manifest,
    "payload": payload,
    "frame": frame,
    "stored": stored,
    "keys": keys,
}


def seeds(target: str) -> list[bytes]:
    """Good inputs to start from."""
    patterns = {"claim": "claims/*/*", "snapshot": "snapshots/*/*", "round": "rounds/*"}
    match target:
        case "beat":
            return [b"{}", b'{"token":"5f"}']
        case "payload" | "stored":
            return [PAYLOAD, STORED]
        case "frame":
            return [STORED]
        case "keys":
            return [
                path.relative_to(GOLDEN / run).as_posix().encode()
                for run in RUNS
                for path in sorted((GOLDEN / run).rglob("*.*"))
            ] + [b"units/a", b"barriers/a/b"]
        case _:
            pattern = patterns.get(target, "manifest.json")
            return [
                path.read_bytes() for run in RUNS for path in sorted((GOLDEN / run).glob(pattern))
            ]


TOKENS = (
    *(b"null", b"true", b"-1", b"1e999", b"NaN", b"-0", b"1.5", b"18446744073709551616"),
    *(b"9" * 30, b"9" * 5000, b"[]", b"{}", b'""', b'"\\ud800"', b"[" * 40, b"[" * 5000),
    *(b'{"a":' * 3000, b"\xff", b"\x00", b"\x28\xb5\x2f\xfd", b"\xff" * 8, b"\x00" * 8),
    *(b"manifest", b"../", b"/", b".json", b"0000000001"),
)
"""Words of the formats."""


def mutated(data: bytes, random: Random) -> bytes:
    """A few changes, as a fuzzer makes them: bits, cuts, repeats, words of the formats."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 12))):
        at = random.randrange(len(changed) + 1)
        to = min(at + random.choice((1, 2, 4, 8, 40)), len(changed))
        match random.randrange(6):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << random.randrange(8)
            case 1:
                changed[at:to] = random.choice(TOKENS)
            case 2:
                del changed[at:to]
            case 3:
                changed[at:at] = changed[at:to] * random.choice((1, 2, 50))
            case 4:
                changed[at:to] = random.randbytes(to - at)
            case _:
                del changed[random.randrange(len(changed) + 1) :]
    return bytes(changed)


def peak_bytes(target: Target, data: bytes) -> int:
    """The most memory that a target took at a time."""
    tracemalloc.start()
    try:
        target(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main() -> None:
    """Fuzz one target, or all in turn by the first byte, until stopped."""
    chosen = [name for name in sys.argv[1:2] if name in TARGETS] or list(TARGETS)
    arguments = [sys.argv[0], *(one for one in sys.argv[1:] if one not in TARGETS)]

    def test_one_input(data: bytes) -> None:
        if data:
            TARGETS[chosen[data[0] % len(chosen)]](data[1:])

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        if not data or random.random() < 0.02:
            number = random.randrange(len(chosen))
            return (bytes([number]) + random.choice(seeds(chosen[number])))[:max_size]
        if random.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))[:max_size]
        return (data[:1] + mutated(data[1:], random))[:max_size]

    atheris.Setup(arguments, test_one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
