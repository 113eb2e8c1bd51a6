"""How a large object is cut, and the body of one upload: bytes that are read where they lie."""

import re
import threading
from io import SEEK_CUR, SEEK_END, SEEK_SET

from gradientmail.mailbox.base import Abandoned

MIB = 2**20
WHOLE_BYTES = 32 * MIB
"""Payloads up to this size are sent and fetched in one request: requests cost money."""
PART_BYTES = 16 * MIB
"""The smallest part of a larger one, but for its last."""
USUAL_PART_BYTES = 64 * MIB
"""The largest, as long as so many make the object: what is lost with a connection is sent again."""

MAX_PARTS = 10_000
MAX_WHOLE_BYTES = 5 * 2**30
"""S3 takes that much in one request, and in one part."""
MAX_OBJECT_BYTES = 5 * 2**40

CHUNK_BYTES = 2**17
"""How much is passed to the connection at a time. A timeout is for one of these."""

_HASHED = re.compile(r"(?:.*/)?([0-9a-f]{64})\.safetensors(?:\.zst)?", re.DOTALL)


def named_hash(key: str) -> str | None:
    """The sha256 that the key of a payload holds, None for any other key."""
    match = _HASHED.fullmatch(key)
    return match[1] if match else None


def cut(nbytes: int, width: int) -> list[tuple[int, int]]:
    """Start and stop of the parts of an object, when ``width`` of them travel at a time.

    All but the last have one size, as some stores want it. At most 10,000 of at most 5 GiB each:
    that is S3's limit, 5 TiB in all; ``ValueError`` beyond.
    """
    if nbytes > MAX_OBJECT_BYTES:
        raise ValueError(f"an object of {nbytes} bytes is larger than S3's limit of 5 TiB")
    size = min(max(-(-nbytes // (2 * width)), PART_BYTES), USUAL_PART_BYTES)
    size = max(size, -(-nbytes // MAX_PARTS))
    size = -(-size // MIB) * MIB
    return [(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]


class Body:
    """A file over a view, which it owns. It hands out slices; only the last chunk is copied.

    When ``abandoned`` is set before the last chunk is taken, reading raises ``Abandoned`` and the
    store gets less than it was promised, so that it makes no object. Everything before the last
    chunk has left the caller's buffer by then. So an object that comes to be has only bytes that
    were read while the caller was still waiting, none that it wrote into its buffer afterwards.
    """

    def __init__(self, view: memoryview, abandoned: threading.Event, sha256: str | None) -> None:
        """``sha256`` goes into the request's signature, and is checked by the store; or None."""
        self.sha256 = sha256
        self._view = view
        self._abandoned = abandoned
        self._at = 0

    def __len__(self) -> int:
        return self._view.nbytes

    def read(self, size: int = -1) -> bytes | memoryview:
        """The next chunk, of more bytes than asked for: a connection asks for 16 KiB at a time."""
        del size
        start, end = self._at, self._view.nbytes
        stop = self._at = min(start + CHUNK_BYTES, end)
        if stop < end:
            chunk: bytes | memoryview = self._view[start:stop]
        else:
            chunk = bytes(self._view[start:stop])
        if self._abandoned.is_set():
            raise Abandoned
        return chunk

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """As files do."""
        base = {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._view.nbytes}[whence]
        self._at = min(max(base + offset, 0), self._view.nbytes)
        return self._at

    def tell(self) -> int:
        """As files do."""
        return self._at

    def release(self) -> None:
        """Let go of the memory, whoever still holds this object."""
        self._view.release()
