"""Listings of stores that order, cut and page as they like."""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit
from xml.sax.saxutils import escape

import pytest
from tests.s3.fault_proxy import Fault, FaultProxy, Message

from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox.s3 import S3Mailbox

KEYS = (
    "leases/a-b/0000000001.json",
    "leases/a.b/0000000001.json",
    "leases/a/0000000001.json",
    "leases/a/0000000002.json",
    "rounds/",
    "rounds/.DS_Store",
    "rounds/0000000001.json",
    "rounds/0000000002-x.json",
    "rounds/0000000002.json",
    "rounds/0000000002.json.bak",
    "rounds/0000000002/note",
    "rounds/0000000003.json",
    "rounds/0000000010.json",
    "rounds/é + %20&<x>.json",
    "rounds/\U00010000",
)
BASE = "some/run/"


def by_folder(key: str) -> tuple[str, ...]:
    return tuple(key.split("/"))


def by_utf16(key: str) -> bytes:
    return key.encode("utf-16-be")


ORDERS: dict[str, Callable[[str], Any]] = {
    "bytes": str.encode,
    "folders": by_folder,
    "utf-16": by_utf16,
}


class Store:
    """The listing of a bucket, by an order, cutting or not, two keys a page."""

    def __init__(self, order: str, *, cuts: bool) -> None:
        self.sort: Callable[[str], Any] = {
            "bytes": str.encode,
            "folders": by_folder,
            "utf-16": by_utf16,
        }[order]
        self.cuts = cuts
        self.asked: list[str] = []

    def __call__(self, request: Message) -> Fault:
        query = parse_qs(urlsplit(request.path).query, keep_blank_values=True)
        assert query["encoding-type"] == ["url"]
        prefix = query["prefix"][0]
        after = query.get("start-after", [""])[0]
        self.asked.append(after)
        names = sorted((BASE + key for key in KEYS), key=self.sort)
        names = [name for name in names if name.startswith(prefix)]
        if self.cuts and after:
            names = [name for name in names if self.sort(name) > self.sort(after)]
        at = int(query.get("continuation-token", ["0"])[0])
        more = at + 2 < len(names)
        contents = "".join(
            f"<Contents><Key>{escape(quote(name, safe='/'))}</Key><Size>1</Size></Contents>"
            for name in names[at : at + 2]
        )
        token = f"<NextContinuationToken>{at + 2}</NextContinuationToken>" if more else ""
        return Fault(
            "answer",
            200,
            body=f"<ListBucketResult><EncodingType>url</EncodingType>{contents}{token}"
            f"<IsTruncated>{str(more).lower()}</IsTruncated></ListBucketResult>",
        )


@pytest.mark.parametrize("order", ["bytes", "folders", "utf-16"])
@pytest.mark.parametrize("cuts", [True, False])
def test_no_store_can_lose_a_key(order: str, cuts: bool) -> None:
    store = Store(order, cuts=cuts)

    async def main(box: S3Mailbox) -> None:
        mine = [key for key in KEYS if not key.endswith("/")]
        for prefix in ("", "rounds/", "rounds/0", "leases/", "leases/a/", "leases/a"):
            marks = [key for key in KEYS if order != "utf-16" or key.isascii()]
            for after in ("", prefix, *marks, "rounds/0000000002", "rounds/0000000002.k", "zz"):
                found = await box.list(prefix, after=after)
                wanted = [k for k in mine if k.startswith(prefix) and k.encode() > after.encode()]
                assert list(found) == sorted(wanted, key=str.encode), (prefix, after)

    # The store behind it is never asked; it only has to take the connection.
    with FaultProxy("http://127.0.0.1:9") as proxy:
        proxy.decide = store
        proxy.connects = False
        asyncio.run(main(S3Mailbox("b", BASE, endpoint_url=proxy.endpoint, region="us-east-1")))
    sent = [after for after in store.asked if after]
    assert f"{BASE}rounds/000000000" in sent  # cut off before the dot, and one character earlier
    assert f"{BASE}rounds/0000000002" not in sent  # or stores lose what is in a folder of that name
    assert all(after.startswith(f"{BASE}rounds/") or "leases" in after for after in sent)
    assert all(not set(after.removeprefix(BASE)) & set("-. ") for after in sent)


@pytest.mark.parametrize(
    "body",
    [
        "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        (
            "<ListBucketResult><IsTruncated>true</IsTruncated>"
            "<NextContinuationToken>same</NextContinuationToken></ListBucketResult>"
        ),
    ],
)
def test_pages_that_lead_nowhere_end(body: str) -> None:
    with FaultProxy("http://127.0.0.1:9") as proxy:
        proxy.decide = lambda _: Fault("answer", 200, body=body)
        proxy.connects = False
        box = S3Mailbox("b", "p", endpoint_url=proxy.endpoint, region="us-east-1")

        async def main() -> None:
            with pytest.raises(MailboxUnavailable, match="where it goes on"):
                await box.list("")

        asyncio.run(main())
        assert len(proxy.requests) <= 2
