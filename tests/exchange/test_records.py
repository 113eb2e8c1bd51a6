"""Records: exact bytes, and what anything else gets."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.exchange.wire import RUNS, recorded

from gradientmail.errors import ProtocolError
from gradientmail.exchange import fields, layout
from gradientmail.exchange.records import (
    MANIFEST_LIMIT,
    ROUND_LIMIT,
    SMALL_LIMIT,
    Beat,
    Claim,
    Manifest,
    Ref,
    RoundRecord,
    SnapshotRecord,
    expect_key,
)

type Decode = Callable[[bytes], Claim | Beat | Manifest | SnapshotRecord | RoundRecord]

DECODERS: dict[str, Decode] = {
    "manifest": Manifest.from_bytes,
    "claim": Claim.from_bytes,
    "beat": Beat.from_bytes,
    "snapshot": SnapshotRecord.from_bytes,
    "round": RoundRecord.from_bytes,
}
PATTERNS = {
    "manifest": "manifest.json",
    "claim": "claims/*/*.json",
    "snapshot": "snapshots/*/*.json",
    "round": "rounds/*.json",
}
LIMITS = {
    "manifest": MANIFEST_LIMIT,
    "claim": SMALL_LIMIT,
    "beat": SMALL_LIMIT,
    "snapshot": SMALL_LIMIT,
    "round": ROUND_LIMIT,
}

# One of each kind, with every member in use.
EXAMPLES = {
    kind: next(iter(recorded("bf16-f4-zstd", pattern).values()))
    for kind, pattern in PATTERNS.items()
} | {"beat": b'{"token":"5f"}'}
every_kind = pytest.mark.parametrize("kind", DECODERS)
SHA = "0" * 64


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", PATTERNS)
def test_recorded_bytes_come_out_again(run: str, kind: str) -> None:
    for key, data in recorded(run, PATTERNS[kind]).items():
        record = DECODERS[kind](data)
        assert record.to_bytes() == data, key
        if isinstance(record, (SnapshotRecord, RoundRecord)):
            assert expect_key(record, key) is record


def test_members_have_the_values_recorded() -> None:
    record = RoundRecord.from_bytes(recorded("bf16-f4-zstd", "rounds/0000000005.json").popitem()[1])
    assert (record.round, record.step, record.fragment, record.version) == (5, 36, 1, 3)
    assert [one.learner for one in record.participants] == ["node-0", "node-1"]
    assert record.participants[1].weight == 1792.0
    assert record.estimates.sync == 0.004915499327586827
    assert record.update is not None
    assert record.update.theta_digest.startswith("5a5cc76a")
    assert [ref.size for ref in record.payloads] == [929, 3756, 443]
    assert record.theta.blob.ext == layout.ZSTD_EXT
    assert record.rejected == ()


def test_a_manifest_is_read_whole() -> None:
    manifest = Manifest.from_bytes(EXAMPLES["manifest"])
    assert str(manifest.schema[0]) == "BF16[8, 24]"
    assert manifest.plan[1] == ("head.weight", "up.bias", "up.weight")
    assert manifest.algorithm["merge"] == {"direct_pattern": "embed", "kind": "rda"}
    assert [ref.blob.index for ref in manifest.init] == [0, 1]
    assert manifest.created_by == "node-1"


def test_small_records_are_exactly_these_bytes() -> None:
    assert Claim("a-1").to_bytes() == b'{"learner":"a-1"}'
    assert Beat("7f").to_bytes() == b'{"token":"7f"}'
    assert Beat(None).to_bytes() == b"{}"
    assert Beat.from_bytes(b"{}") == Beat(None)
    assert Beat.from_bytes(b'{"token":"7f"}') == Beat("7f")
    assert Beat("7f", ()).to_bytes() == b'{"after":[],"token":"7f"}'
    assert Beat.from_bytes(b'{"after":["1","0"],"token":"7f"}') == Beat("7f", ("1", "0"))


def test_bytes_are_canonical() -> None:
    value = {"b": [1, 2.5, None, True, "é😀\n"], "a": {"d": (), "c": -0.0}}
    assert fields.canonical(value) == (
        rb'{"a":{"c":-0.0,"d":[]},"b":[1,2.5,null,true,"\u00e9\ud83d\ude00\n"]}'
    )
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            fields.canonical([number])


@every_kind
def test_any_buffer_of_bytes_is_read(kind: str) -> None:
    data = EXAMPLES[kind]
    whole = DECODERS[kind](data)
    for buffer in (bytearray(data), memoryview(b"x" + data)[1:]):
        assert DECODERS[kind](buffer) == whole  # type: ignore[arg-type]


@every_kind
def test_unknown_members_are_ignored(kind: str) -> None:
    value = json.loads(EXAMPLES[kind])
    value["later"] = {"x": ["?", 10**40, {"é": []}]}
    spaced = json.dumps(value, indent=2, ensure_ascii=False).replace('"?"', "1e999").encode()
    assert DECODERS[kind](spaced).to_bytes() == EXAMPLES[kind]


@every_kind
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"{}x",
        b"\xff\xfe{\0}\0",
        b"\xef\xbb\xbf{}",
        b"\x80",
        b"[" * 50_000,
        b'{"a":' * 50_000,
        b"[" * 50_000 + b"]" * 50_000,
        b"9" * 10_000,
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1,"a":1}',
        b'{"a":{"b":1,"b":2}}',
        b'{"\\u0061":1,"a":2}',
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_record_is_a_protocol_error(kind: str, data: bytes) -> None:
    with pytest.raises(ProtocolError, match=kind):
        DECODERS[kind](data)


@every_kind
def test_size_is_bounded_before_parsing(kind: str) -> None:
    data = EXAMPLES[kind]
    padded = data + b" " * (LIMITS[kind] - len(data))
    assert DECODERS[kind](padded).to_bytes() == data
    with pytest.raises(ProtocolError, match=str(LIMITS[kind] + 1)):
        DECODERS[kind](padded + b" ")


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path to everything inside a JSON value."""
    inside: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    return [path] * bool(path) + [p for key, item in inside for p in places(item, (*path, key))]


