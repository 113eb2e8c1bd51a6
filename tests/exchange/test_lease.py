"""The lease of a process, over a mailbox in memory."""

import asyncio
import contextlib
from collections.abc import Buffer, Iterable, Sequence
from typing import override

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientmail.errors import MailboxUnavailable
from gradientmail.exchange import layout
from gradientmail.exchange.lease import (
    LAST_BEAT,
    LAST_SWEPT,
    MOST_LOOKS,
    MOST_OLDER,
    Lease,
    sweep_beats,
)
from gradientmail.exchange.lease_book import LeaseBook, kept_seconds
from gradientmail.exchange.records import SMALL_LIMIT, Beat
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.testing.simulated import Connection, SimulatedStore
from gradientmail.testing.virtual_time import run_virtual


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


@pytest.mark.parametrize("call", [0.2, 0.5, 0.6, 0.7, 0.8, 0.9, 1.2])
def test_no_rhythm_of_renewals_keeps_out_who_begins(call: float) -> None:
    """On a slow link, whose calls take that share of ``lease_every``."""

    async def begin(after: float) -> tuple[float, bool]:
        store, loop = SimulatedStore(seed=0), asyncio.get_running_loop()
        link = Connection(latency_seconds=call / 2)
        older, newer = (Lease(store.view(link), "a", who, now=loop.time) for who in ("old", "new"))
        await older.acquire()

        async def renew() -> bool:
            for _ in range(1000):
                if not await older.renew():
                    return False
                await asyncio.sleep(1.0)
            return True

        renewing = asyncio.ensure_future(renew())
        await asyncio.sleep(after)
        began = loop.time()
        await newer.acquire()
        took = loop.time() - began
        return took, await renewing or not await newer.renew()

    found = [
        run_virtual(lambda after=k / 10: begin(after), limit_seconds=1e3) for k in range(20, 40)
    ]
    assert max(took for took, _ in found) < 30 * max(call, 1.0)
    assert not any(lost for _, lost in found)


@pytest.mark.parametrize("renewed", [0, 1, 3])
@pytest.mark.parametrize("waking", ["between", "ahead", "meanwhile", "losing"])
def test_who_was_away_for_two_successors_is_older_than_the_second_too(
    renewed: int, waking: str
) -> None:
    """The first successor left and took all beats with it, so the second counts from 1 again.

    It may hold the very beat that the sleeper held last, renew while the sleeper looks around, or
    find what the sleeper wrote and could not delete.
    """

    async def main() -> tuple[list[bool], Sequence[str], int]:
        mailbox = _FailingDeletes()
        oldest, between, newest = (Lease(mailbox, "a", token) for token in ("old", "mid", "new"))
        await oldest.acquire()
        for _ in range(renewed):
            await oldest.renew()
        await between.acquire()
        await between.release()
        await newest.acquire()
        assert newest.beat == 1
        for _ in range(renewed if waking == "ahead" else 0):
            await newest.renew()
        if waking == "meanwhile":
            won = list(await asyncio.gather(oldest.renew(), newest.renew()))
        else:
            mailbox.failing = waking == "losing"
            won = [await oldest.renew()]
            mailbox.failing = False
            won.append(await newest.renew())
        won.append(await newest.renew())
        await oldest.release()
        return won, await mailbox.list(""), newest.beat

    won, left, beat = asyncio.run(main())
    assert won == [False, True, True]
    assert left == (layout.beat_key("a", beat),)


class _FailingDeletes(MemoryMailbox):
    failing = False

    @override
    async def delete(self, keys: Iterable[str], /) -> None:
        if self.failing:
            raise MailboxUnavailable("no deletes now")
        await super().delete(keys)


def test_who_begins_while_an_older_one_wakes_goes_past_it() -> None:
    """The older one writes between the newer one's listing, which shows nobody, and its beat."""

    class Waking(MemoryMailbox):
        older: Lease | None = None

        @override
        async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
            woken, self.older = self.older, None
            if woken is not None:
                assert await woken.renew()
            return await super().put_if_absent(key, data)

    async def main() -> tuple[bool, bool, Sequence[str]]:
        mailbox = Waking()
        older, newer = Lease(mailbox, "a", "old"), Lease(mailbox, "a", "new")
        await older.acquire()
        for _ in range(3):
            await older.renew()
        await mailbox.delete(await mailbox.list(""))
        mailbox.older = older
        await newer.acquire()
        return await older.renew(), await newer.renew(), await mailbox.list("")

    assert asyncio.run(main()) == (False, True, (layout.beat_key("a", 7),))


