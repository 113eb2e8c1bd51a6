"""zstd payloads: what the format says, recorded ones, and what broken or hostile ones get."""

import json
import random
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.exchange.wire import own_bytes, random_data, specs, take

from gradientmail.errors import MissingExtra, PayloadCorrupt
from gradientmail.exchange import compression
from gradientmail.exchange.compression import compress, decompress
from gradientmail.exchange.payload import PayloadLayout
from gradientmail.schema import BITS, TensorSpec

SPECS = [TensorSpec("w", "F32", (40, 5)), TensorSpec("h", "BF16", (33,))]
LAYOUT = PayloadLayout(SPECS)
PAYLOAD = bytes(own_bytes(LAYOUT, random_data(SPECS)))
STORED = bytes(compress(LAYOUT, PAYLOAD, take))
SHUFFLED = zstandard.ZstdDecompressor().decompress(STORED)


def by_definition(layout: PayloadLayout, payload: bytes) -> bytes:
    """All first bytes of a tensor, then all second bytes, and so on."""
    result = bytearray(payload)
    for slot in layout.slots.values():
        width = max(BITS[slot.dtype] // 8, 1)
        data = payload[slot.start : slot.stop]
        planes = [[data[i] for i in range(byte, len(data), width)] for byte in range(width)]
        result[slot.start : slot.stop] = bytes(value for plane in planes for value in plane)
    return bytes(result)


@given(chosen=specs(), seed=st.integers(0, 2**16))
def test_stored_form_is_the_definition(chosen: list[TensorSpec], seed: int) -> None:
    layout = PayloadLayout(chosen)
    payload = bytes(own_bytes(layout, random_data(chosen, seed)))
    stored = compress(layout, payload, take)
    assert zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False) == by_definition(
        layout, payload
    )
    assert zstandard.frame_content_size(stored) == layout.nbytes
    assert decompress(layout, stored, take) == payload


IMPLEMENTATIONS = [
    (compression.slice_shuffle, compression.slice_unshuffle),
    (compression.numpy_shuffle, compression.numpy_unshuffle),
]


@pytest.mark.parametrize(("shuffle", "unshuffle"), IMPLEMENTATIONS, ids=["slices", "numpy"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 64, 1000])
def test_shuffles_agree_at_every_chunk_border(
    shuffle: Callable[..., None],
    unshuffle: Callable[..., None],
    width: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compression, "_CHUNK", 8 * width)
    data = random.Random(count).randbytes(count * width)
    out, back = take(len(data)), take(len(data))
    shuffle(memoryview(data), out, width)
    assert out == b"".join(data[byte::width] for byte in range(width))
    unshuffle(out.toreadonly(), back, width)
    assert back == data


@pytest.mark.parametrize(("shuffle", "unshuffle"), IMPLEMENTATIONS, ids=["slices", "numpy"])
@pytest.mark.parametrize("width", [2, 4])
def test_shuffling_needs_memory_for_one_chunk(
    shuffle: Callable[..., None], unshuffle: Callable[..., None], width: int
) -> None:
    data = memoryview(bytearray(random.Random(7).randbytes(2**20)) * 8)
    out, back = take(len(data)), take(len(data))
    tracemalloc.start()
    try:
        shuffle(data, out, width)
        unshuffle(out, back, width)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.1 * compression._CHUNK
    same = back == data
    assert same


def test_large_tensors_pass_through_many_chunks() -> None:
    count = 2 * compression._CHUNK + 5
    chosen = [TensorSpec("w", "F32", (count,)), TensorSpec("h", "F16", (3 * count,))]
    layout = PayloadLayout(chosen)
    few = random.Random(3).choices(range(16), k=layout.nbytes)
    payload = layout.header + bytes(few)[len(layout.header) :]
    stored = compress(layout, payload, take)
    assert stored.nbytes < layout.nbytes * 0.6
    assert decompress(layout, stored, take) == payload
    shuffled = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    start = layout.slots["w"].start
    assert shuffled[start : start + count] == payload[start : start + 4 * count : 4]


def test_without_numpy_the_bytes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_numpy", lambda: None)
    assert compress(LAYOUT, PAYLOAD, take) == STORED
    assert decompress(LAYOUT, STORED, take) == PAYLOAD


def test_without_zstandard_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for call in (
        lambda: compress(LAYOUT, PAYLOAD, take),
        lambda: decompress(LAYOUT, STORED, take),
    ):
        with pytest.raises(MissingExtra, match=r"gradientmail\[zstd\]") as caught:
            call()
        assert caught.value.extra == "zstd"


