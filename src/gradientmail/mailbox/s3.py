"""A store in an S3 bucket: AWS's, or any that speaks its protocol.

Create-once is S3's conditional write (``If-None-Match: *``). A store that ignores the condition
would let two nodes commit one round, so the first put of an instance tries it out.

Records are one request each. Payloads, whose keys hold the sha256 of their bytes, are sent from
where they lie and fetched into pooled memory, large ones in parts side by side; the store checks
the hash that the key holds, which nobody has to compute again.
"""

import hashlib
import os
import re
import threading
from collections.abc import Buffer, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import batched
from typing import Any

from gradientmail.buffers import HOST
from gradientmail.errors import MailboxRefused, MailboxUnavailable
from gradientmail.mailbox.base import (
    MAX_KEY_BYTES,
    POOLED_BYTES,
    RESERVED,
    check_key,
    check_size,
    flat,
    is_key,
    size_limit,
)
from gradientmail.mailbox.lanes import Lanes
from gradientmail.mailbox.s3_client import (
    Addressing,
    Checksums,
    check_endpoint,
    require_boto3,
)
from gradientmail.mailbox.s3_parts import MAX_WHOLE_BYTES, WHOLE_BYTES, Body, named_hash
from gradientmail.mailbox.s3_probe import broken_condition, tidy
from gradientmail.mailbox.s3_requests import Damaged, Requests
from gradientmail.mailbox.s3_transfers import Changed, fetch, send, side_by_side

BATCH = 1000
"""How many keys S3 deletes in one request."""
MOST_CONNECTIONS = 1000
"""Each has a place in the pool from the start; more would help no store."""
LOOKS = 3
"""How often a large object is fetched again that is made anew meanwhile."""

NOT_IN_XML = re.compile("[\x00-\x1f\x7f-\x9f\ufffe\uffff]")
"""What the list of keys to delete cannot hold, or not on every store."""
BELOW_SLASH = re.compile(r"[\x00-\x2e]")
"""The characters whose keys stores order in more than one way."""


