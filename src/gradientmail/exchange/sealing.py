"""Payloads in memory: as they are written and hashed, sealed for the store, and held."""

import hashlib
from collections.abc import Callable, Mapping

from gradientmail.exchange.payload import PayloadLayout, Slot
from gradientmail.exchange.records import Ref


class Payload:
    """A stored payload in memory: its ref, its uncompressed bytes, where its tensors lie."""

    __slots__ = ("__weakref__", "buffer", "ref", "slots", "sole", "squares")

    def __init__(self, ref: Ref, buffer: memoryview, slots: Mapping[str, Slot]) -> None:
        self.ref = ref
        self.buffer = buffer
        self.slots = slots
        self.squares: Mapping[str, float] | None = None
        """``Σ x²`` of each tensor, if whoever made the payload has computed it."""
        self.sole = False
        """Whether the buffer is this process's own and its store has kept no view of it."""

    def data(self, name: str) -> memoryview:
        """The bytes of one tensor."""
        slot = self.slots[name]
        return self.buffer[slot.start : slot.stop]


class Sealed:
    """A payload ready to be stored: hashed, compressed if asked for, its key known."""

    __slots__ = ("buffer", "layout", "ref", "shown", "stored")

    def __init__(
        self, ref: Ref, buffer: memoryview, stored: memoryview, payload_layout: PayloadLayout
    ) -> None:
        self.ref = ref
        self.buffer = buffer
        self.stored = stored
        self.layout = payload_layout
        self.shown: list[Callable[[], bool]] = []
        """For each attempt to store it, what tells whether the store has let go of the bytes."""


class Sealing:
    """A payload that is hashed while it is still being written, from its start on."""

    __slots__ = ("buffer", "hashed", "layout", "sha256")

    def __init__(self, buffer: memoryview, payload_layout: PayloadLayout) -> None:
        self.buffer = buffer
        self.layout = payload_layout
        self.sha256 = hashlib.sha256()
        self.hashed = 0
        """So many bytes are."""

    def hash_until(self, stop: int) -> None:
        """Take in the bytes up to ``stop``. Other threads run meanwhile."""
        self.sha256.update(self.buffer[self.hashed : stop])
        self.hashed = stop