def test_a_payload_of_another_size_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=str(len(PAYLOAD))):
        compress(LAYOUT, PAYLOAD + b"\0", take)


def test_bytes_that_do_not_compress_still_fit() -> None:
    chosen = [TensorSpec("w", "F8_E4M3", (1_000_003,))]
    layout = PayloadLayout(chosen)
    payload = own_bytes(layout, random_data(chosen))
    stored = compress(layout, payload, take)
    assert stored.nbytes > layout.nbytes - 300
    assert decompress(layout, stored.toreadonly(), take) == payload


@pytest.mark.parametrize("dtype", ["F32", "F4"])
def test_zeros_become_next_to_nothing(dtype: str) -> None:
    layout = PayloadLayout([TensorSpec("w", dtype, (2_000_000,))])
    payload = layout.header + bytes(layout.nbytes - len(layout.header))
    stored = compress(layout, payload, take)
    assert stored.nbytes < 500
    assert decompress(layout, stored, take) == payload


def frame(content: bytes = SHUFFLED, *, size: bool = True, checksum: bool = False) -> bytes:
    """One frame of ``content`` as another writer may make it."""
    writer = zstandard.ZstdCompressor(level=3, write_content_size=size, write_checksum=checksum)
    return writer.compress(content)


VALID = {
    "another level": frame(),
    "checksum": frame(checksum=True),
    "size not written": frame(size=False),
    "checksum, size not written": frame(checksum=True, size=False),
}
OTHER = PayloadLayout([TensorSpec("v", "F32", (40, 5)), TensorSpec("h", "BF16", (33,))])
EMPTY_FRAME = zstandard.ZstdCompressor().compress(b"")
SKIPPABLE = b"\x50\x2a\x4d\x18\x03\0\0\0abc"


@pytest.mark.parametrize("stored", VALID.values(), ids=VALID)
def test_other_frames_are_read(stored: bytes) -> None:
    assert decompress(LAYOUT, stored, take) == PAYLOAD


@pytest.mark.parametrize("stored", [STORED, *VALID.values()], ids=["own", *VALID])
def test_truncated_and_extended_frames_are_refused(stored: bytes) -> None:
    cut = [stored[:size] for size in (*range(40), *range(len(stored) - 40, len(stored)))]
    longer = [stored + more for more in (b"\0", b"\0" * 4, stored, EMPTY_FRAME, SKIPPABLE)]
    for broken in cut + longer:
        with pytest.raises(PayloadCorrupt):
            decompress(LAYOUT, broken, take)


def raw_blocks(content: bytes, size: int, window_log: int = 21) -> bytes:
    """A frame of uncompressed blocks of ``size`` bytes (RFC 8878), its content size not written."""
    blocks = [content[i : i + size] for i in range(0, len(content), size)] + [b""]
    last = len(blocks) - 1
    head = b"".join(
        (len(block) << 3 | (i == last)).to_bytes(3, "little") + block
        for i, block in enumerate(blocks)
    )
    return b"\x28\xb5\x2f\xfd" + b"\0" + bytes([window_log - 10 << 3]) + head


def test_raw_blocks_are_read_but_not_very_many() -> None:
    assert decompress(LAYOUT, raw_blocks(SHUFFLED, 100), take) == PAYLOAD
    with pytest.raises(PayloadCorrupt, match="too many blocks"):
        decompress(LAYOUT, raw_blocks(SHUFFLED, 3), take)


def bomb(size: int, *, known: bool) -> bytes:
    """Very few bytes that decompress to ``size`` zeros."""
    writer = zstandard.ZstdCompressor(level=19, write_content_size=known)
    return writer.compress(SHUFFLED + bytes(size - len(SHUFFLED)))