@pytest.mark.parametrize("body", [b"{}", b'{"token":"other"}'])
def test_versions_that_do_not_say_whom_they_know_are_newer_if_their_beat_is(body: bytes) -> None:
    async def main(number: int) -> tuple[bool, Sequence[str]]:
        mailbox = MemoryMailbox()
        lease = Lease(mailbox, "a", "token")
        await lease.acquire()
        await lease.renew()
        await mailbox.put_if_absent(layout.beat_key("a", number), body)
        return await lease.renew(), await mailbox.list("")

    assert asyncio.run(main(1)) == (True, (layout.beat_key("a", 3),))
    assert asyncio.run(main(3)) == (False, (layout.beat_key("a", 3),))
    assert asyncio.run(main(9)) == (False, (layout.beat_key("a", 9),))


@pytest.mark.parametrize("below", [0, 1, 2])
def test_a_beat_near_the_end_of_the_range_leaves_room_for_the_next_process(below: int) -> None:
    async def main() -> tuple[bool, bool, Sequence[str]]:
        mailbox = MemoryMailbox()
        older, newer = Lease(mailbox, "a", "old"), Lease(mailbox, "a", "new")
        await older.acquire()
        await mailbox.put_if_absent(layout.beat_key("a", LAST_BEAT - below), b"{}")
        await newer.acquire()
        won = await older.renew(), await newer.renew(), await newer.renew()
        assert won[2]
        return won[0], won[1], await mailbox.list("")

    assert asyncio.run(main()) == (False, True, (layout.beat_key("a", 3),))


def test_beats_that_cannot_be_deleted_or_are_listed_too_long_stop_nobody() -> None:
    class Stuck(MemoryMailbox):
        lists = 0

        @override
        async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
            self.lists += 1
            listed = await super().list(prefix, after=after)
            return sorted({*listed, layout.beat_key("a", 4)}) if prefix != layout.SWEPT else listed

        @override
        async def delete(self, keys: Iterable[str], /) -> None:
            """Nothing."""

    async def main() -> tuple[int, int]:
        mailbox = Stuck()
        for number in (2, LAST_BEAT + 1, LAST_BEAT + 2):
            await mailbox.put_if_absent(layout.beat_key("a", number), b"junk")
        lease = Lease(mailbox, "a", "token")
        await lease.acquire()
        assert await lease.renew()
        return lease.beat, mailbox.lists

    beat, lists = asyncio.run(main())
    assert beat == 6
    assert lists <= 2 * MOST_LOOKS + 2


def test_who_leaves_after_a_newer_one_came_and_went_leaves_the_newest_ones_beat() -> None:
    async def main() -> Sequence[str]:
        mailbox = MemoryMailbox()
        oldest, between, newest = (Lease(mailbox, "a", token) for token in ("old", "mid", "new"))
        await oldest.acquire()
        for _ in range(5):
            await oldest.renew()
        await between.acquire()
        await between.release()
        await newest.acquire()
        await oldest.release()
        return await mailbox.list("")

    assert asyncio.run(main()) == (layout.beat_key("a", 1),)


@pytest.mark.parametrize("token", ["other", "token"])
def test_a_beat_that_no_listing_shows_stops_nobody(token: str) -> None:
    class Hiding(MemoryMailbox):
        @override
        async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
            hidden = layout.beat_key("a", 1), layout.beat_key("a", 3)
            return tuple(
                key for key in await super().list(prefix, after=after) if key not in hidden
            )

    async def main() -> tuple[bool, int]:
        mailbox = Hiding()
        for number in (1, 3):
            body = Beat(token, ()).to_bytes()
            await mailbox.put_if_absent(layout.beat_key("a", number), body)
        lease = Lease(mailbox, "a", "token")
        await lease.acquire()
        won = await lease.renew()
        return won, lease.beat

    won, beat = asyncio.run(asyncio.wait_for(main(), 10))
    assert won
    assert beat == (
        7 if token == "other" else 2
    )  # 1 and 3 were taken; one more is left free each time


