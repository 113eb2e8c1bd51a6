"""How objects are cut, what an upload's body hands out, and names that hold a hash."""

import hashlib
import itertools
import threading
from random import Random

import pytest

from gradientmail.mailbox.s3_parts import (
    CHUNK_BYTES,
    MAX_OBJECT_BYTES,
    MAX_PARTS,
    MAX_WHOLE_BYTES,
    MIB,
    PART_BYTES,
    Abandoned,
    Body,
    cut,
    named_hash,
)

GIB = 2**30


@pytest.mark.parametrize("width", [1, 6, 100])
@pytest.mark.parametrize(
    "nbytes",
    [
        1,
        PART_BYTES,
        PART_BYTES + 1,
        33 * MIB,
        GIB,
        5 * GIB,
        5 * GIB + 1,
        700 * GIB + 7,
        MAX_OBJECT_BYTES - 1,
        MAX_OBJECT_BYTES,
    ],
)
def test_parts_cover_the_object_within_the_limits_of_s3(nbytes: int, width: int) -> None:
    parts = cut(nbytes, width)
    assert len(parts) <= MAX_PARTS
    assert (parts[0][0], parts[-1][1]) == (0, nbytes)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))
    sizes = {stop - start for start, stop in parts[:-1]}
    assert len(sizes) <= 1  # some stores want parts of one size
    assert all(PART_BYTES <= size <= MAX_WHOLE_BYTES for size in sizes)
    assert 0 < parts[-1][1] - parts[-1][0] <= MAX_WHOLE_BYTES


def test_an_object_that_s3_cannot_hold() -> None:
    with pytest.raises(ValueError, match="5 TiB"):
        cut(MAX_OBJECT_BYTES + 1, 8)


def read_all(body: Body) -> bytes:
    return b"".join(iter(lambda: bytes(body.read(16384)), b""))


def test_a_body_is_read_where_it_lies() -> None:
    seed = 3
    print(f"seed {seed}")
    data = bytearray(Random(seed).randbytes(3 * CHUNK_BYTES + 5))
    body = Body(memoryview(data), threading.Event(), None)
    chunk = body.read(16384)
    assert isinstance(chunk, memoryview)
    data[0] ^= 255
    assert chunk[0] == data[0]  # no copy
    body.seek(0)
    assert read_all(body) == bytes(data)
    assert body.read(1) == b""
    assert (body.seek(0, 2), body.tell(), len(body)) == (len(data),) * 3
    del chunk
    body.release()
    data.append(1)  # nobody looks at it any more


@pytest.mark.parametrize("nbytes", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES])
def test_an_abandoned_body_is_never_whole(nbytes: int) -> None:
    """Whenever the caller is cancelled, what it writes afterwards is in no whole upload."""
    chunks = -(-nbytes // CHUNK_BYTES)
    for moment in range(chunks + 1):
        abandoned, data = threading.Event(), bytearray(nbytes)
        body = Body(memoryview(data), abandoned, None)
        sent: list[bytes | memoryview] = []
        try:
            for number in range(chunks):
                if number == moment:
                    abandoned.set()
                sent.append(bytes(body.read()) if number < moment - 1 else body.read())
            abandoned.set()
        except Abandoned:
            assert moment < chunks
        else:
            # All was read: the last chunk, which may still be on its way, is a copy.
            data[-1:] = b"\xff"
            assert moment == chunks
            assert isinstance(sent[-1], bytes)
            assert bytes(sent[-1])[-1:] == b"\0"


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("blobs/init/000/{}.safetensors", True),
        ("blobs/rounds/0000000001/{}.safetensors.zst", True),
        ("{}.safetensors", True),
        ("blobs/x{}.safetensors", False),
        ("blobs/{}.json", False),
        ("blobs/{}", False),
        ("manifest.json", False),
    ],
)
def test_names_that_hold_a_hash(key: str, named: bool) -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    assert named_hash(key.format(digest)) == (digest if named else None)
    assert named_hash(key.format(digest.upper())) is None
