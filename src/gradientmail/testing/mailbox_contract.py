"""The tests that every mailbox passes. Needs pytest and hypothesis.

Subclass ``MailboxContract`` under a name that pytest collects, and give it the store::

    class TestMyMailbox(MailboxContract):
        @pytest.fixture
        def open_mailbox(self, tmp_path):
            return lambda: MyMailbox(tmp_path)

Each test runs its own event loops; no plugin is needed. For the values in a failed assertion, call
``pytest.register_assert_rewrite("gradientmail.testing")`` in ``conftest.py``.
"""

import asyncio
import itertools
from collections.abc import Buffer

import pytest

from gradientmail.mailbox.base import MAX_KEY_BYTES, Mailbox
from gradientmail.testing.mailbox_histories import check_histories
from gradientmail.testing.mailbox_races import MailboxRaces, OpenMailbox, content, fill, holds

ORDERED_KEYS = (
    "a b",
    "a-b",
    "a.b",
    "a/b",
    "a/b-c",
    "a/b.c",
    "a/c/d",
    "a0",
    "aa/b",
    "b",
    "rounds/0000000009.json",
    "rounds/0000000010.json",
    "z/é",
    "é-x",
    "é/x",
    "\uff5e",
    "\U00010000",
)
"""In the order of their UTF-8 bytes, which is neither that of folders nor that of UTF-16."""

REFUSED_KEYS = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "a/..",
    "a\0b",
    "\udcff",
    "k" * (MAX_KEY_BYTES + 1),
    "é" * (MAX_KEY_BYTES // 2 + 1),
)


