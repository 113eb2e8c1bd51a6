"""Pooled memory: never handed out while somebody looks at it, handed out again afterwards."""

import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch

from gradientmail import buffers
from gradientmail.buffers import GRAIN, PAGE, SMALL, TOUCHED, BufferPool, show, touch

BIG = 2 * SMALL


def special(nbytes: int) -> memoryview:
    """What a backend would allocate, pinned memory for example."""
    return memoryview(bytearray(nbytes))


POOLS: list[Callable[[], BufferPool]] = [BufferPool, lambda: BufferPool(allocate=special)]
each_pool = pytest.mark.parametrize("make", POOLS, ids=["host", "special"])


def address(view: memoryview) -> int:
    """Where a writable view lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@each_pool
@pytest.mark.parametrize("nbytes", [0, 1, 100, SMALL - 1, SMALL, SMALL + 1, PAGE * 50 + 7])
def test_a_buffer_has_the_size_asked_for_and_can_be_written(
    make: Callable[[], BufferPool], nbytes: int
) -> None:
    view = make().take(nbytes)
    assert view.nbytes == nbytes
    assert not view.readonly
    assert view.format == "B"
    assert view.c_contiguous
    view[:] = bytes([7]) * nbytes
    assert bytes(view) == bytes([7]) * nbytes


@each_pool
def test_memory_is_used_again_when_the_last_view_is_gone(make: Callable[[], BufferPool]) -> None:
    pool = make()
    view = pool.take(BIG)
    where = address(view)
    part = view[100:200]
    tensor = torch.frombuffer(part, dtype=torch.uint8)
    readonly = view.toreadonly()
    for drop in ("view", "part", "readonly", "tensor"):
        other = pool.take(BIG)
        assert address(other) != where, f"handed out before {drop} was dropped"
        del other
        if drop == "view":
            del view
        elif drop == "part":
            del part
        elif drop == "readonly":
            del readonly
        else:
            del tensor
    gc.collect()
    found = {address(one) for one in [pool.take(BIG) for _ in range(4)]}
    assert where in found


def test_memory_is_used_again_for_a_payload_whose_header_is_a_little_longer() -> None:
    pool = BufferPool()
    view, behind = pool.take(GRAIN * 7 // 2 - 8), pool.take(BIG)
    where = address(view)
    del view
    longer = pool.take(GRAIN * 7 // 2 + 8)
    assert address(longer) == where
    assert address(behind) == where + GRAIN * 4


@each_pool
@pytest.mark.parametrize("seed", range(5))
def test_buffers_in_use_never_overlap(make: Callable[[], BufferPool], seed: int) -> None:
    print(f"seed {seed}")
    random, pool = Random(seed), make()
    held: dict[int, tuple[memoryview, bytes]] = {}
    for number in range(300):
        if held and random.random() < 0.45:
            view, fill = held.pop(random.choice(list(held)))
            assert bytes(view[:8]) == fill
            assert bytes(view[-8:]) == fill
            del view
            continue
        nbytes = random.choice([random.randrange(8, BIG * 4), BIG, PAGE * 40])
        view, fill = pool.take(nbytes), number.to_bytes(8, "little")
        view[:8] = fill
        view[-8:] = fill
        held[number] = (view, fill)
    spans = sorted((address(view), view.nbytes) for view, _ in held.values())
    for (start, nbytes), (following, _) in pairwise(spans):
        assert start + nbytes <= following
    for view, fill in held.values():
        assert bytes(view[:8]) == fill
        assert bytes(view[-8:]) == fill


@each_pool
def test_buffers_in_a_cycle_that_the_collector_breaks_do_no_harm(
    make: Callable[[], BufferPool],
) -> None:
    """As tracebacks and cancelled tasks make them. Once this left released views in the pool."""
    pool = make()
    gc.disable()
    try:
        for round_ in range(15):
            cycle: list[Any] = [pool.take(BIG)[5:]]
            cycle += [cycle[0][1:3], torch.frombuffer(cycle[0], dtype=torch.uint8), cycle]
            del cycle
            if round_ % 3 == 0:
                gc.collect()
            view = pool.take(BIG)
            view[0] = 1
            del view
        gc.collect()
        first, second = pool.take(BIG), pool.take(BIG)
        first[:], second[:] = b"\1" * BIG, b"\2" * BIG
        assert bytes(first) == b"\1" * BIG
    finally:
        gc.enable()


@each_pool
def test_a_buffer_outlives_its_pool(make: Callable[[], BufferPool]) -> None:
    view = make().take(BIG)
    gc.collect()
    view[:] = b"x" * BIG
    assert bytes(view) == b"x" * BIG
    del view
    gc.collect()


@each_pool
def test_a_pool_in_a_cycle_with_its_buffers_ends(make: Callable[[], BufferPool]) -> None:
    lent = len(buffers._lent)
    for _ in range(3):
        cycle: list[Any] = [make()]
        ended = weakref.ref(cycle[0])
        cycle += [cycle[0].take(BIG), cycle]
        del cycle
        gc.collect()
        assert ended() is None
        assert len(buffers._lent) == lent


@each_pool
def test_several_threads_at_once(make: Callable[[], BufferPool]) -> None:
    pool = make()
    errors: list[int] = []

    def work(mark: int) -> None:
        random = Random(mark)
        for _ in range(150):
            views = [pool.take(random.randrange(1, 3) * BIG + random.randrange(PAGE)) for _ in "ab"]
            for view in views:
                view[:16] = bytes([mark]) * 16
                view[-16:] = bytes([mark]) * 16
            ends = [bytes(view[:16]) + bytes(view[-16:]) for view in views]
            if ends != [bytes([mark]) * 32] * 2:
                errors.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_the_pool_does_not_grow_while_sizes_recur() -> None:
    calls: list[int] = []

    def allocate(nbytes: int) -> memoryview:
        calls.append(nbytes)
        return special(nbytes)

    pool = BufferPool(allocate=allocate)
    for _ in range(50):
        views = [pool.take(nbytes) for nbytes in (BIG, 3 * BIG, BIG)]
        del views
    assert len(calls) == 3


def test_what_is_shown_is_read_only_and_known_to_end() -> None:
    memory = memoryview(bytearray(b"hello"))
    view, ended = show(memory)
    part = view[1:3]
    assert view.readonly
    assert bytes(part) == b"el"
    assert not ended()
    del view
    assert not ended()
    del part
    assert ended()
    memory[0] = 0  # the owner's own view is as it was


def test_what_is_shown_may_outlive_its_class_in_silence() -> None:
    """At the interpreter's end all may go at once, the class before the view."""
    script = (
        "from gradientmail import buffers\n"
        "view, _ = buffers.show(memoryview(bytearray(9)))\n"
        "buffers._Shown.held = [view]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=110
    )
    assert done.stderr == ""


