"""Memory that is kept and reused.

Touching fresh pages costs several times what copying into warm ones does, so the large buffers of
a node come from a pool that hands out pages it has handed out before, whatever the sizes. Host
memory never has more pages than were once in use at a time. A buffer goes back by itself when the
last view of it is gone: slices, tensors over it, and a view that a store or a cancelled upload
still holds all keep it out.
Nobody returns anything by hand, so nothing can be overwritten while it is still read.
"""

import atexit
import contextlib
import mmap
import sys
import traceback
from bisect import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from weakref import ref

from gradientmail.forking import lock_over_forks

PAGE = mmap.PAGESIZE
SMALL = 2**16
"""Buffers below this many bytes are not pooled."""
GRAIN = max(PAGE, 2**16)
"""Host memory is handed out in multiples of it, so that payloads which differ in a few bytes of
their headers fit where another one was."""
ADDRESS_SPACE = 2**34
"""Bytes of address space that host memory is reserved in at a time; memory only once touched."""
TURNS = 2
"""What was idle while all memory was handed out so many times over is given back to the system."""


TOUCHED = 2**20
"""Bytes that get pages with the interpreter's lock held; then other threads can have it."""
GIVEN_BACK = 2**24
"""Bytes that lose them likewise."""


type _Stretch = tuple[int, int]
"""From the first byte to the one behind the last, in a block."""