HOSTILE = {
    "empty": (b"", "valid zstd"),
    "not zstd": (PAYLOAD, "valid zstd"),
    "an empty frame": (EMPTY_FRAME, "not 0"),
    "a skippable frame": (SKIPPABLE, "not 3"),
    "a frame after a skippable one": (SKIPPABLE + STORED, "not 3"),
    "a byte less": (frame(SHUFFLED[:-1]), f"has {LAYOUT.nbytes - 1} bytes"),
    "a byte more": (frame(SHUFFLED + b"\0"), f"has {LAYOUT.nbytes + 1} bytes"),
    "a byte less, size not written": (
        frame(SHUFFLED[:-1], size=False),
        f"has {LAYOUT.nbytes - 1} bytes",
    ),
    "a byte more, size not written": (
        frame(SHUFFLED + b"\0", size=False),
        f"has {LAYOUT.nbytes + 1} bytes",
    ),
    "a bomb": (bomb(2**24, known=True), f"not {2**24}"),
    "a bomb of unknown size": (bomb(2**24, known=False), "does not hold|too many blocks"),
    "a window too wide": (raw_blocks(SHUFFLED, 500, window_log=27), "too much memory"),
    "a wrong checksum": (VALID["checksum"][:-1] + b"?", "valid zstd"),
    "other tensors": (frame(OTHER.header + bytes(OTHER.nbytes - len(OTHER.header))), "lacks"),
    "a broken header": (frame(b"\xff" * 8 + SHUFFLED[8:]), "ends inside its header"),
    "much after it": (STORED + bytes(2**20), "end with its frame"),
}


@pytest.mark.parametrize(("stored", "why"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_frames_are_refused_in_bounded_memory(stored: bytes, why: str) -> None:
    taken: list[int] = []

    def taking(nbytes: int) -> memoryview:
        taken.append(nbytes)
        return take(nbytes)

    with pytest.raises(PayloadCorrupt, match=why):
        decompress(LAYOUT, stored, taking)
    assert sum(taken) <= LAYOUT.most_bytes + LAYOUT.nbytes


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("names", "extra"),
    [
        (["h", "w"], {}),
        (["w", "h"], {"__metadata__": {"format": "pt", "made by": "x" * 500}}),
        (["w", "h"], {"__metadata__": {"pad": " " * 60_000}}),
    ],
)
def test_payloads_with_another_header_are_read(
    names: list[str], extra: dict[str, Any], *, known: bool
) -> None:
    """As they are without compression: another order of the tensors, free text, padding."""
    entries, data, values = dict(extra), b"", dict[str, bytes]()
    for spec in sorted(SPECS, key=lambda spec: names.index(spec.name)):
        slot = LAYOUT.slots[spec.name]
        values[spec.name] = PAYLOAD[slot.start : slot.stop]
        place = [len(data), len(data) + slot.nbytes]
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": place}
        width = BITS[spec.dtype] // 8
        data += b"".join(values[spec.name][byte::width] for byte in range(width))
    text = json.dumps(entries).encode() + b" " * 24
    stored = frame(len(text).to_bytes(8, "little") + text + data, size=known)
    payload = decompress(LAYOUT, stored, take)
    slots = LAYOUT.check(payload)
    assert {name: bytes(payload[slot.start : slot.stop]) for name, slot in slots.items()} == values


def test_a_frame_that_needs_a_dictionary_is_refused() -> None:
    samples: list[Any] = [random.Random(i).randbytes(20) * 20 for i in range(50)]
    dictionary = zstandard.train_dictionary(1000, samples)
    stored = zstandard.ZstdCompressor(dict_data=dictionary).compress(SHUFFLED)
    with pytest.raises(PayloadCorrupt):
        decompress(LAYOUT, stored, take)


def accepts_or_refuses(stored: bytes) -> None:
    """What the library decodes from exactly one frame with a fitting header, or an error."""
    try:
        payload = decompress(LAYOUT, stored, take)
    except PayloadCorrupt:
        return
    shuffled = zstandard.ZstdDecompressor().decompress(
        stored, max_output_size=LAYOUT.nbytes, allow_extra_data=False
    )
    assert bytes(payload[: len(LAYOUT.header)]) == shuffled[: len(LAYOUT.header)]
    assert sorted(payload) == sorted(shuffled)


@given(stored=st.binary(max_size=100), magic=st.booleans())
def test_arbitrary_bytes(stored: bytes, magic: bool) -> None:
    accepts_or_refuses(b"\x28\xb5\x2f\xfd" * magic + stored)


@given(data=st.data())
def test_valid_frames_cut_and_changed(data: st.DataObject) -> None:
    stored = data.draw(st.sampled_from([STORED, *VALID.values()]))
    start = data.draw(st.integers(0, len(stored)) | st.integers(0, 20))
    stop = data.draw(st.integers(start, min(len(stored), start + 4)))
    accepts_or_refuses(stored[:start] + data.draw(st.binary(max_size=4)) + stored[stop:])