def test_an_error_that_ends_the_program_is_all_that_is_said() -> None:
    """Its frames hold buffers, also those of the error that it came from."""
    script = (
        "from gradientmail.buffers import HOST\n"
        "def work():\n"
        "    view = HOST.take(2**20)\n"
        "    try:\n"
        "        raise OSError('full')\n"
        "    except OSError as error:\n"
        "        kept = error\n"
        "        raise RuntimeError('so it is') from kept\n"
        "work()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: so it is\n")


def warm_bytes(pool: BufferPool) -> int:
    """Idle memory that has pages."""
    with pool._lock:
        pool._mend()
        return pool._idle()


def test_idle_memory_stays_warm_however_many_small_buffers_are_taken() -> None:
    """A payload may be decoded into hundreds: the large buffer of the next round must stay."""
    pool = BufferPool()
    views = [pool.take(100 * BIG), pool.take(100 * BIG)]
    del views
    for _ in range(150):
        pool.take(SMALL)
    assert warm_bytes(pool) == 200 * BIG


def test_memory_that_nobody_needs_for_long_is_given_back() -> None:
    pool = BufferPool()
    views = [pool.take(100 * BIG), pool.take(BIG)]
    del views
    assert warm_bytes(pool) == 101 * BIG
    for _ in range(4 * 101):
        pool.take(BIG)
    assert warm_bytes(pool) == BIG


