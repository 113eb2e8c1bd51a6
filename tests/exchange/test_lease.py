"""The lease of a process, over a mailbox in memory."""

import asyncio

from gradientmail.exchange import layout
from gradientmail.exchange.lease import Lease
from gradientmail.mailbox.memory import MemoryMailbox


def test_a_beat_at_the_end_of_the_range_does_not_stop_a_learner() -> None:
    """Somebody put ``leases/a/9999999999.json`` there, after which no key follows."""

    async def main() -> tuple[int, tuple[str, ...]]:
        mailbox = MemoryMailbox()
        await mailbox.put_if_absent(layout.beat_key("a", layout.MAX_ROUND), b"{}")
        lease = Lease(mailbox, "a", "token")
        await lease.acquire()
        assert await lease.renew()
        return lease.beat, tuple(await mailbox.list(layout.LEASES))

    assert asyncio.run(main()) == (2, (layout.beat_key("a", 2),))


def test_the_newer_of_two_processes_with_one_id_wins() -> None:
    async def main() -> tuple[bool, bool]:
        mailbox = MemoryMailbox()
        older, newer = Lease(mailbox, "a", "old"), Lease(mailbox, "a", "new")
        await older.acquire()
        await newer.acquire()
        return await older.renew(), await newer.renew()

    assert asyncio.run(main()) == (False, True)
