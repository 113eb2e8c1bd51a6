"""Payloads: the safetensors library's own bytes, and what other bytes get."""

import ctypes
import hashlib
import json
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from tests.exchange.wire import foreign_bytes, library_bytes, own_bytes, random_data, specs, take

from gradientmail.buffers import BufferPool
from gradientmail.errors import PayloadCorrupt
from gradientmail.exchange.payload import PayloadLayout, Slot, sha256_hex
from gradientmail.schema import TensorSpec

SPECS = [
    TensorSpec("b", "F32", (2, 3)),
    TensorSpec("a", "F16", (4,)),
    TensorSpec("c.scale", "F8_E8M0", (1,)),
    TensorSpec("c", "F4", (32,)),
    TensorSpec("empty", "BF16", (0, 7)),
    TensorSpec("scalar", "F32", ()),
]
LAYOUT = PayloadLayout(SPECS)
DATA = random_data(SPECS)


def tensors(buffer: bytes | memoryview, slots: Any) -> dict[str, bytes]:
    """Each tensor's bytes."""
    return {name: bytes(buffer[slot.start : slot.stop]) for name, slot in slots.items()}


@given(chosen=specs(), seed=st.integers(0, 2**16))
def test_bytes_are_those_of_the_library(chosen: list[TensorSpec], seed: int) -> None:
    data = random_data(chosen, seed)
    layout = PayloadLayout(chosen)
    buffer = own_bytes(layout, data)
    assert bytes(buffer) == library_bytes(chosen, data)
    assert layout.nbytes == len(buffer)
    assert layout.check(buffer) is layout.slots
    assert tensors(buffer, layout.slots) == data


@given(chosen=specs())
def test_the_order_given_does_not_matter(chosen: list[TensorSpec]) -> None:
    layout, turned = PayloadLayout(chosen), PayloadLayout(chosen[::-1])
    assert turned.header == layout.header
    assert list(turned.slots.items()) == list(layout.slots.items())
    assert turned.specs == tuple(chosen[::-1])


