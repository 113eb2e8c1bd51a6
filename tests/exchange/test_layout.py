"""Keys: exact, strict, and the same both ways."""

import os
import socket
import string
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.exchange.wire import RUNS, recorded

from gradientmail.exchange import layout
from gradientmail.exchange.layout import RAW_EXT, ZSTD_EXT, BlobKey

SHA = "0123456789abcdef" * 4
ids = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=64)
rounds = st.integers(0, layout.MAX_ROUND)
shas = st.binary(min_size=32, max_size=32).map(bytes.hex)
exts = st.sampled_from([RAW_EXT, ZSTD_EXT])

PARSERS: list[Callable[[str], object]] = [
    layout.parse_round_key,
    layout.parse_snapshot_key,
    layout.parse_claim_key,
    layout.parse_beat_key,
    layout.parse_blob_key,
    layout.parse_arrival_key,
]

KEYS = [
    (layout.MANIFEST, "manifest.json"),
    (layout.round_key(0), "rounds/0000000000.json"),
    (layout.round_key(1234567890), "rounds/1234567890.json"),
    (layout.snapshot_key(7, "a-1"), "snapshots/0000000007/a-1.json"),
    (layout.snapshots_prefix(7), "snapshots/0000000007/"),
    (layout.claim_key(7, 1), "claims/0000000007/001.json"),
    (layout.claim_key(7, 1000), "claims/0000000007/1000.json"),
    (layout.claim_key(None, 2), "claims/manifest/002.json"),
    (layout.claims_prefix(None), "claims/manifest/"),
    (layout.claims_prefix(7), "claims/0000000007/"),
    (layout.beat_key("a-1", 0), "leases/a-1/0000000000.json"),
    (layout.beats_prefix("a-1"), "leases/a-1/"),
    (layout.init_blob_key(2, SHA, RAW_EXT), f"blobs/init/002/{SHA}.safetensors"),
    (layout.round_blob_key(3, SHA, ZSTD_EXT), f"blobs/rounds/0000000003/{SHA}.safetensors.zst"),
    (
        layout.snapshot_blob_key(3, "b", SHA, RAW_EXT),
        f"blobs/snapshots/0000000003/b/{SHA}.safetensors",
    ),
    (layout.blobs_init_prefix(2), "blobs/init/002/"),
    (layout.blobs_round_prefix(3), "blobs/rounds/0000000003/"),
    (layout.blobs_snapshots_prefix(3), "blobs/snapshots/0000000003/"),
    (layout.unit_key("shard 1.tar"), "units/shard 1.tar"),
    (layout.arrivals_prefix("épreuve"), "barriers/épreuve/"),
    (layout.arrival_key("start", "a-1"), "barriers/start/a-1"),
]


@pytest.mark.parametrize(("built", "key"), KEYS)
def test_keys_are_exactly_these(built: str, key: str) -> None:
    assert built == key


@given(r=rounds, p=st.integers(0, layout.MAX_COUNT), n=st.integers(1, layout.MAX_COUNT))
def test_numbers_come_back(r: int, p: int, n: int) -> None:
    assert layout.parse_round_key(layout.round_key(r)) == r
    assert layout.parse_claim_key(layout.claim_key(r, n)) == (r, n)
    assert layout.parse_claim_key(layout.claim_key(None, n)) == (None, n)
    blob = layout.parse_blob_key(layout.init_blob_key(p, SHA, RAW_EXT))
    assert blob == BlobKey("init", p, None, SHA, RAW_EXT)


@given(r=rounds, n=rounds, learner=ids, sha=shas, ext=exts)
def test_ids_come_back(r: int, n: int, learner: str, sha: str, ext: str) -> None:
    assert layout.parse_snapshot_key(layout.snapshot_key(r, learner)) == (r, learner)
    assert layout.parse_beat_key(layout.beat_key(learner, n)) == (learner, n)
    for key, blob in (
        (layout.round_blob_key(r, sha, ext), BlobKey("round", r, None, sha, ext)),
        (layout.snapshot_blob_key(r, learner, sha, ext), BlobKey("snapshot", r, learner, sha, ext)),
    ):
        assert layout.parse_blob_key(key) == blob
        assert blob.key == key


@given(name=st.text(max_size=20), learner=ids)
def test_names_come_back_or_are_refused(name: str, learner: str) -> None:
    try:
        assert layout.unit_key(name) == f"units/{name}"
    except ValueError:
        with pytest.raises(ValueError, match="barrier name"):
            layout.arrival_key(name, learner)
    else:
        assert layout.parse_arrival_key(layout.arrival_key(name, learner)) == (name, learner)


def rebuilt(key: str) -> str | None:
    """What the builders make of what the parsers make of ``key``."""
    if (r := layout.parse_round_key(key)) is not None:
        return layout.round_key(r)
    if (snapshot := layout.parse_snapshot_key(key)) is not None:
        return layout.snapshot_key(*snapshot)
    if (claim := layout.parse_claim_key(key)) is not None:
        return layout.claim_key(*claim)
    if (beat := layout.parse_beat_key(key)) is not None:
        return layout.beat_key(*beat)
    if (blob := layout.parse_blob_key(key)) is not None:
        return blob.key
    if (arrival := layout.parse_arrival_key(key)) is not None:
        return layout.arrival_key(*arrival)
    return None


