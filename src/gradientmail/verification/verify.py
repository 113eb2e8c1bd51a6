"""The verification of a whole mailbox."""

from collections.abc import Buffer, Iterable, Mapping, Sequence

from gradientmail.backend.base import Backend
from gradientmail.errors import ProtocolError
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.records import RoundRecord
from gradientmail.mailbox.base import Mailbox
from gradientmail.run import Fragment, Run, read_run
from gradientmail.verification.commits import Commits, Counts
from gradientmail.verification.reading import (
    FrozenMailbox,
    each,
    is_known,
    last_readable,
    read_records,
    read_snapshot,
    reading_exchange,
)
from gradientmail.verification.report import Report, Violation
from gradientmail.verification.structure import (
    lease_violations,
    leftover_violations,
    record_violations,
)


async def verify(
    source: Mailbox | Mapping[str, Buffer], *, backend: Backend | None = None, swept: bool = True
) -> Report:
    """Check a mailbox, or its objects by key, against every invariant that it can show.

    With a ``backend`` the newest versions of each fragment are computed again: from the deltas
    where these are still there, else from what the momentum shows. ``swept=False`` is for a
    mailbox from which nothing was ever deleted: all of it is read, and nothing counts as left over.

    Holds two versions of one fragment and the deltas of one round in memory. Raises what the
    mailbox raises, ``MailboxUnavailable`` too.
    """
    mailbox = FrozenMailbox(source) if isinstance(source, Mapping) else source
    return await _Verification(mailbox, backend, swept=swept).report()


class _Verification:
    def __init__(self, mailbox: Mailbox, backend: Backend | None, *, swept: bool) -> None:
        self._mailbox = mailbox
        self._exchange = reading_exchange(mailbox)
        self._backend = backend
        self._swept = swept
        self._violations: list[Violation] = []
        self._strays: list[str] = []
        self._counts = Counts()

    async def report(self) -> Report:
        keys = await self._mailbox.list("")
        self._strays += [key for key in keys if not is_known(key)]
        self._violations += lease_violations(keys)
        run = await self._run(keys)
        numbers = [r for key in keys if (r := layout.parse_round_key(key)) is not None]
        last = await last_readable(self._exchange, numbers)
        kept = last - 2 * len(run.fragments) if run is not None and self._swept else -1

        def look(number: int, record: RoundRecord) -> Iterable[Violation]:
            return () if run is None else record_violations(run, number, record)

        records, wrong = await read_records(
            self._exchange, numbers, look, keep=lambda number: run is not None and number > kept
        )
        self._violations += wrong
        if run is not None:
            await self._check_run(run, keys, records, last)
        return Report(
            rounds=len(numbers),
            objects=len(keys),
            payloads=self._counts.payloads,
            recomputed=self._counts.recomputed,
            consistent=self._counts.consistent,
            strays=tuple(self._strays),
            violations=tuple(self._violations),
        )

    async def _run(self, keys: Sequence[str]) -> Run | None:
        try:
            manifest = await self._exchange.manifest()
            if manifest is not None:
                return read_run(manifest)
            text = "it does not exist: there is no run here"
            if any(layout.parse_round_key(key) is not None for key in keys):
                text = "it is gone, and rounds are there"
            elif any(key.startswith(layout.BLOBS_INIT) for key in keys):
                text = "it does not exist yet: the run is being created, or its creator died"
        except ProtocolError as error:
            text = str(error)
        self._violations.append(Violation("manifest", layout.MANIFEST, text))
        return None

    async def _check_run(
        self, run: Run, keys: Sequence[str], records: Mapping[int, RoundRecord], last: int
    ) -> None:
        doubtful: list[Violation] = []
        commits = Commits(run, self._exchange, self._backend, doubtful.append)
        for fragment in run.fragments:
            await self._check_fragment(run, commits, fragment, records)
        await self._check_snapshots(run, commits, keys, last)
        # Nodes may have committed and swept while this was reading.
        last = await self._last(last)
        self._violations += [one for one in doubtful if not self._swept_since(run, one, last)]
        if self._swept:
            self._violations += leftover_violations(keys, last, len(run.fragments))
        self._counts = commits.counts

    async def _check_fragment(
        self,
        run: Run,
        commits: Commits,
        fragment: Fragment,
        records: Mapping[int, RoundRecord],
    ) -> None:
        """Every version whose payloads must still be there, oldest first."""
        numbers = [r for r in sorted(records) if run.schedule.fragment(r) == fragment.index]
        old = await commits.initial(fragment)
        for number in numbers:
            follows = old is not None and old.version == run.schedule.version(number) - 1
            complete = not self._swept
            old = await commits.check(records[number], old if follows else None, complete=complete)

    async def _check_snapshots(
        self, run: Run, commits: Commits, keys: Sequence[str], last: int
    ) -> None:
        """Snapshots of open rounds: closers will want their payloads."""
        parsed = [found for key in keys if (found := layout.parse_snapshot_key(key)) is not None]

        async def check(found: tuple[int, str]) -> None:
            number, learner = found
            record = await read_snapshot(self._exchange, number, learner)
            if record is None:
                if await self._exchange.snapshot(number, learner) is not None:
                    self._strays.append(layout.snapshot_key(number, learner))
                return
            delta = run.fragments[run.schedule.fragment(number)].delta
            await commits.payload(record.payload, delta, "snapshots")

        await each([found for found in parsed if found[0] > last], check, at_once=1)

    async def _last(self, last: int) -> int:
        """The newest round that is committed now."""
        exchange: Exchange = self._exchange
        try:
            while await exchange.round(last + 1) is not None:
                last += 1
        except ProtocolError:
            pass  # told already, or by the next verification
        return last

    def _swept_since(self, run: Run, one: Violation, last: int) -> bool:
        """Whether what is missing may have been swept after the listing."""
        blob = layout.parse_blob_key(one.key)
        if blob is None or blob.kind == "init" or not self._swept:
            return False
        kept = last if blob.kind == "snapshot" else last - 2 * len(run.fragments)
        return blob.index <= kept
