"""Answers that are not what was asked for, and what is asked so that answers can be told apart."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest
from tests.s3.fault_proxy import Fault, FaultProxy, Message

from gradientmail.errors import MailboxRefused, MailboxUnavailable
from gradientmail.mailbox import s3_requests, s3_transfers
from gradientmail.mailbox.s3 import S3Mailbox
from gradientmail.mailbox.s3_client import make_client
from gradientmail.testing.mailbox_races import content

WHOLE = 100
"""What is asked for at first, in these tests."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_transfers, "WHOLE_BYTES", WHOLE)
    monkeypatch.setattr(s3_requests, "PAUSES_SECONDS", (0.001, 0.001))


@pytest.fixture
def proxy() -> Generator[FaultProxy]:
    """One with no server behind it."""
    with FaultProxy("http://127.0.0.1:9", connects=False) as running:
        yield running


def mailbox(proxy: FaultProxy, prefix: str = "p") -> S3Mailbox:
    return S3Mailbox("tests", prefix, endpoint_url=proxy.endpoint, region="us-east-1")


def get(proxy: FaultProxy, key: str = "a") -> bytes | None:
    """The object, read by a mailbox of its own."""

    async def main() -> bytes | None:
        found = await mailbox(proxy).get(key)
        return None if found is None else content(found)

    return asyncio.run(main())


DATA = "".join(chr(ord("a") + number % 26) for number in range(250))


def spans(data: str) -> Callable[[Message], Fault]:
    """What a store answers that has ``data`` under every key."""

    def decide(request: Message) -> Fault:
        start, last = map(int, request.header("range").removeprefix("bytes=").split("-"))
        last = min(last, len(data) - 1)
        return part(data[start : last + 1], f"bytes {start}-{last}/{len(data)}")

    return decide


def part(body: str, content_range: str, *more: str) -> Fault:
    return Fault("answer", 206, body=body, headers=(f"Content-Range: {content_range}", *more))


def test_ranges_make_the_object(proxy: FaultProxy) -> None:
    proxy.decide = spans(DATA)
    assert get(proxy) == DATA.encode()
    assert len(proxy.requests) == 2


@pytest.mark.parametrize(
    "first",
    [
        part(DATA[5:105], "bytes 5-104/250"),
        part(DATA[:50], "bytes 0-49/250"),
        part(DATA[:100], "bytes 0-99/*"),
        part(DATA[:100], "bytes 0-49/250"),
        part(DATA[:100], "bytes 0-99/50"),
        part(DATA[:100], "0-99/250"),
        part(DATA[:100], f"bytes 0-99/{10**40}"),
        Fault("answer", 206, body=DATA[:100]),
        Fault(
            "answer",
            200,
            body="64\r\n" + DATA[:100] + "\r\n0\r\n\r\n",
            headers=("Transfer-Encoding: chunked",),
        ),
    ],
    ids=lambda fault: " ".join([str(fault.status), *fault.headers]),
)
def test_another_range_than_the_first_is_no_object(first: Fault, proxy: FaultProxy) -> None:
    proxy.decide = lambda _: first
    with pytest.raises(MailboxUnavailable, match=r"bytes=0-99 was asked for.*proxy or cache"):
        get(proxy)
    assert len(proxy.requests) == 1


@pytest.mark.parametrize(
    "second",
    [
        part(DATA[99:249], "bytes 99-248/250"),
        part(DATA[100:200], "bytes 100-199/250"),
        Fault("answer", 200, body=DATA),
        Fault("answer", 206, body=DATA[100:]),
    ],
    ids=lambda fault: " ".join([str(fault.status), *fault.headers]),
)
def test_another_range_later_is_not_put_in_its_place(second: Fault, proxy: FaultProxy) -> None:
    right = spans(DATA)
    proxy.decide = lambda request: (
        right(request) if request.header("range") == "bytes=0-99" else second
    )
    with pytest.raises(MailboxUnavailable, match="bytes=100-249 was asked for"):
        get(proxy)
    assert len(proxy.requests) == 1 + 3

    again = iter([second])
    proxy.decide = lambda request: (
        right(request) if request.header("range") == "bytes=0-99" else next(again, right(request))
    )
    assert get(proxy) == DATA.encode()


def test_a_store_that_grows_the_object_is_read_anew(proxy: FaultProxy) -> None:
    """It knows no ETag: that another object is there by now shows in its size."""
    old, new = spans(DATA), spans(DATA * 2)
    firsts = iter([old])
    proxy.decide = lambda request: (
        next(firsts, new)(request) if request.header("range") == "bytes=0-99" else new(request)
    )
    assert get(proxy) == (DATA * 2).encode()