def test_who_finds_its_last_beat_by_key_has_not_been_replaced() -> None:
    """A sleeper wakes, and the newest one's own beats are in no listing."""

    class Hiding(MemoryMailbox):
        hidden = ""

        @override
        async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
            keys = await super().list(prefix, after=after)
            return tuple(key for key in keys if key != self.hidden)

    async def main() -> tuple[bool, bool, int, Sequence[str]]:
        mailbox = Hiding()
        sleeper, between, newest = (Lease(mailbox, "a", token) for token in ("old", "mid", "new"))
        await sleeper.acquire()
        await sleeper.renew()
        await between.acquire()
        await between.release()
        await newest.acquire()
        mailbox.hidden = layout.beat_key("a", newest.beat)
        await mailbox.put_if_absent(layout.beat_key("a", 3), Beat("old", ()).to_bytes())
        won, lost = await newest.renew(), await sleeper.renew()
        mailbox.hidden = ""
        return won, lost, newest.beat, await mailbox.list("")

    assert asyncio.run(main()) == (True, False, 4, (layout.beat_key("a", 4),))


def test_beats_that_may_not_be_deleted_hold_up_no_renewal_and_no_restart() -> None:
    class Denying(MemoryMailbox):
        @override
        async def delete(self, keys: Iterable[str], /) -> None:
            raise PermissionError("deletes are denied")

    async def main() -> tuple[list[int], list[str]]:
        mailbox = Denying()
        killed, again = Lease(mailbox, "a", "old"), Lease(mailbox, "a", "new")
        await killed.acquire()
        beats, told = list[int](), list[str]()
        await again.acquire()
        for _ in range(3):
            beats.append(again.beat)
            told.append(str(again.untidy))
            assert await again.renew()
        with pytest.raises(PermissionError, match="deletes are denied"):
            await again.release()
        return beats, told

    assert asyncio.run(main()) == ([2, 3, 4], ["deletes are denied"] * 3)


def test_junk_that_cannot_be_deleted_is_gone_past() -> None:
    class Undeletable(MemoryMailbox):
        @override
        async def delete(self, keys: Iterable[str], /) -> None:
            """Nothing."""

    async def main() -> tuple[bool, int]:
        mailbox = Undeletable()
        lease = Lease(mailbox, "a", "token")
        await lease.acquire()
        for number in (2, 3, LAST_BEAT):
            await mailbox.put_if_absent(layout.beat_key("a", number), b"junk")
        return await lease.renew(), lease.beat

    assert asyncio.run(asyncio.wait_for(main(), 10)) == (True, 4)


def test_junk_among_the_beats_is_deleted_at_once() -> None:
    class Counting(MemoryMailbox):
        deletes = 0

        @override
        async def delete(self, keys: Iterable[str], /) -> None:
            self.deletes += 1
            await super().delete(keys)

    async def main() -> tuple[int, Sequence[str]]:
        mailbox = Counting()
        for number in range(1, 51):
            await mailbox.put_if_absent(layout.beat_key("a", number), b"junk")
        await Lease(mailbox, "a", "token").acquire()
        return mailbox.deletes, await mailbox.list("")

    assert asyncio.run(main()) == (1, (layout.beat_key("a", 51),))


def test_a_beat_names_the_newest_of_the_older_processes() -> None:
    async def main() -> Beat:
        mailbox = MemoryMailbox()
        for number in range(MOST_OLDER + 9):
            await Lease(mailbox, "a", f"t{number}").acquire()
        (key,) = await mailbox.list("")
        data = await mailbox.get(key)
        assert data is not None
        return Beat.from_bytes(data)

    last = MOST_OLDER + 8
    named = tuple(f"t{number}" for number in reversed(range(last - MOST_OLDER, last)))
    assert asyncio.run(main()) == Beat(f"t{last}", named)


def test_of_two_that_were_swept_the_newer_wins_whoever_wakes_first() -> None:
    async def main(first: int) -> list[bool]:
        mailbox, hours = MemoryMailbox(), [0.0]
        older, newer = (
            Lease(mailbox, "a", token, now=lambda: 3600 * hours[0]) for token in ("old", "new")
        )
        for lease in (older, newer):
            await lease.acquire()
            for _ in range(3):
                assert await lease.renew()
            hours[0] += 1.0
            await sweep_beats(mailbox, await mailbox.list(layout.beats_prefix("a")))
        woken = [older, newer, older] if first == 0 else [newer, older, newer]
        return [await lease.renew() for lease in woken]

    assert asyncio.run(main(0)) == [True, True, False]
    assert asyncio.run(main(1)) == [True, False, True]