def test_a_header_written_out() -> None:
    text = (
        '{"b":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        '"scalar":{"dtype":"F32","shape":[],"data_offsets":[24,28]},'
        '"empty":{"dtype":"BF16","shape":[0,7],"data_offsets":[28,28]},'
        '"a":{"dtype":"F16","shape":[4],"data_offsets":[28,36]},'
        '"c.scale":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[36,37]},'
        '"c":{"dtype":"F4","shape":[32],"data_offsets":[37,53]}}'
    )
    padded = text.ljust((len(text) + 7) // 8 * 8)
    assert LAYOUT.header == len(padded).to_bytes(8, "little") + padded.encode()
    base = len(LAYOUT.header)
    assert LAYOUT.nbytes == base + 53
    assert LAYOUT.slots["a"] == Slot("F16", (4,), base + 28, base + 36)
    assert LAYOUT.slots["a"].nbytes == 8


@given(chosen=specs())
def test_tensors_are_aligned_to_their_elements(chosen: list[TensorSpec]) -> None:
    for slot in PayloadLayout(chosen).slots.values():
        assert slot.start % {"F32": 4, "F16": 2, "BF16": 2}.get(slot.dtype, 1) == 0


def test_the_library_reads_it() -> None:
    read = {name: info["data"] for name, info in safetensors.deserialize(bytes(own()))}
    assert {name: bytes(data) for name, data in read.items()} == DATA


def own() -> memoryview:
    """The payload of ``SPECS``."""
    return own_bytes(LAYOUT, DATA)


def test_blank_writes_into_what_it_takes() -> None:
    pool = BufferPool()
    buffer = LAYOUT.blank(pool.take)
    assert buffer.nbytes == LAYOUT.nbytes
    assert LAYOUT.check(buffer.toreadonly()) is LAYOUT.slots


@pytest.mark.parametrize(
    "bad",
    [
        [TensorSpec("a", "F32", ()), TensorSpec("a", "F16", ())],
        [TensorSpec("__metadata__", "F32", ())],
        [TensorSpec("\ud800", "F32", ())],
        [TensorSpec("a", "I64", ())],
        [TensorSpec("a", "F32", (-1,))],
        [TensorSpec("a", "F4", (3,))],
        [TensorSpec("a", "F4", ())],
    ],
)
def test_what_no_payload_can_hold_is_refused(bad: list[TensorSpec]) -> None:
    with pytest.raises(ValueError):
        PayloadLayout(bad)


@given(chosen=specs(), pad=st.integers(0, 70), meta=st.booleans(), data=st.data())
def test_other_valid_headers_are_read(
    chosen: list[TensorSpec], pad: int, meta: bool, data: st.DataObject
) -> None:
    turned = data.draw(st.permutations(chosen))
    content = random_data(chosen)

    def change(entries: dict[str, object]) -> dict[str, object]:
        listed = data.draw(st.permutations(list(entries.items())))
        return ({"__metadata__": {"format": "pt"}} if meta else {}) | dict(listed)

    buffer = foreign_bytes(turned, content, change, pad=pad)
    slots = PayloadLayout(chosen).check(buffer)
    assert tensors(buffer, slots) == content
    ordered = list(slots.values())
    assert ordered == sorted(ordered, key=lambda slot: (slot.start, slot.stop))
    for spec in chosen:
        assert (slots[spec.name].dtype, slots[spec.name].shape) == (spec.dtype, spec.shape)


def entry(name: str, **new: object) -> Callable[[dict[str, Any]], object]:
    """Change members of one entry."""

    def change(entries: dict[str, Any]) -> object:
        entries[name].update(new)
        return entries

    return change


def without(name: str) -> Callable[[dict[str, Any]], object]:
    """Leave one entry out."""
    return lambda entries: {key: value for key, value in entries.items() if key != name}


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "is a list": lambda _: [],
    "is null": lambda _: None,
    "lacks a tensor": without("a"),
    "has one more": lambda entries: entries | {"d": entries["a"]},
    "has another name": lambda entries: without("a")(entries | {"A": entries["a"]}),
    "has another dtype": entry("a", dtype="BF16"),
    "has a dtype of numbers": entry("a", dtype=16),
    "has a long dtype": entry("a", dtype="F" * 50_000),
    "has another shape": entry("b", shape=[3, 2]),
    "has a flat shape": entry("b", shape=[6]),
    "has a shape of floats": entry("b", shape=[2.0, 3]),
    "has a shape of bools": entry("scalar", shape=[True]),
    "has a negative shape": entry("b", shape=[-2, -3]),
    "has many sizes": entry("b", shape=[2**62] * 10_000),
    "overlaps": entry("scalar", data_offsets=[20, 24]),
    "has a gap": entry("c", data_offsets=[45, 61]),
    "turns an interval": entry("a", data_offsets=[32, 24]),
    "has negative offsets": entry("b", data_offsets=[-24, 0]),
    "has huge offsets": entry("b", data_offsets=[2**63, 2**63 + 24]),
    "has three offsets": entry("b", data_offsets=[0, 24, 24]),
    "has one offset": entry("b", data_offsets=[0]),
    "has offsets that are strings": entry("b", data_offsets=["0", "24"]),
    "has a wrong length": entry("b", data_offsets=[0, 20]),
    "moves an empty tensor": entry("empty", data_offsets=[3, 3]),
    "has an empty entry": lambda entries: entries | {"a": {}},
    "has a null entry": lambda entries: entries | {"a": None},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_headers_that_do_not_fit_are_refused(change: Callable[[dict[str, Any]], object]) -> None:
    whole = foreign_bytes(SPECS, DATA)
    assert tensors(whole, LAYOUT.check(whole)) == DATA
    with pytest.raises(PayloadCorrupt) as caught:
        LAYOUT.check(foreign_bytes(SPECS, DATA, change))
    assert len(str(caught.value)) < 1000


def offsets(**intervals: list[int]) -> Callable[[dict[str, Any]], object]:
    """Change several intervals."""

    def change(entries: dict[str, Any]) -> object:
        for name, interval in intervals.items():
            entries[name]["data_offsets"] = interval
        return entries

    return change


@pytest.mark.parametrize(
    ("change", "more", "why"),
    [
        (offsets(scalar=[56, 60]), 7, "gap"),
        (offsets(b=[4, 28], a=[28, 36]), 0, "overlap"),
        (offsets(scalar=[45, 49]), -4, "overlap"),
        (offsets(scalar=[45, 49]), 0, "overlap"),
        (offsets(b=[0, 20], a=[20, 32]), 0, "20 bytes, expected 24"),
        (offsets(), 1, "its header describes"),
        (offsets(), -1, "its header describes"),
    ],
)
def test_data_is_tiled_exactly(
    change: Callable[[dict[str, Any]], object], more: int, why: str
) -> None:
    body = len(foreign_bytes(SPECS, DATA)) - 53
    assert LAYOUT.check(foreign_bytes(SPECS, DATA))["scalar"].start - body == 49
    with pytest.raises(PayloadCorrupt, match=why):
        LAYOUT.check(foreign_bytes(SPECS, DATA, change, more=more))


def with_header(header: bytes, length: int | None = None) -> bytes:
    """A payload of ``SPECS`` with these bytes as the header."""
    data = b"".join(DATA[spec.name] for spec in SPECS)
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "buffer",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        with_header(b""),
        with_header(b"{}"),
        with_header(b"{}", 3),
        with_header(b"{}", 2**64 - 1),
        with_header(b"\xff"),
        with_header(b"[" * 60_000),
        with_header(b'{"a":' * 10_000),
        with_header(LAYOUT.header[8:].replace(b'"a"', b'"b"')),
        with_header(LAYOUT.header[8:].replace(b"37", b"9" * 5000)),
        with_header(LAYOUT.header[8:].replace(b"37", b"NaN")),
        bytes(own()) + b"\0",
        bytes(own())[:-1],
        bytes(own())[: len(LAYOUT.header)],
    ],
    ids=lambda buffer: f"{len(buffer)}-{buffer[8:16]!r}",
)
def test_bytes_that_are_no_payload_are_refused(buffer: bytes) -> None:
    with pytest.raises(PayloadCorrupt):
        LAYOUT.check(buffer)