class S3Mailbox:
    """Objects in an S3 bucket. Safe from many processes, machines, threads and event loops.

    Credentials are those that boto3 finds: environment, ``~/.aws``, the role of the machine; they
    are looked up again when they expire. Requests run on up to ``max_concurrency`` daemon threads
    of the instance. A cancelled put creates the object from the bytes as they were before the
    cancellation, or not at all.

    Raises ``MailboxUnavailable`` when the store does not answer, is too busy, or breaks off; and
    ``MailboxRefused``, which says what to do, when there is no bucket, no permission, or the store
    cannot keep a mailbox's promises. ``ValueError`` for a key that ``check_key`` refuses, that is
    too long with the prefix, or that lies below ``.tmp``.

    Args:
        bucket: its name, or the ARN of an access point. It is never created.
        prefix: what all keys of the run begin with, a ``/`` after it; empty for the whole bucket.
        endpoint_url: of a store that is not AWS: ``"https://…"``.
        region: of the bucket, if boto3's configuration does not name it.
        max_concurrency: requests at the same time, and connections kept open.
        request_checksums: ``"when_required"`` sends no checksum headers, which Cloudflare R2,
            Hugging Face and older stores do not take. The signature covers the sha256 either way.
        addressing: ``"path"`` (the bucket in the URL's path), ``"virtual"`` (in the host's name),
            or ``"auto"``: virtual at AWS, path elsewhere.
        allow_overwrites: use a store that ignores ``If-None-Match`` all the same. The risk is the
            run's: two nodes that create one object at the same moment may both believe that it
            is theirs, so that a round is committed twice and a learner's work is lost.

    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        max_concurrency: int = 8,
        request_checksums: Checksums = "when_supported",
        addressing: Addressing = "auto",
        allow_overwrites: bool = False,
    ) -> None:
        """Connect to nothing yet. ``MissingExtra`` without boto3."""
        self.bucket = _checked_bucket(bucket)
        self.prefix = _checked_prefix(prefix)
        self.endpoint_url = _checked_endpoint(endpoint_url)
        if not isinstance(region, str | None) or region == "":
            raise ValueError(f"region must be the name of a region or None, not {region!r}")
        if isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int):
            raise TypeError(f"max_concurrency must be an integer, not {max_concurrency!r}")
        if not 1 <= max_concurrency <= MOST_CONNECTIONS:
            raise ValueError(
                f"max_concurrency must be from 1 to {MOST_CONNECTIONS}, not {max_concurrency}"
            )
        _check_choice("request_checksums", request_checksums, ("when_supported", "when_required"))
        _check_choice("addressing", addressing, ("auto", "path", "virtual"))
        if not isinstance(allow_overwrites, bool):
            raise TypeError(f"allow_overwrites must be True or False, not {allow_overwrites!r}")
        require_boto3()
        self._width = max_concurrency
        self._allow_overwrites = allow_overwrites
        self._take = HOST.take
        self._base = self.prefix + "/" if self.prefix else ""
        self._options: dict[str, Any] = {
            "endpoint_url": self.endpoint_url,
            "region": region,
            "connections": max_concurrency,
            "addressing": addressing,
            "checksums": request_checksums,
        }
        self._process = self._begin()

    def __repr__(self) -> str:
        """As the constructor is called."""
        where = f", endpoint_url={self.endpoint_url!r}" if self.endpoint_url else ""
        return f"S3Mailbox({self.bucket!r}, {self.prefix!r}{where})"

    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        """Create ``key`` with ``data``, stored when this returns; False when it exists.

        A payload that is sent in parts carries no condition: whoever else creates this key writes
        the same bytes.
        """
        name, here = self._name(key), self._here()
        if not here.proved:
            await here.lanes.run(self._prove, here)
        abandoned = threading.Event()
        try:
            with flat(data) as view:
                if view.nbytes < POOLED_BYTES:
                    return await here.lanes.run(self._put_small, here, name, bytes(view))
                digest = named_hash(key)
                if view.nbytes > (WHOLE_BYTES if digest else MAX_WHOLE_BYTES):
                    condition = here.conditions and digest is None
                    return await send(
                        here.lanes, here.requests, name, view, abandoned, condition=condition
                    )
                return await here.lanes.run(
                    self._put_large, here, name, view[:], digest, abandoned, bulk=True
                )
        finally:
            abandoned.set()

    async def get(self, key: str, /) -> Buffer | None:
        """The object, read-only; a large one in memory that is reused once no view is left."""
        name, here = self._name(key), self._here()
        bulk, limit = named_hash(key) is not None, size_limit.get()

        def take(nbytes: int) -> memoryview:
            return self._take(check_size(key, nbytes, limit))

        for _ in range(LOOKS):
            with suppress(Changed):
                found = await fetch(here.lanes, here.requests, name, take, bulk=bulk)
                if found is None:
                    return None
                return found.toreadonly() if found.nbytes >= POOLED_BYTES else bytes(found)
        raise MailboxUnavailable(f"{name!r} in {here.requests.where} changes all the time")

    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        """The keys with this prefix and beyond ``after``; names that no put makes are left out."""
        here = self._here()
        if not self._may_begin_a_key(prefix):
            return ()
        names = await here.lanes.run(
            here.requests.list_names, self._base + prefix, self._start_after(prefix, after)
        )
        cut = len(self._base)
        keys = (name[cut:] for name in names if name.startswith(self._base + prefix))
        return sorted(key for key in keys if key > after and is_key(key))

    async def delete(self, keys: Iterable[str], /) -> None:
        """Remove ``keys``, all of them checked before the first is removed, 1,000 a request."""
        names = list(dict.fromkeys(self._name(key) for key in keys))
        here = self._here()
        plain = [name for name in names if not NOT_IN_XML.search(name)]
        single = [name for name in names if NOT_IN_XML.search(name)]
        for batch in batched(plain, BATCH):
            if len(batch) == 1 or not here.batches:
                single.extend(batch)
            elif not await here.lanes.run(here.requests.delete_batch, batch):
                here.batches = False
                single.extend(batch)
        work = (here.lanes.run(here.requests.delete_one, name) for name in single)
        await side_by_side(work, self._width)

    async def ask_store(self, doing: str, operation: str, /, **parameters: object) -> Any:
        """The store's own answer to one of boto3's operations on this bucket, for diagnosis.

        ``doing`` says in an error what was tried. Keys are the bucket's, with the prefix.
        """
        here = self._here()
        return await here.lanes.run(partial(here.requests.call, doing, operation, **parameters))

    # Below: this process's threads and connections

    def _begin(self) -> "_Process":
        lanes = Lanes(self._width, f"s3-{self.bucket}")
        return _Process(os.getpid(), lanes, Requests(self.bucket, **self._options))

    def _here(self) -> "_Process":
        """Threads and connections of this process; a forked child has none of its parent's."""
        if self._process.pid != os.getpid():
            self._process = self._begin()
        return self._process

    # Below: names

    def _name(self, key: str) -> str:
        """The name of a key's object in the bucket; ``ValueError`` for a key that has none."""
        name = self._base + check_key(key)
        if key.partition("/")[0] == RESERVED:
            raise ValueError(
                f"mailbox key {key!r} lies in {RESERVED}, which the store keeps to itself"
            )
        if len(name.encode()) > MAX_KEY_BYTES:
            raise ValueError(
                f"mailbox key {key[:60]!r}… is longer than {MAX_KEY_BYTES} bytes with the prefix "
                f"{self.prefix!r}; use a shorter prefix"
            )
        return name

    def _may_begin_a_key(self, prefix: str) -> bool:
        """Whether some key begins like that; what none does is not asked for."""
        if prefix.rpartition("/")[2] in ("", ".", ".."):
            prefix += "x"
        try:
            return len((self._base + check_key(prefix)).encode()) <= MAX_KEY_BYTES
        except ValueError:
            return False

    def _start_after(self, prefix: str, after: str) -> str:
        """What the store is asked to begin after: nothing, or something no later than ``after``.

        Only for a flat prefix, such as that of the rounds. Some stores compare folder by folder,
        so that ``a/b`` comes before ``a-b``; they would leave out keys that begin like ``after`` up
        to a character below ``/``, and all that is below a folder called like it. Cut off before
        the first such character, and one earlier, it means the same to all of them, and the caller
        drops the few keys too many.
        """
        rest = after.removeprefix(prefix)
        if not prefix.endswith("/") or rest == after or "/" in rest:
            return ""
        rest = BELOW_SLASH.split(rest, maxsplit=1)[0][:-1]
        return self._base + prefix + rest if rest else ""

    # Below: what runs in a thread

    def _prove(self, here: "_Process") -> None:
        """Once: find out whether the store creates an object once only."""
        with here.lock:
            if here.proved:
                return
            folder = f"{self._base}{RESERVED}/"
            reason = broken_condition(here.requests, folder)
            if reason is not None and not self._allow_overwrites:
                raise MailboxRefused(reason)
            here.conditions = reason is None
            here.proved = True
        here.lanes.submit(tidy, here.requests, self._base, folder)

    def _put_small(self, here: "_Process", name: str, data: bytes) -> bool:
        return self._put(here, name, data, hashlib.sha256(data).digest())

    def _put_large(
        self,
        here: "_Process",
        name: str,
        view: memoryview,
        digest: str | None,
        abandoned: threading.Event,
    ) -> bool:
        """The hash that the key holds is believed; the store finds out if it is wrong."""
        digest = digest or hashlib.sha256(view).hexdigest()
        body = Body(view, abandoned, digest)
        try:
            try:
                return self._put(here, name, body, bytes.fromhex(digest))
            except Damaged:
                actual = hashlib.sha256(view).hexdigest()
                if actual == digest:
                    raise
            body.seek(0)
            body.sha256 = actual  # the key only looks like that of a payload
            return self._put(here, name, body, bytes.fromhex(actual))
        finally:
            body.release()

    def _put(self, here: "_Process", name: str, body: bytes | Body, digest: bytes) -> bool:
        if not here.conditions and here.requests.exists(name):
            return False
        return here.requests.put(name, body, sha256=digest, condition=here.conditions)