@dataclass(slots=True)
class _Gap:
    """A stretch of a block that nobody uses."""

    start: int
    stop: int
    warm: list[_Stretch]
    """Where it has pages: in order, none touching another."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def warm_in(self, start: int, stop: int) -> int:
        """How many of these bytes have pages."""
        return sum(max(min(end, stop) - max(begin, start), 0) for begin, end in self.warm)

    def part(self, start: int, stop: int) -> "_Gap":
        """These bytes as a gap of their own."""
        inside = [(max(begin, start), min(end, stop)) for begin, end in self.warm]
        return _Gap(start, stop, [one for one in inside if one[0] < one[1]])

    def extend(self, other: "_Gap") -> None:
        """Take in the gap that begins where this one ends."""
        self.stop = other.stop
        if self.warm and other.warm and self.warm[-1][1] == other.warm[0][0]:
            self.warm[-1:] = [(self.warm[-1][0], other.warm[0][1]), *other.warm[1:]]
        else:
            self.warm += other.warm


class _Block:
    """A stretch of memory with the gaps in it, in order, none touching another."""

    __slots__ = ("gaps", "mapping", "memory")

    def __init__(self, memory: memoryview, mapping: mmap.mmap | None) -> None:
        self.memory = memory
        self.mapping = mapping
        self.gaps = [_Gap(0, memory.nbytes, [])]

    def carve(self, nbytes: int) -> int | None:
        """Take ``nbytes`` of one gap, from its start or its end; the offset, None without one.

        Where most of them have pages, and then where the gap is largest: what stays of it is
        large enough for others. (In recorded runs that had least to be touched again.)
        """
        places = [
            (-gap.warm_in(start, start + nbytes), -gap.nbytes, start, gap)
            for gap in self.gaps
            if gap.nbytes >= nbytes
            for start in self._ends(gap, nbytes)
        ]
        if not places:
            return None
        _, _, start, gap = min(places, key=lambda place: place[:3])
        index = self.gaps.index(gap)
        rest = [gap.part(gap.start, start), gap.part(start + nbytes, gap.stop)]
        self.gaps[index : index + 1] = [one for one in rest if one.nbytes]
        return start

    def _ends(self, gap: _Gap, nbytes: int) -> tuple[int, ...]:
        """Where in the gap: not at the far end of all memory, from which nothing would grow."""
        return (gap.start,) if gap.stop == self.memory.nbytes else (gap.start, gap.stop - nbytes)

    def mend(self, start: int, stop: int) -> None:
        """Put a stretch back, joined with the gaps that it touches."""
        index = bisect(self.gaps, start, key=lambda gap: gap.start)
        self.gaps.insert(index, _Gap(start, stop, [(start, stop)]))
        if index + 1 < len(self.gaps) and self.gaps[index + 1].start == stop:
            self.gaps[index].extend(self.gaps.pop(index + 1))
        if index and self.gaps[index - 1].stop == start:
            self.gaps[index - 1].extend(self.gaps.pop(index))

    def idle(self) -> int:
        """The bytes with pages that nobody uses."""
        return sum(end - begin for gap in self.gaps for begin, end in gap.warm)

    def give_back(self, nbytes: int) -> int:
        """Give up to ``nbytes`` in pages of gaps back to the system; how many.

        The smallest gaps first, which are of least use.
        """
        if self.mapping is None or not hasattr(self.mapping, "madvise"):
            return 0
        left = nbytes // PAGE * PAGE
        for gap in sorted(self.gaps, key=lambda gap: gap.nbytes):
            while left and gap.warm:
                begin, end = gap.warm[-1]
                cold = min(left, end - begin, GIVEN_BACK)
                try:
                    self.mapping.madvise(mmap.MADV_DONTNEED, end - cold, cold)
                except OSError:  # the process has locked its memory: all of it stays
                    return nbytes // PAGE * PAGE - left
                gap.warm[-1:] = [(begin, end - cold)] if cold < end - begin else []
                left -= cold
        return nbytes // PAGE * PAGE - left


class _Shown:
    """Gives views of ``memory``, each of which holds it."""

    __slots__ = ("__weakref__", "_memory")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    # No ``__release_buffer__``: in the interpreter's last collection the class may go before a view
    # does, which would then ask for it in vain, and say so.
    def __buffer__(self, flags: int, /) -> memoryview:
        return memoryview(self._memory)


def touch(buffer: memoryview) -> None:
    """Give all its pages memory. One that has it keeps what it holds, but for its first byte."""
    for start in range(0, buffer.nbytes, TOUCHED):
        firsts = buffer[start : start + TOUCHED : PAGE]
        firsts[:] = bytes(firsts.nbytes)


def show(memory: memoryview) -> tuple[memoryview, Callable[[], bool]]:
    """A read-only view for others, and what tells whether it and all made from it are gone."""
    shown = _Shown(memory.toreadonly())
    found = ref(shown)
    return memoryview(shown), lambda: found() is None


class _Lease(int):
    """One use of a buffer. The views of it hold it; their end gives the memory back.

    A number without attributes, so that the cyclic collector, which takes apart what it finds in a
    cycle before the views in it end, has nothing to take here: a memoryview held by the lease would
    come back to the pool released.
    """

    __slots__ = ()

    def __buffer__(self, flags: int, /) -> memoryview:
        return memoryview(_lent[self][1])

    def __release_buffer__(self, view: memoryview, /) -> None:
        view.release()
        found, _, block, start, stop = _lent.pop(self)
        pool = found()
        if pool is not None:
            # Perhaps called by the collector inside ``take``: no lock here, and no list is touched.
            pool._returned.append((block, start, stop))  # noqa: SLF001


@atexit.register
def _end_views() -> None:
    """Let go of what an error has kept that ended the program, while ``_Lease`` is whole.

    Its frames hold views. In the interpreter's last collection the class may go before them, and
    Python would say that it lacks ``__release_buffer__``.
    """
    error: BaseException | None = getattr(sys, "last_exc", None)
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


_lent: dict[int, tuple["ref[BufferPool]", memoryview, _Block, int, int]] = {}
"""By lease: the pool, the memory in use, and where that lies."""
_leases = count()


class BufferPool:
    """Buffers of any size. Safe to use from several threads."""

    def __init__(self, *, allocate: Callable[[int], memoryview] | None = None) -> None:
        """``allocate`` gives blocks of special memory (pinned, say); plain host memory without."""
        self._allocate = allocate
        self._blocks: list[_Block] = []
        self._returned: deque[tuple[_Block, int, int]] = deque()
        self._lock = lock_over_forks()
        self._lent = self._most = 0
        """Bytes in use, and the most that were at a time."""
        self._taken = 0
        self._surplus = 0

    def take(self, nbytes: int) -> memoryview:
        """A writable view of exactly ``nbytes`` bytes, with whatever content they had."""
        if nbytes < SMALL and self._allocate is None:
            return memoryview(bytearray(nbytes))
        grain = PAGE if self._allocate else GRAIN
        size = max(-(-nbytes // grain), 1) * grain
        with self._lock:
            self._mend()
            block, start = self._carve(size)
            self._lent += size
            self._most = max(self._most, self._lent)
            if self._allocate is None:  # gaps that were too small would stay beside it
                self._give_back(max(self._lent + self._idle() - self._most, 0))
            self._give_up_surplus(size)
        lease = _Lease(next(_leases))
        memory = block.memory[start : start + nbytes]
        _lent[lease] = ref(self), memory, block, start, start + size
        return memoryview(lease)

    def trim(self) -> None:
        """Give back to the system all that nobody uses."""
        with self._lock:
            self._mend()
            self._give_back(self._idle())

    def _carve(self, size: int) -> tuple[_Block, int]:
        for block in self._blocks:
            start = block.carve(size)
            if start is not None:
                return block, start
        block = _reserve(size) if self._allocate is None else _Block(self._allocate(size), None)
        self._blocks.append(block)
        block.carve(size)
        return block, 0

    def _mend(self) -> None:
        """Take back what has been returned."""
        while self._returned:
            block, start, stop = self._returned.popleft()
            block.mend(start, stop)
            self._lent -= stop - start

    def _idle(self) -> int:
        return sum(block.idle() for block in self._blocks)

    def _give_up_surplus(self, taken: int) -> None:
        """Now and then, give back as much as was idle all the time since the last time.

        Counted in bytes: one payload may be decoded into a hundred buffers, or into one.
        """
        idle = self._idle()
        self._surplus = min(self._surplus, idle) if self._taken else idle
        self._taken += taken
        if self._taken >= TURNS * (self._lent + idle):
            self._taken = 0
            self._give_back(self._surplus)

    def _give_back(self, nbytes: int) -> None:
        for block in reversed(self._blocks):
            nbytes -= block.give_back(nbytes)
            whole = block.gaps[0] if len(block.gaps) == 1 else None
            unused = whole is not None and whole.nbytes == block.memory.nbytes
            if unused and block.mapping is None and nbytes >= block.memory.nbytes:
                nbytes -= block.memory.nbytes
                self._blocks.remove(block)


def _reserve(size: int) -> _Block:
    """Address space for host memory of ``size`` bytes or far more; pages come when touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    for nbytes in (max(size, ADDRESS_SPACE), max(size, ADDRESS_SPACE // 64)):
        with contextlib.suppress(OSError, OverflowError):  # a limit on address space
            mapping = mmap.mmap(-1, nbytes, flags=flags)
            return _Block(memoryview(mapping), mapping)
    mapping = mmap.mmap(-1, size, flags=flags)
    return _Block(memoryview(mapping), mapping)


_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Python names this flag from 3.13 on; the number is Linux's on x86 and Arm."""


HOST = BufferPool()
"""The process's pool of plain host memory, which mailboxes and sessions share."""