def changed(kind: str, path: tuple[str | int, ...], new: object) -> bytes:
    """The example of this kind with another value in one place."""
    value = json.loads(EXAMPLES[kind])
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = new
    return json.dumps(value).encode()


WRONG: list[object] = [{"x": 1}, True, -2, 1.5, "?", 2**63, [[]], 10**400]


JUDGED = [("steps", -2), ("tokens", -2), ("base_version", -2), ("schema_digest", "?")]
"""Of a snapshot: read, and told by who merges as ``zero_steps``, ``stale`` and ``schema``."""


@pytest.mark.parametrize("kind", ["manifest", "claim", "snapshot", "round"])
def test_every_member_is_required_and_typed(kind: str) -> None:
    for path in places(json.loads(EXAMPLES[kind])):
        if path[0] == "algorithm":
            continue
        for new in WRONG:
            if new == -2 and path[-1] == "cosine":
                continue
            if kind == "snapshot" and (path[-1], new) in JUDGED:
                continue
            number = path[-1] in ("weight", "cosine", "step", "quorum", "sync") or (
                str(path[-1]).endswith("_seconds")
            )
            if (new == 1.5 and number) or (new is True and path[-1] == "final"):
                continue
            with pytest.raises(ProtocolError, match=kind):
                DECODERS[kind](changed(kind, path, new))
        value = json.loads(EXAMPLES[kind])
        if len(path) == 1:
            del value[path[0]]
            with pytest.raises(ProtocolError, match=f"{kind} has no {path[0]}"):
                DECODERS[kind](json.dumps(value).encode())


def test_an_error_names_the_place_the_value_and_what_is_expected() -> None:
    with pytest.raises(ProtocolError) as caught:
        RoundRecord.from_bytes(changed("round", ("participants", 1, "steps"), "six"))
    assert str(caught.value) == (
        "round.participants[1].steps is 'six', expected an integer from 0 to 9223372036854775807"
    )