@dataclass(slots=True)
class _Process:
    """What one process has of a mailbox."""

    pid: int
    lanes: Lanes
    requests: Requests
    lock: threading.Lock = field(default_factory=threading.Lock)
    proved: bool = False
    """Whether ``conditions`` is known."""
    conditions: bool = True
    """Whether the store honours ``If-None-Match``."""
    batches: bool = True
    """Whether the store deletes several objects in one request, as far as is known."""


def _checked_bucket(bucket: str) -> str:
    if not isinstance(bucket, str):
        raise TypeError(f"bucket must be a string, not {bucket!r}")
    if not bucket or ("/" in bucket and not bucket.startswith("arn:")):
        raise ValueError(
            f"bucket must be the name of a bucket, not {bucket!r}; what follows it goes into prefix"
        )
    return bucket


def _checked_prefix(prefix: str) -> str:
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string, not {prefix!r}")
    plain = prefix.strip("/")
    try:
        return check_key(plain) if plain else ""
    except ValueError as error:
        raise ValueError(f"prefix {prefix!r} cannot begin a key: {error}") from None


def _checked_endpoint(endpoint_url: str | None) -> str | None:
    if endpoint_url is None:
        return None
    if not isinstance(endpoint_url, str):
        raise TypeError(f"endpoint_url must be a string or None, not {endpoint_url!r}")
    return check_endpoint(endpoint_url, "endpoint_url")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}")
