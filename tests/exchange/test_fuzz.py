"""Decoders under fire: the documented error and nothing else, in bounded memory."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.exchange import fuzzing
from tests.exchange.fuzzing import LAYOUT, PAYLOAD, TARGETS, mutated, peak_bytes, seeds

from gradientmail.exchange.records import ROUND_LIMIT, SMALL_LIMIT

every_target = pytest.mark.parametrize("name", TARGETS)
ROUNDS = 400


@every_target
def test_what_is_good_passes(name: str) -> None:
    found = [TARGETS[name](data) for data in seeds(name)]
    assert found
    if name != "stored":
        assert all(one is not None for one in (found[:1] if name == "payload" else found))


@every_target
def test_mutations_end_in_the_documented_error(name: str) -> None:
    """A fixed share here, the same everywhere; ``fuzzing.py`` goes on from it."""
    print(f"seed {name}")
    random = Random(name)
    good = seeds(name)
    for _ in range(ROUNDS):
        data = mutated(random.choice(good), random)
        if random.random() < 0.3:
            data = mutated(data, random)
        TARGETS[name](data)


@every_target
@given(data=st.binary(max_size=300))
@example(data=b"")
def test_any_bytes_end_in_the_documented_error(name: str, data: bytes) -> None:
    TARGETS[name](data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("name", ["claim", "beat", "snapshot", "round", "manifest"])
@given(data=st.data())
def test_records_with_any_json_in_any_place(name: str, data: st.DataObject) -> None:
    row = json.loads(data.draw(st.sampled_from(seeds(name)[:3])))
    places = [(row, key) for key in row]
    for value in row.values():
        if isinstance(value, dict):
            places += [(value, inner) for inner in value]
        elif isinstance(value, list):
            places += [(value, index) for index in range(min(len(value), 2))]
    for _ in range(data.draw(st.integers(1, 2))):
        if places:
            holder, key = data.draw(st.sampled_from(places))
            holder[key] = data.draw(json_values)
    TARGETS[name](json.dumps(row).encode())


KEY_PARTS = st.sampled_from(
    ["rounds", "snapshots", "claims", "manifest", "leases", "blobs", "init", "units", "barriers",
     "0000000001", "0000000001.json", "001.json", "000.json", "1000.json", "a", "a.json", "A.json",
     "0" * 64 + ".safetensors", "0" * 64 + ".safetensors.zst", "a" * 65, "..", ".", "", "é",
     "0000000001\n", "٠٠٠٠٠٠٠٠٠١.json", "000", "0001", "1000000000"]
)  # fmt: skip


@given(st.lists(KEY_PARTS, max_size=5))
def test_keys_of_familiar_parts(parts: list[str]) -> None:
    fuzzing.check_key_parsers("/".join(parts))


@given(st.text(max_size=40))
def test_keys_of_any_text(key: str) -> None:
    fuzzing.check_key_parsers(key)


BOMBS = {
    "nested": b"[" * SMALL_LIMIT,
    "nested objects": b'{"a":' * (SMALL_LIMIT // 5),
    "empty lists": b"[" + b"[]," * (SMALL_LIMIT // 3 - 2) + b"[]]",
    "one long string": b'"' + b"x" * (SMALL_LIMIT - 2) + b'"',
    "escapes": b'"' + b"\\u00e9" * (SMALL_LIMIT // 6 - 1) + b'"',
    "long integer": b"9" * SMALL_LIMIT,
    "many members": b"{" + b",".join(b'"%d":0' % n for n in range(SMALL_LIMIT // 9)) + b"}",
    "too large": b" " * (ROUND_LIMIT + 1),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["claim", "beat", "snapshot", "round", "manifest", "payload"])
def test_memory_is_bounded_by_what_was_stored(name: str, bomb: str) -> None:
    """A small multiple of the object, which is itself limited by its kind."""
    data = BOMBS[bomb]
    if name == "payload":
        data = len(data).to_bytes(8, "little") + data + PAYLOAD
    assert peak_bytes(TARGETS[name], data) < 40 * min(len(data), ROUND_LIMIT) + 2**16


def zeros(nbytes: int) -> bytes:
    """A frame that says little and holds much: blocks of one byte repeated."""
    blocks = b"".join(
        (min(2**17, nbytes - start) << 3 | 2 | (start + 2**17 >= nbytes)).to_bytes(3, "little")
        + b"\0"
        for start in range(0, nbytes, 2**17)
    )
    return b"\x28\xb5\x2f\xfd\x00\x88" + blocks  # no size in the header, a window of 128 MiB


@pytest.mark.parametrize("nbytes", [LAYOUT.nbytes, LAYOUT.nbytes + 1, 2**20, 2**32])
def test_a_frame_that_would_grow_takes_the_memory_of_the_schema(nbytes: int) -> None:
    assert peak_bytes(TARGETS["frame"], zeros(nbytes)) < 2**18 + len(zeros(nbytes))


def test_a_process_with_little_memory_survives_every_bomb() -> None:
    """Also what is not Python's own memory: zstd's window, the JSON parser's stack."""
    code = (
        "import resource\n"
        "from tests.exchange.test_fuzz import BOMBS, zeros\n"
        "from tests.exchange.fuzzing import TARGETS\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))\n"
        "for data in [*BOMBS.values(), zeros(2**20), zeros(2**32)]:\n"
        "    for target in TARGETS.values():\n"
        "        target(data)\n"
        "print('survived')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert ended.stdout == "survived\n", ended.stderr[-2000:]


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is no dependency of the tests"
)
def test_atheris_finds_nothing_in_a_short_run() -> None:
    ended = subprocess.run(
        [sys.executable, fuzzing.__file__, "-runs=20000", "-max_total_time=20", "-seed=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