def ref(kind: str, index: int, sha: str = SHA) -> dict[str, object]:
    """A ref as JSON has it."""
    width = 3 if kind == "init" else 10
    return {"key": f"blobs/{kind}/{index:0{width}d}/{sha}.safetensors", "sha256": sha, "size": 1}


BAD: list[tuple[str, tuple[str | int, ...], object]] = [
    ("claim", ("learner",), "Node"),
    ("claim", ("learner",), "a" * 65),
    ("beat", ("token",), ""),
    ("beat", ("token",), 1),
    ("snapshot", ("learner",), "node-9"),
    ("snapshot", ("round",), 1),
    ("snapshot", ("round",), 10**10),
    ("snapshot", ("local_step",), -1),
    ("snapshot", ("steps",), 6.0),
    ("snapshot", ("tokens",), 2**63),
    ("snapshot", ("rounds_seen",), -2),
    ("snapshot", ("step_seconds",), -0.5),
    ("snapshot", ("schema_digest",), 7),
    ("snapshot", ("final",), 1),
    ("snapshot", ("payload",), None),
    ("snapshot", ("payload", "size"), -1),
    ("snapshot", ("payload", "sha256"), SHA),
    ("snapshot", ("payload", "key"), "../../etc/passwd"),
    ("snapshot", ("payload",), ref("rounds", 0)),
    ("snapshot", ("payload",), ref("snapshots/0000000000/node-0/..", 0)),
    ("round", ("version",), 0),
    ("round", ("round",), 1),
    ("round", ("theta",), ref("rounds", 1)),
    ("round", ("outer",), ref("init", 0)),
    ("round", ("update", "payload"), ref("rounds", 1)),
    ("round", ("update", "theta_digest"), "x"),
    ("round", ("update",), False),
    ("round", ("participants", 0, "learner"), "node-1"),
    ("round", ("participants", 0, "learner"), "node-2"),
    ("round", ("participants", 0, "weight"), -1.0),
    ("round", ("rejected",), [["a"]]),
    ("round", ("rejected",), [["a", 1]]),
    ("round", ("rejected",), [["A", "stale"]]),
    ("round", ("rejected",), [["a", "stale\n\ud800"]]),
    ("round", ("rejected",), [["b", "stale"], ["a", "stale"]]),
    ("round", ("rejected",), [["a", "stale"], ["a", "stale"]]),
    ("round", ("estimates", "sync"), "fast"),
    ("round", ("quorum_seconds",), None),
    ("manifest", ("schema",), []),
    ("manifest", ("schema", 0, "dtype"), "F8_E4M3"),
    ("manifest", ("schema", 0, "dtype"), "I64"),
    ("manifest", ("schema", 0, "name"), "zzz"),
    ("manifest", ("schema", 0, "name"), "embed.weight"),
    ("manifest", ("schema", 0, "name"), "\ud800"),
    ("manifest", ("schema", 0, "name"), "__metadata__"),
    ("manifest", ("schema", 0, "shape"), [-1]),
    ("manifest", ("schema", 0, "shape"), [2**62, 2]),
    ("manifest", ("schema", 0, "shape"), [1] * 65),
    ("manifest", ("schema", 0, "shape"), [2**62] * 10_000),
    ("manifest", ("plan",), []),
    ("manifest", ("plan", 0), []),
    ("manifest", ("plan", 0), ["down.weight"]),
    ("manifest", ("plan", 0), ["embed.weight", "down.weight", "head.bias"]),
    ("manifest", ("plan", 0), ["down.weight", "embed.weight", "head.bias", "up.bias"]),
    ("manifest", ("init",), [ref("init", 0)]),
    ("manifest", ("init",), [ref("init", 1), ref("init", 0)]),
    ("manifest", ("init", 0), ref("rounds", 0)),
    ("manifest", ("algorithm",), []),
    ("manifest", ("algorithm", "x"), 10**400),
    ("manifest", ("algorithm", "x"), json.loads("[" * 40 + "]" * 40)),
    ("manifest", ("created_by",), ""),
]