def test_a_store_that_knows_no_ranges_sends_all_of_it(proxy: FaultProxy) -> None:
    proxy.decide = lambda _: Fault("answer", 200, body=DATA)
    assert get(proxy) == DATA.encode()
    proxy.decide = lambda _: Fault("answer", 200, body="")
    assert get(proxy) == b""
    assert len(proxy.requests) == 2


def test_a_body_that_ends_early_is_no_object(proxy: FaultProxy, seaweedfs: str) -> None:
    box = S3Mailbox("tests", "early", endpoint_url=seaweedfs, region="us-east-1")
    with FaultProxy(seaweedfs) as broken:

        async def main() -> None:
            await box.put_if_absent("a", DATA.encode())
            broken.decide = lambda _: Fault("truncate")
            with pytest.raises(MailboxUnavailable):
                await mailbox(broken, "early").get("a")

        asyncio.run(main())


def test_errors_that_a_head_would_hide(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a HEAD has no body, so AWS says of expired credentials just 400 to it."""
    expired = True

    def decide(request: Message) -> Fault:
        nonlocal expired
        if request.method == "PUT":
            return Fault("answer", 412, "PreconditionFailed")
        if "old" in request.header("authorization"):
            return Fault("answer", 400, "ExpiredToken")
        expired = False
        return part("x", "bytes 0-0/1")

    async def main(box: S3Mailbox) -> None:
        box._process.proved = True
        assert await box.put_if_absent("a", b"1") is False

    box = mailbox(proxy)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")
    box._process.requests.client()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
    proxy.decide = decide
    asyncio.run(main(box))
    assert not expired
    proxy.decide = lambda request: (
        Fault("answer", 412, "PreconditionFailed")
        if request.method == "PUT"
        else Fault("answer", 404, "NoSuchBucket")
    )
    with pytest.raises(MailboxRefused, match="no bucket of that name"):
        asyncio.run(main(box))
    assert not any(line.startswith("HEAD") for line in proxy.requests)


def test_connections_are_kept(seaweedfs: str, prefix: str) -> None:
    with FaultProxy(seaweedfs) as proxy:
        box = mailbox(proxy, prefix)

        async def main() -> None:
            for number in range(10):
                for key, data in (("empty", b""), ("small", b"x"), ("large", DATA.encode() * 999)):
                    await box.put_if_absent(f"{key}/{number}", data)
                    assert await box.put_if_absent(f"{key}/{number}", data) is False
                    assert content(await box.get(f"{key}/{number}")) == data
                    assert await box.get("nothing") is None
                await box.list("")
                await box.delete([f"small/{number}", f"large/{number}"])

        asyncio.run(main())
        assert len(proxy.requests) > 100
        assert proxy.connections <= 8


@pytest.mark.parametrize(
    ("addressing", "endpoint", "url"),
    [
        ("auto", None, "https://bucket.s3.eu-central-1.amazonaws.com/run/a"),
        ("virtual", None, "https://bucket.s3.eu-central-1.amazonaws.com/run/a"),
        ("path", None, "https://s3.eu-central-1.amazonaws.com/bucket/run/a"),
        ("auto", "http://host:9000", "http://host:9000/bucket/run/a"),
        ("path", "http://host:9000", "http://host:9000/bucket/run/a"),
        ("virtual", "http://host:9000", "http://bucket.host:9000/run/a"),
        ("virtual", "https://s3.store.example", "https://bucket.s3.store.example/run/a"),
    ],
)
def test_where_the_name_of_the_bucket_goes(addressing: Any, endpoint: str | None, url: str) -> None:
    client = make_client(
        endpoint_url=endpoint,
        region="eu-central-1",
        connections=1,
        addressing=addressing,
        checksums="when_supported",
    )
    asked: list[str] = []

    def note(request: Any, **_: Any) -> None:
        asked.append(request.url)
        raise ConnectionError

    client.meta.events.register("before-send.s3.GetObject", note)
    with pytest.raises(ConnectionError):
        client.get_object(Bucket="bucket", Key="run/a")
    assert asked == [url]


def test_listings_of_stores_that_do_not_encode_keys(proxy: FaultProxy) -> None:
    """Where the answer does not say that keys are encoded, what looks so is the key itself."""
    keys = ["a%20b", "a+b", "é"]
    rows = "".join(f"<Contents><Key>p/{key}</Key></Contents>" for key in keys)
    body = f"<ListBucketResult>{rows}<IsTruncated>false</IsTruncated></ListBucketResult>"
    proxy.decide = lambda _: Fault("answer", 200, body=body)

    async def main() -> None:
        assert list(await mailbox(proxy).list("")) == keys

    asyncio.run(main())