@pytest.mark.parametrize("seed", range(5))
def test_never_has_the_pool_more_memory_than_was_lent_at_a_time(seed: int) -> None:
    """However gaps lie between what is in use: what splits is no reason to grow."""
    print(f"seed {seed}")
    random, pool = Random(seed), BufferPool()
    held: list[memoryview] = []
    most = 0
    for _ in range(400):
        if held and random.random() < 0.48:
            held.pop(random.randrange(len(held)))
        else:
            held.append(pool.take(BIG * random.choice([1, 3, 10, 21])))
        lent = sum(view.nbytes for view in held)
        most = max(most, lent)
        assert warm_bytes(pool) + lent <= most


@pytest.mark.parametrize("seed", range(5))
def test_what_counts_as_warm_has_pages_and_nothing_else(seed: int) -> None:
    """As the system sees it: what was given back is zero, all other idle memory as it was left."""
    print(f"seed {seed}")
    random, pool = Random(seed), BufferPool()
    held: list[memoryview] = []
    for _ in range(200):
        if held and random.random() < 0.48:
            held.pop(random.randrange(len(held)))
        else:
            held.append(pool.take(BIG * random.choice([1, 3, 10, 21])))
            held[-1][:] = b"x" * held[-1].nbytes
    warm_bytes(pool)  # takes back what was returned
    for block in pool._blocks:
        end = max((stop for gap in block.gaps for _, stop in gap.warm), default=0)
        expected = bytearray(b"x" * end)
        for gap in block.gaps:
            cold = [gap.start, *(edge for stretch in gap.warm for edge in stretch), gap.stop]
            for start, stop in zip(cold[::2], cold[1::2], strict=True):
                expected[start : min(stop, end)] = bytes(max(min(stop, end) - start, 0))
        assert bytes(block.memory[:end]) == expected


def test_memory_that_is_warm_goes_before_a_smaller_gap_that_is_not() -> None:
    pool = BufferPool()
    views = [pool.take(count * BIG) for count in (20, 1, 10, 1)]
    views[2] = views[3]
    pool.trim()  # what had the ten is cold now
    views[0] = views[3]
    assert warm_bytes(pool) == 20 * BIG
    views.append(pool.take(10 * BIG))
    assert warm_bytes(pool) == 10 * BIG


def test_gaps_that_are_too_small_are_given_back() -> None:
    pool = BufferPool()
    views = [pool.take(10 * BIG) for _ in range(3)]
    views[0] = pool.take(BIG)  # beyond all, for none is free yet
    views[2] = pool.take(2 * BIG)
    assert warm_bytes(pool) == 18 * BIG
    longer = pool.take(15 * BIG)
    assert longer.nbytes == 15 * BIG
    assert warm_bytes(pool) == 3 * BIG


def test_memory_that_the_process_has_locked_is_kept() -> None:
    """The system refuses to take it back; that is nobody's fault, and breaks no take."""
    pool = BufferPool()
    buffer = pool.take(BIG)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(PAGE)) == 0
    try:
        del buffer
        for _ in range(3):
            pool.trim()
            other = pool.take(2 * BIG)
            other[:] = b"x" * (2 * BIG)
            del other
        again = pool.take(BIG)
        assert ctypes.addressof(ctypes.c_char.from_buffer(again)) == address
    finally:
        libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(PAGE))


@pytest.mark.parametrize("nbytes", [0, 1, PAGE + 1, TOUCHED + PAGE, 3 * TOUCHED + 5])
def test_touching_writes_a_byte_of_each_page_and_nothing_else(nbytes: int) -> None:
    buffer = memoryview(bytearray(b"\7" * nbytes))
    touch(buffer)
    expected = bytearray(b"\7" * nbytes)
    for start in range(0, nbytes, PAGE):
        expected[start] = 0
    assert buffer == expected


def test_other_threads_run_while_a_buffer_is_touched() -> None:
    """Each store into the buffer holds the interpreter's lock: none is for more than a mebibyte."""
    stored: list[int] = []

    class Noting:
        """As much of a memoryview as ``touch`` uses."""

        def __init__(self, view: memoryview) -> None:
            self.view, self.nbytes = view, view.nbytes

        def __getitem__(self, where: slice) -> "Noting":
            stored.append(len(range(*where.indices(len(self.view)))) * PAGE)
            return Noting(self.view[where])

        def __setitem__(self, where: slice, values: bytes) -> None:
            self.view[where] = values

    touch(Noting(memoryview(bytearray(5 * TOUCHED))))  # pyrefly: ignore[bad-argument-type]
    assert stored == [TOUCHED] * 5