def test_a_hostile_header_takes_no_memory() -> None:
    size = 2**24
    header = json.dumps({"a": [[]] * 1000}).encode().ljust(size)
    buffer = with_header(header)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadCorrupt, match=str(size)):
            LAYOUT.check(buffer)
        assert tracemalloc.get_traced_memory()[1] < 2**18
    finally:
        tracemalloc.stop()


@given(data=st.data())
def test_changed_payloads_are_read_right_or_refused(data: st.DataObject) -> None:
    valid = data.draw(st.sampled_from([bytes(own()), foreign_bytes(SPECS, DATA)]))
    start = data.draw(st.integers(0, len(valid)))
    stop = data.draw(st.integers(start, min(len(valid), start + 4)))
    digits = st.integers(0, 99).map(lambda number: str(number).encode())
    buffer = valid[:start] + data.draw(st.binary(max_size=4) | digits) + valid[stop:]
    try:
        slots = LAYOUT.check(buffer)
    except PayloadCorrupt:
        return
    assert {(s.dtype, s.shape) for s in slots.values()} == {(s.dtype, s.shape) for s in SPECS}
    assert sum(slot.nbytes for slot in slots.values()) == 53
    ordered = list(slots.values())
    assert ordered[-1].stop == len(buffer)
    assert all(a.stop == b.start for a, b in pairwise(ordered))
    assert ordered[0].start == 8 + int.from_bytes(buffer[:8], "little")


@given(buffer=st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(buffer: bytes) -> None:
    with pytest.raises(PayloadCorrupt):
        LAYOUT.check(buffer)


def test_hash_is_of_all_bytes() -> None:
    assert sha256_hex(own()) == hashlib.sha256(bytes(own())).hexdigest()
    assert sha256_hex(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_take_is_asked_once_for_the_exact_size_and_its_way_to_a_cache_line() -> None:
    asked: list[int] = []

    def taking(nbytes: int) -> memoryview:
        asked.append(nbytes)
        return take(nbytes)

    LAYOUT.blank(taking)
    assert asked == [LAYOUT.nbytes + -len(LAYOUT.header) % 64]


@pytest.mark.parametrize("more", range(0, 64, 8))
def test_data_in_pooled_memory_begins_at_a_cache_line(more: int) -> None:
    layout = PayloadLayout([TensorSpec("x" * (1 + more), "F32", (2**14,))])
    buffer = layout.blank(BufferPool().take)
    assert layout.check(buffer) is layout.slots
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    assert (address + len(layout.header)) % 64 == 0