@given(data=st.data())
def test_whatever_parses_is_what_would_be_built(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from([key for _, key in KEYS if key != layout.MANIFEST]))
    at = data.draw(st.integers(0, len(key)))
    changed = key[:at] + data.draw(st.text(max_size=3)) + key[at + data.draw(st.integers(0, 3)) :]
    assert rebuilt(changed) in (None, changed)


@pytest.mark.parametrize("run", RUNS)
def test_every_recorded_key_belongs_to_one_parser(run: str) -> None:
    for key in recorded(run, "**/*.*"):
        parsed = [parse(key) for parse in PARSERS if parse(key) is not None]
        assert len(parsed) == (key != layout.MANIFEST), key
        assert key == layout.MANIFEST or rebuilt(key) == key


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        ".DS_Store",
        "rounds/",
        "rounds/notes.txt",
        "rounds/.DS_Store",
        "rounds/1.json",
        "rounds/00000000001.json",
        "rounds/٠٠٠٠٠٠٠٠٠١.json",
        "rounds/000000000\uff11.json",
        "rounds/-000000001.json",
        "rounds/+000000001.json",
        "rounds/0000000001.json\n",
        "rounds/0000000001.json/",
        "rounds/0000000001xjson",
        "x/rounds/0000000001.json",
        "snapshots/0000000001/",
        "snapshots/0000000001/A.json",
        "snapshots/0000000001/a_b.json",
        "snapshots/0000000001/.json",
        f"snapshots/0000000001/{'a' * 65}.json",
        "snapshots/0000000001/a/b.json",
        "snapshots/1/a.json",
        "claims/0000000001/1.json",
        "claims/0000000001/000.json",
        "claims/0000000001/0001.json",
        "claims/0000000001/٠٠١.json",
        "claims/Manifest/001.json",
        f"claims/manifest/{'9' * 5000}.json",
        "leases/a/1.json",
        "leases/A/0000000001.json",
        "leases/0000000001.json",
        f"blobs/init/2/{SHA}.safetensors",
        f"blobs/init/0002/{SHA}.safetensors",
        f"blobs/init/002/{SHA.upper()}.safetensors",
        f"blobs/init/002/{SHA[:-1]}.safetensors",
        f"blobs/init/002/{SHA}.safetensors.gz",
        f"blobs/init/002/{SHA}xsafetensors",
        f"blobs/rounds/0000000003/{SHA}",
        f"blobs/rounds/0000000003/b/{SHA}.safetensors",
        f"blobs/snapshots/0000000003/{SHA}.safetensors",
        "units/",
        "units/a/b",
        "units/..",
        "units/a\nb",
        "barriers/start",
        "barriers//a",
        "barriers/./a",
        "barriers/start/",
        "barriers/start/A",
        "barriers/a/b/c",
        "start/a",
    ],
)
def test_what_does_not_belong_is_nothing(key: str) -> None:
    assert [parse(key) for parse in PARSERS] == [None] * len(PARSERS)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/", "a\0", "\n", "\x7f", "\x85", "\ud800", "n" * 2000]
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        layout.unit_key(name)
    with pytest.raises(ValueError):
        layout.arrival_key(name, "a")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0"])
def test_bad_barrier_names_have_no_prefix_either(name: str) -> None:
    with pytest.raises(ValueError, match="barrier name"):
        layout.arrivals_prefix(name)
    with pytest.raises(TypeError, match="barrier name 7"):
        layout.arrivals_prefix(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("learner", ["", "A", "a_b", "a/b", "ä", "a" * 65, "a\n", "a b", "١"])
def test_bad_ids_are_refused_by_name(learner: str) -> None:
    for build in (
        lambda: layout.check_learner_id(learner),
        lambda: layout.snapshot_key(0, learner),
        lambda: layout.beat_key(learner, 0),
        lambda: layout.snapshot_blob_key(0, learner, SHA, RAW_EXT),
        lambda: layout.arrival_key("start", learner),
    ):
        with pytest.raises(ValueError) as caught:
            build()
        assert repr(learner) in str(caught.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: layout.round_key(-1),
        lambda: layout.round_key(10**10),
        lambda: layout.beat_key("a", 10**10),
        lambda: layout.claim_key(0, 0),
        lambda: layout.claim_key(None, 10**9),
        lambda: layout.init_blob_key(-1, SHA, RAW_EXT),
        lambda: layout.round_blob_key(0, SHA.upper(), RAW_EXT),
        lambda: layout.round_blob_key(0, SHA, ".pt"),
    ],
)
def test_what_has_no_key_is_refused(build: Callable[[], str]) -> None:
    with pytest.raises(ValueError):
        build()


@pytest.mark.parametrize(
    ("host", "start"),
    [
        ("Node_7.Example.org", "node-7-example-org-"),
        ("h" * 200, "hhh"),
        ("--", "node-"),
        ("機械", "node-"),
        ("", "node-"),
    ],
)
def test_the_default_id_is_host_and_process(
    host: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    learner = layout.default_learner_id()
    assert layout.check_learner_id(learner) == learner
    assert learner.startswith(start)
    assert learner.endswith(f"-{os.getpid()}")


@given(left=rounds, right=rounds)
def test_byte_order_of_rounds_is_numeric_order(left: int, right: int) -> None:
    assert (layout.round_key(left) < layout.round_key(right)) == (left < right)