class MailboxContract(MailboxRaces):
    """Tests of the guarantees that ``gradientmail.mailbox.base`` states."""

    many_keys = 120
    """How many objects the listing and deleting of many is tried with."""
    examples = 25
    """How many random histories are compared with the model."""

    def test_is_a_mailbox(self, open_mailbox: OpenMailbox) -> None:
        """The four operations are there."""
        assert isinstance(open_mailbox(), Mailbox)

    def test_first_put_wins(self, open_mailbox: OpenMailbox) -> None:
        """A second put changes nothing and says so, from any handle."""

        async def main() -> None:
            one, two = open_mailbox(), open_mailbox()
            assert await one.put_if_absent("a/key", b"first") is True
            assert await one.put_if_absent("a/key", b"second") is False
            assert await two.put_if_absent("a/key", b"first") is False
            assert content(await one.get("a/key")) == b"first"

        asyncio.run(main())

    def test_any_contiguous_buffer_of_bytes(self, open_mailbox: OpenMailbox) -> None:
        """Bytes, bytearray, views writable and not, parts of buffers, and the empty object."""
        values: list[Buffer] = [
            b"bytes",
            bytearray(b"bytearray"),
            memoryview(b"read-only"),
            memoryview(bytearray(b"0123456789"))[3:7],
            b"",
            bytearray(),
            memoryview(b"ab")[1:1],
            bytes(range(256)),
        ]

        async def main() -> None:
            mailbox = open_mailbox()
            for number, value in enumerate(values):
                assert await mailbox.put_if_absent(f"values/{number}", value)
                assert holds(await mailbox.get(f"values/{number}"), bytes(value))

        asyncio.run(main())

    def test_large_object(self, open_mailbox: OpenMailbox) -> None:
        """Megabytes come back as they were, twice, also while another one is held."""
        one = bytes(range(251)) * (self.large_bytes // 251)
        other = bytes(reversed(one))

        async def main() -> None:
            mailbox = open_mailbox()
            assert await mailbox.put_if_absent("large/one", memoryview(one))
            assert await mailbox.put_if_absent("large/other", other)
            held = await mailbox.get("large/one")
            assert holds(await mailbox.get("large/other"), other)
            assert holds(held, one)
            del held
            assert holds(await mailbox.get("large/one"), one)

        asyncio.run(main())

    def test_buffer_is_the_callers_again(self, open_mailbox: OpenMailbox) -> None:
        """What the caller writes into its buffer after the put does not reach the object."""
        large = bytearray(self.large_bytes)
        small = bytearray(b"before")

        async def main() -> None:
            mailbox = open_mailbox()
            for key, data in (("reuse/large", large), ("reuse/small", small)):
                before = bytes(data)
                assert await mailbox.put_if_absent(key, data)
                data[:] = b"\xff" * len(data)
                assert holds(await mailbox.get(key), before)

        asyncio.run(main())

    def test_reads_see_writes(self, open_mailbox: OpenMailbox) -> None:
        """Every handle sees a put and a delete as soon as they have returned."""

        async def main() -> None:
            one, two = open_mailbox(), open_mailbox()
            for number in range(5):
                key = f"seen/{number % 2}/key"
                assert await two.get(key) is None
                assert await one.put_if_absent(key, b"%d" % number)
                assert content(await two.get(key)) == b"%d" % number
                assert list(await two.list("seen/")) == [key]
                await two.delete([key])
                assert await one.get(key) is None
                assert list(await one.list("seen/")) == []

        asyncio.run(main())

    def test_missing_objects(self, open_mailbox: OpenMailbox) -> None:
        """Neither a prefix of a key nor a key below an object is there."""

        async def main() -> None:
            mailbox = open_mailbox()
            assert await mailbox.get("nothing") is None
            assert list(await mailbox.list("")) == []
            await fill(mailbox, ["folder/object"])
            for key in ("folder", "folder/obj", "folder/object/below", "folder/object2"):
                assert await mailbox.get(key) is None
            assert list(await mailbox.list("folder/object/")) == []

        asyncio.run(main())

    def test_list_is_in_the_order_of_utf8(self, open_mailbox: OpenMailbox) -> None:
        """All keys, and what follows each of them and each text between them."""

        async def main() -> None:
            mailbox = open_mailbox()
            await fill(mailbox, reversed(ORDERED_KEYS))
            assert sorted(ORDERED_KEYS, key=str.encode) == list(ORDERED_KEYS)
            assert list(await mailbox.list("")) == list(ORDERED_KEYS)
            between = ["a", "a/", "a/b/", "a/b0", "rounds/", "rounds/00", "\U0010ffff"]
            for after in (*ORDERED_KEYS, *between):
                beyond = [key for key in ORDERED_KEYS if key.encode() > after.encode()]
                assert list(await mailbox.list("", after=after)) == beyond, after

        asyncio.run(main())

    def test_list_cuts_at_any_prefix(self, open_mailbox: OpenMailbox) -> None:
        """A prefix may end inside a name, be a key, or match nothing; ``after`` may lie outside."""

        async def main() -> None:
            mailbox = open_mailbox()
            await fill(mailbox, ORDERED_KEYS)
            prefixes = ["a", "a/", "a/b", "a/b.", "rounds/00", "rounds/0000000009.json", "z"]
            for prefix in [*prefixes, "é", "é/", "n", "a/b/", "b/", "rounds/1"]:
                below = [key for key in ORDERED_KEYS if key.startswith(prefix)]
                for after in ("", "A", prefix, *below, "a/b.c", "é", "\U0010ffff"):
                    expected = [key for key in below if key.encode() > after.encode()]
                    assert list(await mailbox.list(prefix, after=after)) == expected

        asyncio.run(main())

    def test_list_of_impossible_prefixes_is_empty(self, open_mailbox: OpenMailbox) -> None:
        """No key starts like that, and nothing outside the store is shown."""

        async def main() -> None:
            mailbox = open_mailbox()
            await fill(mailbox, ["a/b"])
            for prefix in ("/", "../", "a/../", "./", "a//", "a\0/", "k" * 300 + "/", "/etc/"):
                assert list(await mailbox.list(prefix)) == [], prefix

        asyncio.run(main())

    def test_many_keys(self, open_mailbox: OpenMailbox) -> None:
        """Listing and deleting more than a store may give or take at once."""
        keys = [f"many/{number:05d}" for number in range(self.many_keys)]

        async def main() -> None:
            mailbox = open_mailbox()
            for batch in itertools.batched(keys, 50):
                await fill(mailbox, batch)
            assert list(await mailbox.list("many/")) == keys
            assert list(await mailbox.list("many/", after=keys[70])) == keys[71:]
            await mailbox.delete(iter(keys[1:]))
            assert list(await mailbox.list("many/")) == keys[:1]

        asyncio.run(main())

    def test_delete(self, open_mailbox: OpenMailbox) -> None:
        """Only these keys go; missing ones and none at all are fine; a key can be made again."""

        async def main() -> None:
            mailbox = open_mailbox()
            await fill(mailbox, ["d/a", "d/a-b", "d/ab", "d/b/c", "e/f"])
            await mailbox.delete([])
            await mailbox.delete(["d/b", "d", "d/a/x", "missing", "missing/key"])
            assert list(await mailbox.list("")) == ["d/a", "d/a-b", "d/ab", "d/b/c", "e/f"]
            await mailbox.delete(key for key in ("d/a", "d/a", "missing", "d/b/c"))
            assert list(await mailbox.list("")) == ["d/a-b", "d/ab", "e/f"]
            assert await mailbox.get("d/a") is None
            assert await mailbox.put_if_absent("d/a", b"again") is True
            assert content(await mailbox.get("d/a")) == b"again"
            await mailbox.delete(await mailbox.list(""))
            assert list(await mailbox.list("")) == []

        asyncio.run(main())

    @pytest.mark.parametrize("key", REFUSED_KEYS, ids=lambda key: ascii(key)[:20])
    def test_refused_keys(self, open_mailbox: OpenMailbox, key: str) -> None:
        """``ValueError``, before anything is done."""

        async def main() -> None:
            mailbox = open_mailbox()
            await fill(mailbox, ["kept"])
            with pytest.raises(ValueError, match="key"):
                await mailbox.put_if_absent(key, b"x")
            with pytest.raises(ValueError, match="key"):
                await mailbox.get(key)
            with pytest.raises(ValueError, match="key"):
                await mailbox.delete(["kept", key])
            assert list(await mailbox.list("")) == ["kept"]

        asyncio.run(main())

    def test_agrees_with_a_dictionary(self, open_mailbox: OpenMailbox) -> None:
        """Random histories do to the store what they do to a ``dict``."""
        check_histories(open_mailbox(), self.examples)
