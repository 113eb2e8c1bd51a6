"""The part of the mailbox contract that is about calls at the same moment."""

import asyncio
import threading
from collections.abc import Buffer, Callable, Iterable

import pytest

from gradientmail.mailbox.base import Mailbox

type OpenMailbox = Callable[[], Mailbox]
"""Opens one and the same store again with each call."""


def content(data: Buffer | None) -> bytes:
    """The bytes of an object that must be there."""
    assert data is not None
    return bytes(memoryview(data).cast("B")) if memoryview(data).nbytes else b""


def holds(data: Buffer | None, expected: bytes) -> bool:
    """Whether the object is there with these bytes; for large ones, whose difference is no news."""
    return content(data) == expected


async def fill(mailbox: Mailbox, keys: Iterable[str]) -> None:
    """Create every key, with itself as content."""
    created = await asyncio.gather(*(mailbox.put_if_absent(key, key.encode()) for key in keys))
    assert all(created)


class MailboxRaces:
    """Tests with several tasks, threads and event loops. ``MailboxContract`` includes them."""

    large_bytes = 5 * 2**20
    """Size of the object in the tests of large ones."""

    @pytest.fixture
    def open_mailbox(self) -> OpenMailbox:
        """Override: a function that opens one store, empty at first, anew with each call."""
        raise NotImplementedError("override the fixture open_mailbox")

    def test_one_of_32_tasks_wins(self, open_mailbox: OpenMailbox) -> None:
        """Concurrent puts of one key: one True, and its bytes are there."""

        async def main() -> None:
            boxes = [open_mailbox(), open_mailbox()]
            for key in ("race/0", "race/1", "race/2"):
                won = await asyncio.gather(
                    *(boxes[n % 2].put_if_absent(key, b"%d" % n) for n in range(32))
                )
                assert sum(won) == 1
                assert content(await boxes[0].get(key)) == b"%d" % won.index(True)

        asyncio.run(main())

    def test_one_of_several_threads_wins(self, open_mailbox: OpenMailbox) -> None:
        """One instance driven by eight threads with a loop each."""
        mailbox = open_mailbox()
        keys = [f"threads/{n}" for n in range(10)]
        wins: dict[str, list[int]] = {key: [] for key in keys}
        start = threading.Barrier(8)

        async def race(number: int) -> None:
            for key in keys:
                if await mailbox.put_if_absent(key, b"%d" % number):
                    wins[key].append(number)
                assert content(await mailbox.get(key)).isdigit()

        def thread(number: int) -> None:
            start.wait()
            asyncio.run(race(number))

        run_threads(thread, 8)
        assert [len(numbers) for numbers in wins.values()] == [1] * len(keys)
        for key in keys:
            assert content(asyncio.run(_get(mailbox, key))) == b"%d" % wins[key][0]

    def test_cancelled_put_is_whole_or_absent(self, open_mailbox: OpenMailbox) -> None:
        """Also when the caller overwrites its buffer as soon as it is cancelled."""

        async def main() -> None:
            mailbox = open_mailbox()
            for number in range(8):
                key, data = f"cancelled/{number}", bytearray(self.large_bytes)
                put = asyncio.ensure_future(mailbox.put_if_absent(key, memoryview(data)))
                await asyncio.sleep(0.001 * number)
                put.cancel()
                await asyncio.gather(put, return_exceptions=True)
                data[:] = b"\xff" * len(data)
                found = await mailbox.get(key)
                assert found is None or holds(found, bytes(self.large_bytes))
                again = await mailbox.put_if_absent(key, bytes(self.large_bytes))
                assert again is True or holds(await mailbox.get(key), bytes(self.large_bytes))

        asyncio.run(main())

    def test_readers_see_whole_objects(self, open_mailbox: OpenMailbox) -> None:
        """A reader in another thread finds each object absent or whole while it is written."""
        writer, reader = open_mailbox(), open_mailbox()
        keys = [f"whole/{number}" for number in range(6)]
        value = b"\x01" * 2**20
        failures: list[str] = []
        done = threading.Event()

        async def write() -> None:
            for key in keys:
                assert await writer.put_if_absent(key, value)

        async def watch() -> None:
            while not done.is_set():
                for key in keys:
                    found = await reader.get(key)
                    if found is not None and content(found) != value:
                        failures.append(key)
                listed = await reader.list("whole/")
                failures.extend([key for key in listed if await reader.get(key) is None])

        def thread(number: int) -> None:
            try:
                asyncio.run([write, watch][number]())
            finally:
                done.set()

        run_threads(thread, 2)
        assert failures == []

    def test_puts_race_with_deletes(self, open_mailbox: OpenMailbox) -> None:
        """Deleting the last object below a prefix while another is put there loses neither."""

        async def main() -> None:
            one, two = open_mailbox(), open_mailbox()
            await fill(one, ["deep/er/0"])
            for number in range(30):
                _, created = await asyncio.gather(
                    one.delete([f"deep/er/{number}"]),
                    two.put_if_absent(f"deep/er/{number + 1}", b"x"),
                )
                assert created
                assert list(await one.list("deep/")) == [f"deep/er/{number + 1}"]

        asyncio.run(main())


def run_threads(target: Callable[[int], None], count: int) -> None:
    """Run ``target(0)`` … in ``count`` threads; raise the first error that one of them raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            target(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


async def _get(mailbox: Mailbox, key: str) -> Buffer | None:
    return await mailbox.get(key)
