"""The event loop whose time is a number."""

import asyncio
import threading
from random import Random

import pytest

from gradientmail.testing.virtual_time import (
    Deadlock,
    TimeLimitReached,
    VirtualClock,
    VirtualTimeError,
    passing,
    run_virtual,
)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_time_jumps_to_each_timer_exactly() -> None:
    """Ten hours in 1,000 steps; on a real clock this test would not end."""

    async def main() -> list[float]:
        moments = []
        for _ in range(1000):
            await asyncio.sleep(36)
            moments.append(now())
        return moments

    assert run_virtual(main) == pytest.approx([36.0 * n for n in range(1, 1001)], abs=1e-6)


def test_long_and_tiny_sleeps() -> None:
    """More than the day that a selector waits at most, and a nanosecond after it."""

    async def main() -> None:
        await asyncio.sleep(5_000_000)
        assert now() == 5_000_000
        await asyncio.sleep(1e-9)
        assert now() == pytest.approx(5_000_000, abs=1e-8)
        await asyncio.sleep(0.25)
        assert now() == pytest.approx(5_000_000.25, abs=1e-8)

    run_virtual(main)


def test_timers_of_many_tasks_interleave_in_order() -> None:
    async def main() -> list[tuple[float, int]]:
        log: list[tuple[float, int]] = []

        async def ticker(number: int, period: float) -> None:
            while now() < 10:
                await asyncio.sleep(period)
                log.append((now(), number))

        await asyncio.gather(ticker(0, 1.0), ticker(1, 0.75), ticker(2, 2.5))
        return log

    log = run_virtual(main)
    assert [moment for moment, _ in log] == sorted(moment for moment, _ in log)
    assert [sum(number == n for _, number in log) for n in range(3)] == [10, 14, 4]


def test_timers_of_one_moment_ring_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        loop, log = asyncio.get_running_loop(), list[int]()
        for number in range(100):
            loop.call_at(7.0, log.append, number)
        loop.call_at(7.0, log.append, 100).cancel()
        await asyncio.sleep(7)
        return log

    assert run_virtual(main) == list(range(100))


def test_what_sleeps_for_ever_is_a_deadlock_and_cancelled_sleeps_take_no_time() -> None:
    async def main() -> None:
        slept = asyncio.ensure_future(asyncio.sleep(50))
        passed = asyncio.ensure_future(passing(60))
        await passing(2.5)
        slept.cancel()
        passed.cancel()
        asyncio.get_running_loop().call_later(float("inf"), print)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"no timer is set at 2\.5 virtual seconds"):
        run_virtual(main)


def test_a_timer_that_fails_is_reported_and_the_others_ring() -> None:
    told: list[str] = []

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(repr(context["exception"])))
        loop.call_later(1, lambda: 1 // 0)
        await asyncio.sleep(1)
        await passing(0)
        return now()

    assert run_virtual(main) == 1
    assert len(told) == 1
    assert told[0].startswith("ZeroDivisionError")


def test_years_pass_and_every_moment_is_exact() -> None:
    async def main() -> None:
        await asyncio.sleep(1e9)
        for _ in range(10):
            await asyncio.sleep(0.25)
        assert now() == 1e9 + 2.5

    run_virtual(main)


def trace(seed: int) -> list[tuple[float, int, float]]:
    """A small world with locks, queues and timeouts; everything that happened in it."""
    log: list[tuple[float, int, float]] = []

    async def node(number: int, random: Random, queue: asyncio.Queue[float]) -> None:
        for _ in range(50):
            await asyncio.sleep(random.random())
            await queue.put(random.random())
            try:
                async with asyncio.timeout(random.random()):
                    log.append((now(), number, await queue.get()))
                    await asyncio.sleep(random.random())
            except TimeoutError:
                log.append((now(), number, -1.0))

    async def main() -> None:
        queue: asyncio.Queue[float] = asyncio.Queue(3)
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(node(number, Random(seed + number), queue))

    run_virtual(main)
    return log


def test_the_same_seed_gives_the_same_world() -> None:
    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def test_result_and_error_come_out() -> None:
    async def result() -> str:
        return "result"

    async def error() -> None:
        await asyncio.sleep(1)
        raise KeyError("error")

    assert run_virtual(result) == "result"
    with pytest.raises(KeyError, match="error"):
        run_virtual(error)


def test_deadlock_is_an_error_and_tasks_are_cancelled() -> None:
    ended: list[float] = []

    async def main() -> None:
        await asyncio.sleep(5)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(now())

    with pytest.raises(Deadlock, match="no timer is set at 5 virtual seconds"):
        run_virtual(main)
    assert ended == [5]


def test_time_limit() -> None:
    async def main() -> None:
        for _ in range(100):
            await asyncio.sleep(7)

    with pytest.raises(TimeLimitReached, match="not ended after 100 virtual seconds"):
        run_virtual(main, limit_seconds=100)


def test_time_limit_is_inclusive() -> None:
    async def main() -> float:
        await asyncio.sleep(100)
        return asyncio.get_running_loop().time()

    assert run_virtual(main, limit_seconds=100) == 100


def test_spinning_is_an_error() -> None:
    async def main() -> None:
        await asyncio.sleep(3)
        for _ in range(10**9):
            await asyncio.sleep(0)

    with pytest.raises(VirtualTimeError, match="spins at 3 virtual seconds"):
        run_virtual(main)


def test_timers_that_set_each_other_at_one_moment_spin() -> None:
    async def main() -> None:
        def again() -> None:
            asyncio.get_running_loop().call_later(0, again)

        await asyncio.sleep(3)
        again()
        await asyncio.Event().wait()

    with pytest.raises(VirtualTimeError, match="spins at 3 virtual seconds"):
        run_virtual(main)


def test_threads_are_refused() -> None:
    async def executor() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(VirtualTimeError, match="inline as offload"):
        run_virtual(executor)

    async def calls_from_a_thread() -> list[str]:
        loop = asyncio.get_running_loop()
        errors: list[str] = []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except VirtualTimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        loop.call_soon_threadsafe(errors.append, "own thread")
        await asyncio.sleep(0)
        return errors

    assert run_virtual(calls_from_a_thread) == [
        "another thread called into virtual time, which has only one",
        "own thread",
    ]


def test_sockets_are_refused() -> None:
    async def main() -> None:
        asyncio.get_running_loop().add_reader(0, print)

    with pytest.raises(VirtualTimeError, match="no sockets and no pipes"):
        run_virtual(main)


def test_clocks_run_at_their_own_rates() -> None:
    async def main() -> None:
        fast, slow = VirtualClock(2.0), VirtualClock(0.5)
        await asyncio.sleep(10)
        assert (fast.now(), slow.now()) == (20.0, 5.0)
        await fast.sleep(4)
        assert now() == 12
        await slow.sleep(4)
        assert now() == 20
        assert (fast.now(), slow.now()) == (40.0, 10.0)

    run_virtual(main)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        VirtualClock(rate)