@pytest.mark.parametrize(("kind", "path", "new"), BAD)
def test_what_does_not_fit_is_refused(kind: str, path: tuple[str | int, ...], new: object) -> None:
    with pytest.raises(ProtocolError, match=kind) as caught:
        DECODERS[kind](changed(kind, path, new))
    assert len(str(caught.value)) < 1000
    str(caught.value).encode()


def test_an_overflowing_float_is_refused() -> None:
    data = EXAMPLES["manifest"].replace(b'"mixing":0.0', b'"mixing":1e999')
    with pytest.raises(ProtocolError, match=r"manifest\.algorithm"):
        Manifest.from_bytes(data)


@pytest.mark.parametrize(
    ("kind", "path", "new"),
    [
        ("snapshot", ("steps",), 0),
        ("snapshot", ("tokens",), 0),
        ("snapshot", ("step_seconds",), 2),
        ("snapshot", ("step_seconds",), None),
        ("snapshot", ("local_step",), 2**63 - 1),
        ("round", ("cosine",), None),
        ("round", ("cosine",), -1),
        ("round", ("update",), None),
        ("round", ("participants",), []),
        ("round", ("participants", 0, "weight"), 1536),
        ("round", ("rejected",), [["node-0", "corrupt"], ["node-7", "some later reason"]]),
        ("round", ("grace_seconds",), 0),
        ("round", ("estimates", "step"), None),
        ("manifest", ("schema", 0, "shape"), []),
        ("manifest", ("schema", 0, "shape"), [0, 3]),
        ("manifest", ("algorithm",), {"new": {"deep": [1, 2.0, None, "é"]}}),
    ],
)
def test_what_a_correct_node_may_write_is_kept(
    kind: str, path: tuple[str | int, ...], new: object
) -> None:
    data = changed(kind, path, new)
    expected = json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"))
    assert DECODERS[kind](data).to_bytes() == expected.encode()


def test_a_constructor_refuses_what_readers_would() -> None:
    record = RoundRecord.from_bytes(EXAMPLES["round"])
    with pytest.raises(ValueError, match="participants"):
        replace(record, participants=record.participants[::-1])
    with pytest.raises(ValueError, match="round 1"):
        replace(record, round=1)
    with pytest.raises(ValueError, match="another sha256"):
        Ref(record.theta.key, SHA, 1)


def test_a_record_under_another_key_is_refused() -> None:
    record = SnapshotRecord.from_bytes(EXAMPLES["snapshot"])
    with pytest.raises(ProtocolError, match="snapshots/0000000001/node-0"):
        expect_key(record, layout.snapshot_key(1, "node-0"))


def accepts_or_refuses(kind: str, data: bytes) -> None:
    """A record that encodes to bytes of the same record, or a ``ProtocolError``."""
    try:
        record = DECODERS[kind](data)
    except ProtocolError as error:
        str(error).encode()
    else:
        assert DECODERS[kind](record.to_bytes()) == record


@every_kind
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes(kind: str, data: bytes) -> None:
    accepts_or_refuses(kind, data)


@every_kind
@given(data=st.data())
def test_valid_bytes_cut_and_changed(kind: str, data: st.DataObject) -> None:
    valid = EXAMPLES[kind]
    start = data.draw(st.integers(0, len(valid)))
    stop = data.draw(st.integers(start, min(len(valid), start + 8)))
    tokens = st.sampled_from([b"", b"0", b"-", b"e9", b"[", b"}", b'"', b"\\u", b",", b"null"])
    middle = data.draw(st.binary(max_size=4) | tokens)
    accepts_or_refuses(kind, valid[:start] + middle + valid[stop:])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(SHA),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", EXAMPLES)
@given(data=st.data())
def test_valid_records_with_any_value_in_a_place(kind: str, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(places(json.loads(EXAMPLES[kind]))))
    accepts_or_refuses(kind, changed(kind, path, data.draw(json_values)))
