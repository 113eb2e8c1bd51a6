"""A bucket behind a proxy that breaks requests: each error is what it is, and nothing is lost."""

import asyncio
import hashlib
import sys
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from random import Random

import pytest
from tests.s3 import servers
from tests.s3.fault_proxy import TRANSIENT, Decide, Fault, FaultProxy, Message

from gradientmail.buffers import HOST
from gradientmail.clock import MonotonicClock, inline
from gradientmail.errors import MailboxRefused, MailboxUnavailable
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.lease import Lease
from gradientmail.mailbox import s3, s3_parts, s3_requests, s3_transfers
from gradientmail.mailbox.retrying import RetryingMailbox
from gradientmail.mailbox.s3 import S3Mailbox
from gradientmail.testing.mailbox_races import content, holds

DROP_AFTER = Fault("drop after")


@pytest.fixture
def proxy(seaweedfs: str) -> Generator[FaultProxy]:
    with FaultProxy(seaweedfs) as running:
        yield running


@pytest.fixture
def box(proxy: FaultProxy, prefix: str) -> S3Mailbox:
    """A mailbox that has found out already that the store keeps conditions."""
    opened = mailbox(proxy, prefix)
    assert asyncio.run(put(opened, "known", b"x"))
    wait_for(proxy, "GET", "list-type=2")  # it tidies in the background, and that comes last
    proxy.requests.clear()
    proxy.answered.clear()
    return opened


