"""The store in memory, by the contract that every mailbox passes."""

import asyncio

import pytest

from gradientmail.mailbox import MemoryMailbox
from gradientmail.testing.mailbox_contract import MailboxContract
from gradientmail.testing.mailbox_races import OpenMailbox


class TestMemoryMailbox(MailboxContract):
    examples = 100

    @pytest.fixture
    def open_mailbox(self) -> OpenMailbox:
        mailbox = MemoryMailbox()
        return lambda: mailbox


def test_objects_are_read_only_and_copied() -> None:
    async def main() -> None:
        mailbox, data = MemoryMailbox(), bytearray(b"data")
        await mailbox.put_if_absent("key", data)
        data.extend(b" and more")  # no view of it is left
        found = await mailbox.get("key")
        assert isinstance(found, bytes)
        assert found == b"data"

    asyncio.run(main())


def test_scattered_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        asyncio.run(MemoryMailbox().put_if_absent("key", memoryview(b"abcdef")[::2]))
