"""The contract suite finds what is wrong with mailboxes that break one guarantee each."""

import asyncio
import inspect
from collections.abc import Buffer, Iterable, Iterator, Sequence

import pytest

from gradientmail.mailbox import MemoryMailbox
from gradientmail.testing.mailbox_contract import REFUSED_KEYS, MailboxContract
from gradientmail.testing.mailbox_races import OpenMailbox


class Replaces(MemoryMailbox):
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        created = await super().put_if_absent(key, data)
        self._objects[key] = bytes(data)
        return created


class ClaimsEveryPut(MemoryMailbox):
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        await super().put_if_absent(key, data)
        return True


class ChecksThenWrites(MemoryMailbox):
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        if await self.get(key) is not None:
            return False
        await asyncio.sleep(0)
        await self.delete([key])
        return await super().put_if_absent(key, data)


class KeepsTheCallersBuffer(MemoryMailbox):
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        created = await super().put_if_absent(key, b"")
        if created:
            self._objects[key] = memoryview(data)  # type: ignore[assignment]
        return created


class ReadsAfterCancellation(MemoryMailbox):
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def land() -> None:
            put = loop.create_task(super(ReadsAfterCancellation, self).put_if_absent(key, data))
            put.add_done_callback(lambda task: done.cancelled() or done.set_result(task.result()))

        loop.call_later(0.003, land)
        return await done


class ShowsParts(MemoryMailbox):
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        whole = bytes(data)
        created = await super().put_if_absent(key, whole[: len(whole) // 2])
        if created:
            await asyncio.sleep(0.01)
            self._objects[key] = whole
        return created


class ListsInOrderOfUtf16(MemoryMailbox):
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        keys = await super().list(prefix, after=after)
        return sorted(keys, key=lambda key: key.encode("utf-16-be"))


class ListsInFolderOrder(MemoryMailbox):
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        return sorted(await super().list(prefix, after=after), key=lambda key: key.split("/"))


class ListsAfterToo(MemoryMailbox):
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        keys = await super().list(prefix)
        return [key for key in keys if key >= after]


class IgnoresAfter(MemoryMailbox):
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        return await super().list(prefix)


class ListsWholeFolders(MemoryMailbox):
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        return await super().list(prefix[: prefix.rfind("/") + 1], after=after)


class ListsOnePage(MemoryMailbox):
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        return (await super().list(prefix, after=after))[:100]


class ListsLate(MemoryMailbox):
    def __init__(self) -> None:
        super().__init__()
        self._seen: Sequence[str] = ()

    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        seen, self._seen = self._seen, await super().list("")
        return [key for key in seen if key.startswith(prefix) and key > after]


class DeletesByPrefix(MemoryMailbox):
    async def delete(self, keys: Iterable[str], /) -> None:
        for key in keys:
            await super().delete(await self.list(key))


class CountsKeysFirst(MemoryMailbox):
    async def delete(self, keys: Iterable[str], /) -> None:
        if sum(1 for _ in keys):
            await super().delete(keys)


class DislikesMissing(MemoryMailbox):
    async def delete(self, keys: Iterable[str], /) -> None:
        for key in keys:
            if await self.get(key) is None:
                raise KeyError(key)
            await super().delete([key])


class EmptyIsMissing(MemoryMailbox):
    async def get(self, key: str, /) -> bytes | None:
        return await super().get(key) or None


class TakesAnyKey(MemoryMailbox):
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        return await super().put_if_absent(key.replace("..", "dots"), data)


class BelongsToOneLoop(MemoryMailbox):
    def __init__(self) -> None:
        super().__init__()
        self._owner: asyncio.AbstractEventLoop | None = None

    async def get(self, key: str, /) -> bytes | None:
        self._owner = self._owner or asyncio.get_running_loop()
        assert asyncio.get_running_loop() is self._owner
        return await super().get(key)


BROKEN = [
    Replaces,
    ClaimsEveryPut,
    ChecksThenWrites,
    KeepsTheCallersBuffer,
    ReadsAfterCancellation,
    ShowsParts,
    ListsInOrderOfUtf16,
    ListsInFolderOrder,
    ListsAfterToo,
    IgnoresAfter,
    ListsWholeFolders,
    ListsOnePage,
    ListsLate,
    DeletesByPrefix,
    CountsKeysFirst,
    DislikesMissing,
    EmptyIsMissing,
    TakesAnyKey,
    BelongsToOneLoop,
]


def failures(make: type[MemoryMailbox]) -> Iterator[str]:
    """The names of the tests that a mailbox fails; the random one, which searches long, last."""
    suite = MailboxContract()
    suite.examples = 10
    tests = [each for each in inspect.getmembers(suite, inspect.ismethod) if "test_" in each[0]]
    for name, test in sorted(tests, key=lambda each: "dictionary" in each[0]):
        for key in REFUSED_KEYS if name == "test_refused_keys" else (None,):
            mailbox = make()

            def open_mailbox(mailbox: MemoryMailbox = mailbox) -> MemoryMailbox:
                return mailbox

            opened: OpenMailbox = open_mailbox
            try:
                test(opened, *([] if key is None else [key]))
            except (Exception, pytest.fail.Exception):
                yield name


def test_a_right_one_passes() -> None:
    assert list(failures(MemoryMailbox)) == []


@pytest.mark.parametrize("broken", BROKEN)
def test_a_wrong_one_is_found(broken: type[MemoryMailbox]) -> None:
    assert next(failures(broken), None) is not None