def wait_for(proxy: FaultProxy, method: str, path: str) -> None:
    """Wait until such a request has been answered."""
    while not any(r.startswith(method) and path in r for r in tuple(proxy.answered)):
        time.sleep(0.01)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Everything over 5 MiB travels in parts of that size."""
    nbytes = 5 * 2**20
    for module in (s3, s3_transfers):
        monkeypatch.setattr(module, "WHOLE_BYTES", nbytes)
    monkeypatch.setattr(s3_parts, "PART_BYTES", nbytes)
    return nbytes


def mailbox(proxy: FaultProxy, prefix: str, *, allow_overwrites: bool = False) -> S3Mailbox:
    return S3Mailbox(
        "tests",
        prefix,
        endpoint_url=proxy.endpoint,
        region="us-east-1",
        allow_overwrites=allow_overwrites,
    )


async def put(box: S3Mailbox, key: str, data: bytes) -> bool:
    return await box.put_if_absent(key, data)


def retrying(box: S3Mailbox) -> RetryingMailbox:
    return RetryingMailbox(box, clock=MonotonicClock(), random=Random(1))


def first(
    number: int, fault: Fault, *, methods: Iterable[str] = ("PUT", "GET", "DELETE", "POST")
) -> Decide:
    """Break the first ``number`` requests that use one of ``methods``."""
    left = number

    def decide(request: Message) -> Fault | None:
        nonlocal left
        if request.method not in methods or left == 0:
            return None
        left -= 1
        return fault

    return decide


ANSWERS = [*TRANSIENT, (400, "RequestTimeout")]


def test_each_transient_answer_is_told_and_then_over(box: S3Mailbox, proxy: FaultProxy) -> None:
    async def main() -> None:
        for status, code in ANSWERS:
            # Expired credentials are looked for again, and once more in vain.
            tries = 2 if code == "ExpiredToken" else 1
            calls = [
                lambda: box.put_if_absent("a", b"1"),
                lambda: box.get("known"),
                lambda: box.list(""),
                lambda: box.delete(["b"]),
                lambda: box.delete(["b", "c"]),
            ]
            for call in calls:
                before = len(proxy.requests)
                proxy.decide = first(tries, Fault("answer", status, code))
                with pytest.raises(MailboxUnavailable, match=str(status)):
                    await call()
                assert len(proxy.requests) == before + tries
                await call()
            await box.delete(["a"])

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["drop before", "drop after", "reset", "truncate"])
def test_a_connection_that_breaks_is_transient(
    kind: str, box: S3Mailbox, proxy: FaultProxy
) -> None:
    fault = Fault(kind)  # type: ignore[arg-type]

    async def main() -> None:
        for method, call in (
            ("GET", lambda: box.get("known")),
            ("GET", lambda: box.list("")),
            ("POST", lambda: box.delete(["b", "c"])),
        ):
            proxy.decide = first(1, fault, methods=[method])
            with pytest.raises(MailboxUnavailable):
                await call()
            await call()
        if kind != "truncate":  # the answer to a put has no body
            proxy.decide = first(1, fault, methods=["PUT"])
            with pytest.raises(MailboxUnavailable):
                await box.put_if_absent("new", b"data")
            assert await box.put_if_absent("new", b"data") is (kind == "drop before")
        assert content(await box.get("known")) == b"x"

    asyncio.run(main())


def test_writes_whose_answer_was_lost_are_recognized(box: S3Mailbox, proxy: FaultProxy) -> None:
    """The server acts, the connection breaks, the retry meets 412."""

    async def main() -> None:
        store = retrying(box)
        exchange = Exchange(store, offload=inline, take=HOST.take)
        proxy.decide = first(1, DROP_AFTER, methods=["PUT"])
        assert await exchange.claim(3, 1, "a") is True
        proxy.decide = first(1, DROP_AFTER, methods=["PUT"])
        assert await exchange.claim(3, 1, "b") is False
        lease = Lease(store, "a", "token")
        proxy.decide = first(1, DROP_AFTER, methods=["PUT"])
        await lease.acquire()
        proxy.decide = first(1, DROP_AFTER, methods=["PUT"])
        assert await lease.renew() is True
        assert proxy.struck["drop after"] == 4
        assert lease.beat == 2

    asyncio.run(main())


REFUSALS = [
    (404, "NoSuchBucket", "create it, or check the name"),
    (403, "AccessDenied", "s3:ListBucket"),
    (403, "InvalidAccessKeyId", "access key"),
    (403, "SignatureDoesNotMatch", "secret key"),
    (501, "NotImplemented", "when_required"),
    (400, "AuthorizationHeaderMalformed", "region="),
    (400, "IllegalLocationConstraintException", "region="),
    (507, "InsufficientStorage", "full"),
]


@pytest.mark.parametrize(
    ("status", "code", "words"), REFUSALS, ids=[code for _, code, _ in REFUSALS]
)
def test_what_is_not_transient_is_reported_after_few_requests(
    status: int, code: str, words: str, box: S3Mailbox, proxy: FaultProxy
) -> None:
    store = retrying(box)

    async def main() -> None:
        before = len(proxy.requests)
        proxy.decide = lambda _: Fault("answer", status, code)
        for call in (
            lambda: store.put_if_absent("a", b"1"),
            lambda: store.get("a"),
            lambda: store.list(""),
            lambda: store.delete(["a"]),
        ):
            with pytest.raises(MailboxRefused, match=words) as caught:
                await call()
            assert code in str(caught.value)
            assert "'tests'" in str(caught.value)
        assert len(proxy.requests) - before <= 8  # botocore follows some hints of a region

    asyncio.run(main())


def test_a_store_that_lies_about_conditions_is_refused(proxy: FaultProxy, prefix: str) -> None:
    proxy.decide = lambda _: Fault("lie")
    box = mailbox(proxy, prefix)

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(MailboxRefused, match="ignores If-None-Match") as caught:
                await box.put_if_absent("a", b"1")
            for words in ("two nodes", "FilesystemMailbox", "allow_overwrites=True"):
                assert words in str(caught.value)
        assert await box.get("a") is None
        assert await box.list("") == []

    asyncio.run(main())
    assert [line for line in proxy.requests if line.startswith("PUT") and ".tmp/" not in line] == []


@pytest.mark.parametrize("fault", [Fault("lie"), Fault("answer", 501, "NotImplemented")], ids=str)
def test_who_takes_the_risk_may(fault: Fault, proxy: FaultProxy, prefix: str) -> None:
    def decide(request: Message) -> Fault | None:
        return fault if request.header("if-none-match") else None

    proxy.decide = decide
    box = mailbox(proxy, prefix, allow_overwrites=True)

    async def main() -> None:
        assert await box.put_if_absent("a", b"1") is True
        assert await box.put_if_absent("a", b"2") is False
        assert content(await box.get("a")) == b"1"

    asyncio.run(main())


def test_the_store_is_tried_once_an_instance(proxy: FaultProxy, prefix: str) -> None:
    box = mailbox(proxy, prefix)

    async def main() -> None:
        await asyncio.gather(*(put(box, f"more/{number}", b"x") for number in range(20)))

    asyncio.run(main())
    probes = [line for line in proxy.requests if "/.tmp/create-once" in line]
    assert [line.split()[0] for line in probes] == ["PUT", "PUT", "GET", "DELETE"]


def test_a_conflict_is_tried_again(
    box: S3Mailbox, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_requests, "PAUSES_SECONDS", (0.001, 0.001))
    conflict = Fault("answer", 409, "ConditionalRequestConflict")

    async def main() -> None:
        proxy.decide = first(2, conflict, methods=["PUT"])
        assert await box.put_if_absent("a", b"1") is True
        proxy.decide = first(3, conflict, methods=["PUT"])
        with pytest.raises(MailboxUnavailable, match="409"):
            await box.put_if_absent("b", b"1")
        assert await box.put_if_absent("b", b"1") is True

    asyncio.run(main())
    assert proxy.struck["answer"] == 5


def test_expired_credentials_are_looked_for_again(
    box: S3Mailbox, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []

    def decide(request: Message) -> Fault | None:
        keys.append(request.header("authorization").partition("Credential=")[2].partition("/")[0])
        return Fault("answer", 400, "ExpiredToken") if keys[-1] == "old" else None

    proxy.decide = decide
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")
    old = mailbox(proxy, "unused")
    with pytest.raises(MailboxRefused, match="renew them"):  # nothing has worked yet: at once
        asyncio.run(put(old, "a", b"1"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    keys.clear()
    assert asyncio.run(put(old, "a", b"1")) is True
    assert set(keys) <= {"old", "testing"}
    assert keys[-1] == "testing"


@pytest.mark.parametrize("status", [400, 403])
def test_whoever_gives_credentials_is_asked_again(
    status: int, proxy: FaultProxy, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3's own chain: here a program, which would have them last for an hour."""
    script, given = tmp_path / "give.py", tmp_path / "given"
    script.write_text(
        f"""import datetime, json, pathlib
given = pathlib.Path({str(given)!r})
key = "testing" if given.exists() else "old"
given.touch()
ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
print(json.dumps({{"Version": 1, "AccessKeyId": key, "SecretAccessKey": "testing-secret",
                  "Expiration": ends.isoformat()}}))
"""
    )
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    proxy.decide = lambda request: (
        Fault("answer", status, "ExpiredToken")
        if "Credential=old/" in request.header("authorization")
        else None
    )
    assert asyncio.run(put(mailbox(proxy, prefix), "a", b"1")) is True
    assert proxy.struck["answer"] == 1