def test_what_was_swept_since_of_another_learner_does_not_make_a_sleeper_the_newer_one() -> None:
    """One sleeps and is swept, one with its id begins; then a learner that had come further is."""

    async def main() -> list[bool]:
        mailbox = MemoryMailbox()
        older, newer = Lease(mailbox, "a", "old"), Lease(mailbox, "a", "new")
        await older.acquire()
        for _ in range(4):
            await older.renew()
        await sweep_beats(mailbox, await mailbox.list(layout.beats_prefix("a")))
        await newer.acquire()
        await sweep_beats(mailbox, [layout.beat_key("b", 1000)])
        await newer.renew()
        return [await older.renew(), await newer.renew()]

    assert asyncio.run(main()) == [False, True]


@pytest.mark.parametrize(
    ("swept", "minutes"),
    [
        ("before it began", 1.0),
        ("before it began", 600.0),
        ("before it slept", 1.0),
        ("before it slept", 600.0),
        ("while it slept", 1.0),
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_who_was_away_for_two_successors_knows_when_it_was_not_swept(
    swept: str, minutes: float, first: int
) -> None:
    """Beats of another learner were, which had come further, so that a note covers its own.

    Who slept for an hour, while there was a sweep, cannot know.
    """

    async def main() -> list[bool]:
        mailbox, clock = MemoryMailbox(), [0.0]
        sleeper, between, newest = (
            Lease(mailbox, "a", token, now=lambda: clock[0]) for token in ("old", "mid", "new")
        )

        async def sweep() -> None:
            await mailbox.put_if_absent(layout.beat_key("b", 60), b"{}")
            await sweep_beats(mailbox, [layout.beat_key("b", 60)])

        if swept == "before it began":
            await sweep()
        await sleeper.acquire()
        await sleeper.renew()
        if swept == "before it slept":
            await sweep()
            await sleeper.renew()
        clock[0] += 60 * minutes
        await between.acquire()
        await between.release()
        await newest.acquire()
        if swept == "while it slept":
            await sweep()
        two = [sleeper, newest] if first == 0 else [newest, sleeper]
        await asyncio.gather(*(lease.renew() for lease in two))
        return [await sleeper.renew(), await newest.renew()]

    assert asyncio.run(main()) == [False, True]


def test_a_beat_whose_answer_was_lost_goes_with_the_others() -> None:
    class Unheard(MemoryMailbox):
        unheard = False

        @override
        async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
            created = await super().put_if_absent(key, data)
            if self.unheard:
                raise OSError("no answer")
            return created

    async def main() -> Sequence[str]:
        mailbox = Unheard()
        lease = Lease(mailbox, "a", "token")
        await lease.acquire()
        mailbox.unheard = True
        with pytest.raises(OSError, match="no answer"):
            await lease.renew()
        await lease.release()
        return await mailbox.list("")

    assert asyncio.run(main()) == ()


def test_a_beat_with_long_tokens_does_not_make_the_next_ones_too_long_to_be_read() -> None:
    async def main() -> tuple[list[bool], Sequence[str]]:
        mailbox = MemoryMailbox()
        oldest, between, newest = (Lease(mailbox, "a", token) for token in ("old", "mid", "new"))
        await oldest.acquire()
        for _ in range(9):
            await oldest.renew()
        await between.acquire()
        await between.release()
        room = SMALL_LIMIT - len(Beat("h", ("",)).to_bytes())
        hostile = Beat("h", ("y" * room,)).to_bytes()
        await mailbox.put_if_absent(layout.beat_key("a", 3), hostile)
        await newest.acquire()
        won = [await oldest.renew(), await newest.renew()]
        return won, await mailbox.list("")

    won, left = asyncio.run(main())
    assert won == [False, True]
    assert len(left) == 1


def test_a_renewal_reads_few_beats_however_many_there_are() -> None:
    """Where deleting is not allowed there is one more at every poll."""

    class Counting(MemoryMailbox):
        reads = 0

        @override
        async def get(self, key: str, /) -> bytes | None:
            self.reads += 1
            return await super().get(key)

    async def main() -> tuple[int, Sequence[str]]:
        mailbox = Counting()
        lease = Lease(mailbox, "a", "token")
        await lease.acquire()
        lease.beat = 1000
        for number in range(2, 1000):
            await mailbox.put_if_absent(layout.beat_key("a", number), Beat("token").to_bytes())
        assert await lease.renew()
        return mailbox.reads, await mailbox.list(layout.beats_prefix("a"))

    reads, left = asyncio.run(main())
    assert reads <= MOST_OLDER + 1
    assert left == (layout.beat_key("a", 1001),)


def test_who_finds_its_last_beat_deleted_and_nobody_there_goes_on() -> None:
    """By a person, say; what is there is no beat, or one of its own that was not deleted."""

    async def main() -> tuple[bool, tuple[str, ...]]:
        mailbox = MemoryMailbox()
        lease = Lease(mailbox, "a", "token")
        await lease.acquire()
        for _ in range(4):
            await lease.renew()
        await mailbox.delete([layout.beat_key("a", 5)])
        await mailbox.put_if_absent(layout.beat_key("a", 3), Beat("token").to_bytes())
        await mailbox.put_if_absent(layout.beat_key("a", 2), b"garbage")
        return await lease.renew(), tuple(await mailbox.list("leases/"))

    assert asyncio.run(main()) == (True, (layout.beat_key("a", 6),))


def test_who_was_swept_goes_on_and_its_next_process_is_newer_all_the_same() -> None:
    """One sleeps so long that its beat is swept, one with its id begins, the first wakes up."""

    async def main() -> tuple[bool, bool, bool, tuple[str, ...]]:
        mailbox = MemoryMailbox()
        older = Lease(mailbox, "a", "old")
        await older.acquire()
        for _ in range(4):
            await older.renew()
        await sweep_beats(mailbox, await mailbox.list(layout.beats_prefix("a")))
        newer = Lease(mailbox, "a", "new")
        await newer.acquire()
        won = await older.renew(), await newer.renew()
        await sweep_beats(mailbox, await mailbox.list(layout.beats_prefix("a")))
        again = await newer.renew()
        return *won, again, tuple(await mailbox.list(layout.LEASES))

    assert asyncio.run(main()) == (
        False,
        True,
        True,
        (layout.swept_key(7), layout.beat_key("a", 8)),
    )


@pytest.mark.parametrize(("noted", "deleted"), [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)])
def test_a_beginner_sees_what_a_sweep_leaves_however_they_interleave(
    noted: int, deleted: int
) -> None:
    """A sweep notes, then deletes; who begins lists its own beats, then what was noted.

    Each of the sweep's writes comes before both listings, between them, or after both.
    """

    class Interleaved(MemoryMailbox):
        listings = 0

        @override
        async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
            if noted == self.listings:
                await self.put_if_absent(layout.swept_key(5), b"{}")
            if deleted == self.listings:
                await self.delete([layout.beat_key("a", 5)])
            self.listings += 1
            return await super().list(prefix, after=after)

    async def main() -> int:
        mailbox = Interleaved()
        await mailbox.put_if_absent(layout.beat_key("a", 5), b"{}")
        lease = Lease(mailbox, "a", "token")
        await lease.acquire()
        return lease.beat

    assert asyncio.run(main()) == 6


def test_a_sweep_notes_before_it_deletes() -> None:
    class Deleting(MemoryMailbox):
        noted: tuple[Sequence[str], ...] = ()

        @override
        async def delete(self, keys: Iterable[str], /) -> None:
            self.noted += (await self.list(layout.SWEPT),)
            await super().delete(keys)

    async def main() -> tuple[Sequence[str], ...]:
        mailbox = Deleting()
        await mailbox.put_if_absent(layout.beat_key("a", 5), b"{}")
        await sweep_beats(mailbox, [layout.beat_key("a", 5)])
        return mailbox.noted

    assert asyncio.run(main()) == ((layout.swept_key(5),),)


@pytest.mark.parametrize("writes", range(6))
def test_who_is_killed_in_a_sweep_leaves_nothing_that_the_next_sweep_does_not_find(
    writes: int,
) -> None:
    """SIGKILL after so many of the sweep's writes, each deleted key being one, as in a folder."""

    class Killed(Exception):
        pass

    class Mortal(MemoryMailbox):
        left = writes

        def _write(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise Killed

        @override
        async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
            self._write()
            return await super().put_if_absent(key, data)

        @override
        async def delete(self, keys: Iterable[str], /) -> None:
            for key in keys:
                self._write()
                await super().delete((key,))

    async def main() -> tuple[int, int, Sequence[str]]:
        mailbox = Mortal()
        beats = [layout.beat_key("a", 5), layout.beat_key("a", 6), layout.beat_key("b", 2)]
        mailbox.left = 1000
        for key in (*beats, layout.swept_key(4)):
            await mailbox.put_if_absent(key, b"{}")
        mailbox.left = writes
        with contextlib.suppress(Killed):
            await sweep_beats(mailbox, beats)
        mailbox.left = 1000
        lease = Lease(mailbox, "a", "token")  # whenever the other was killed
        await lease.acquire()
        await lease.release()
        if left := [key for key in await mailbox.list(layout.LEASES) if key in beats]:
            await sweep_beats(mailbox, left)
        return lease.beat, len(left), await mailbox.list(layout.LEASES)

    beat, left, keys = asyncio.run(main())
    assert beat == 7
    assert list(keys) == [layout.swept_key(6 + (left > 0) if writes else 5)]


def test_sweeps_note_only_the_furthest_beat_and_no_garbage() -> None:
    async def main() -> tuple[int, tuple[str, ...]]:
        mailbox = MemoryMailbox()
        for learner, number in (("a", 9), ("b", 3), ("c", layout.MAX_ROUND), ("d", 12)):
            await mailbox.put_if_absent(layout.beat_key(learner, number), b"{}")
        await mailbox.put_if_absent(layout.swept_key(LAST_SWEPT + 1), b"{}")
        await sweep_beats(mailbox, [layout.beat_key("a", 9)])
        await sweep_beats(mailbox, [layout.beat_key("b", 3)])
        await sweep_beats(mailbox, [layout.beat_key("c", layout.MAX_ROUND)])
        await sweep_beats(mailbox, [layout.beat_key("d", 12)])
        lease = Lease(mailbox, "e", "token")
        await lease.acquire()
        return lease.beat, tuple(await mailbox.list(layout.LEASES))

    beat, keys = asyncio.run(main())
    assert beat == 13
    assert set(keys) == {
        layout.swept_key(12),
        layout.swept_key(LAST_SWEPT + 1),
        layout.beat_key("e", 13),
    }


def test_silence_is_what_was_listened_to() -> None:
    """An hour in which nobody could look is none in which anybody was silent."""
    book, keys = LeaseBook(120.0), [layout.beat_key("a", 1), layout.beat_key("b", 1)]
    kept = kept_seconds(120.0)
    assert kept == 3600.0
    assert kept_seconds(600.0) == 12_000.0
    for minute in range(61):
        book.observe([keys[0], layout.beat_key("b", 1 + minute)], 60.0 * minute)
    assert book.silent(kept) == []
    book.observe([keys[0], layout.beat_key("b", 90)], 3660.0)
    assert book.silent(kept) == [keys[0]]
    blind = LeaseBook(120.0)
    blind.observe(keys, 0.0)
    blind.observe(keys, 10 * kept)
    assert blind.silent(kept) == []


class PlainBook:
    """What ``LeaseBook`` says, worked out anew each time from all that was ever listed."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.newest: dict[str, tuple[int, float]] = {}
        self.observed_at: float | None = None

    def observe(self, beats: dict[str, set[int]], now: float) -> None:
        blind = 0.0 if self.observed_at is None else now - self.observed_at - self.timeout / 2
        old = {who: (n, at + max(blind, 0.0)) for who, (n, at) in self.newest.items()}
        self.observed_at = now
        self.newest = {
            who: old[who] if old.get(who, (None,))[0] == max(numbers) else (max(numbers), now)
            for who, numbers in beats.items()
            if numbers
        }

    def live(self, now: float) -> frozenset[str]:
        return frozenset(w for w, (_, at) in self.newest.items() if now <= at + self.timeout)

    def silent(self, seconds: float) -> set[str]:
        assert self.observed_at is not None
        return {w for w, (_, at) in self.newest.items() if self.observed_at - at > seconds}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=4),
            st.integers(0, 25),
        ),
        max_size=12,
    )
)
def test_a_book_says_what_one_that_works_out_everything_anew_says(
    steps: list[tuple[int, list[tuple[str, int]], int]],
) -> None:
    """Times in quarters of a second, so that sums are exact. Listings, and looks in between."""
    book, plain, now = LeaseBook(5.0), PlainBook(5.0), 0.0
    for pause, listed, look in steps:
        now += pause / 4
        beats: dict[str, set[int]] = {}
        for who, number in listed:
            beats.setdefault(who, set()).add(number)
        book.observe([layout.beat_key(who, number) for who, number in listed], now)
        plain.observe(beats, now)
        assert book.listed() == plain.newest.keys()
        assert book.live(now) == plain.live(now)
        silent = plain.silent(10.0)
        assert book.silent(10.0) == sorted(
            layout.beat_key(who, number) for who in silent for number in beats[who]
        )
        now += look / 4
        assert book.has_lost(now) == (plain.live(now) != plain.live(now - look / 4))
        assert book.live(now) == plain.live(now)
        assert book.live(now) is book.live(now)