def test_no_credentials_are_reported_at_once(
    proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(MailboxRefused, match="no valid credentials"):
        asyncio.run(put(mailbox(proxy, prefix), "a", b"1"))
    assert proxy.requests == []


def payload(nbytes: int) -> tuple[str, bytes]:
    data = Random(nbytes).randbytes(2**16) * (nbytes // 2**16)
    return f"blobs/{hashlib.sha256(data).hexdigest()}.safetensors", data


def test_parts_are_sent_and_fetched_again_and_nothing_is_left(
    box: S3Mailbox, proxy: FaultProxy, small_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A payload of three parts; one part and one range break, then all of them do."""
    monkeypatch.setattr(s3_requests, "PAUSES_SECONDS", (0.001, 0.001))
    key, data = payload(12 * 2**20)
    broken = False

    def decide(request: Message) -> Fault | None:
        nonlocal broken
        is_part = "partNumber=2" in request.path
        is_range = request.header("range").startswith(f"bytes={2 * small_parts}-")
        if (is_part or is_range) and not broken:
            broken = True
            return Fault("truncate") if is_range else Fault("drop before")
        return None

    async def main() -> None:
        nonlocal broken
        proxy.decide = decide
        assert await box.put_if_absent(key, data) is True
        assert broken
        broken = False
        assert holds(await box.get(key), data)
        assert broken
        assert await box.put_if_absent(key, data) is False
        await box.delete([key])
        proxy.decide = lambda r: Fault("drop before") if "partNumber=3" in r.path else None
        with pytest.raises(MailboxUnavailable):
            await box.put_if_absent(key, data)
        assert await box.get(key) is None

    asyncio.run(main())
    wait_for(proxy, "DELETE", "uploadId")
    assert "Upload>" not in str(box._process.requests.call("", "list_multipart_uploads"))


def test_an_upload_in_parts_whose_last_answer_was_lost_is_there(
    box: S3Mailbox, proxy: FaultProxy, small_parts: int
) -> None:
    """The store makes the object, nobody hears of it, and the upload is given up: too late."""
    key, data = payload(12 * 2**20)

    def decide(request: Message) -> Fault | None:
        return DROP_AFTER if request.method == "POST" and "uploadId" in request.path else None

    async def main() -> None:
        proxy.decide = decide
        with pytest.raises(MailboxUnavailable):
            await box.put_if_absent(key, data)
        proxy.decide = lambda _: None
        wait_for(proxy, "DELETE", "uploadId")
        assert await box.put_if_absent(key, data) is False
        assert holds(await box.get(key), data)

    asyncio.run(main())
    assert proxy.struck["drop after"] == 1


def test_an_object_made_anew_between_two_ranges_is_not_mixed(
    box: S3Mailbox, proxy: FaultProxy, small_parts: int
) -> None:
    key, old = "odd/large", bytes(8 * 2**20)
    new = b"\xff" * len(old)
    replaced = False

    async def main() -> None:
        assert await box.put_if_absent(key, old)

        def decide(request: Message) -> Fault | None:
            nonlocal replaced
            if request.header("range").startswith(f"bytes={small_parts}-") and not replaced:
                replaced = True
                name = box._name(key)
                servers.client(proxy.upstream).put_object(Bucket="tests", Key=name, Body=new)
            return None

        proxy.decide = decide
        found = await box.get(key)
        assert holds(found, new) or holds(found, old)
        assert replaced

    asyncio.run(main())


def test_keys_that_a_batch_did_not_delete(
    box: S3Mailbox, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_requests, "PAUSES_SECONDS", (0.001, 0.001))

    def answer(code: str) -> Fault:
        error = f"<Error><Key>{box._name('a')}</Key><Code>{code}</Code></Error>"
        return Fault("answer", 200, body=f"<DeleteResult>{error}</DeleteResult>")

    async def main() -> None:
        proxy.decide = first(2, answer("SlowDown"), methods=["POST"])
        await box.delete(["a", "b"])
        proxy.decide = first(3, answer("InternalError"), methods=["POST"])
        with pytest.raises(MailboxUnavailable, match="1 objects are still there"):
            await box.delete(["a", "b"])
        proxy.decide = first(1, answer("AccessDenied"), methods=["POST"])
        with pytest.raises(MailboxRefused, match="s3:DeleteObject"):
            await box.delete(["a", "b"])
        proxy.decide = first(1, answer("NoSuchKey"), methods=["POST"])
        await box.delete(["a", "b"])
        # A store that deletes one at a time only is asked once for more.
        proxy.decide = lambda r: (
            Fault("answer", 501, "NotImplemented") if r.method == "POST" else None
        )
        for key in ("a", "b"):
            assert await box.put_if_absent(key, b"1")
        await box.delete(["a", "b"])
        await box.delete(["a", "b"])
        assert await box.list("") == ["known"]

    asyncio.run(main())
    assert sum(line.startswith("POST") for line in proxy.requests) == 3 + 3 + 1 + 1 + 1


@pytest.mark.parametrize("batch", [1000, 1001, 2500])
def test_batches_of_a_thousand(batch: int, box: S3Mailbox, proxy: FaultProxy) -> None:
    sizes: list[int] = []

    def decide(request: Message) -> Fault:
        sizes.append(request.body.count(b"<Key>") or 1)
        return Fault("answer", 200, body="<DeleteResult></DeleteResult>")

    proxy.decide = decide
    asyncio.run(_delete(box, [f"k/{number}" for number in range(batch)]))
    assert sizes == [1000] * (batch // 1000) + [batch % 1000] * bool(batch % 1000)


async def _delete(box: S3Mailbox, keys: list[str]) -> None:
    await box.delete(keys)
