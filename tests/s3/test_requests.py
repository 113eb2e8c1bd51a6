"""What an S3Mailbox sends: hashes that are known, bytes where they lie, nothing unasked for."""

import asyncio
import base64
import hashlib
import os
import time
from collections.abc import Generator
from pathlib import Path
from random import Random
from typing import Any

import botocore.auth
import numpy as np
import pytest
import torch
from tests.s3 import servers
from tests.s3.fault_proxy import Fault, FaultProxy, Message

import gradientmail as gm
from gradientmail.buffers import show
from gradientmail.mailbox import s3, s3_parts, s3_requests, s3_transfers
from gradientmail.mailbox.s3 import S3Mailbox
from gradientmail.testing.mailbox_races import content, holds


@pytest.fixture
def seen() -> list[Message]:
    return []


@pytest.fixture
def proxy(seaweedfs: str, seen: list[Message]) -> Generator[FaultProxy]:
    def look(request: Message) -> Fault | None:
        seen.append(request)
        return None

    with FaultProxy(seaweedfs, look) as running:
        yield running


def mailbox(proxy: FaultProxy, prefix: str, **options: Any) -> S3Mailbox:
    return S3Mailbox("tests", prefix, endpoint_url=proxy.endpoint, region="us-east-1", **options)


def payload(nbytes: int) -> tuple[str, bytes, str]:
    data = Random(nbytes).randbytes(nbytes)
    digest = hashlib.sha256(data).hexdigest()
    return f"blobs/init/000/{digest}.safetensors", data, digest


def run(work: Any) -> Any:
    return asyncio.run(work)


@pytest.mark.parametrize("checksums", ["when_supported", "when_required"])
def test_the_store_checks_the_hash_that_the_key_holds(
    checksums: str,
    proxy: FaultProxy,
    seen: list[Message],
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key, data, digest = payload(300_000)
    box = mailbox(proxy, prefix, request_checksums=checksums)
    assert run(box.put_if_absent("first", b"x"))
    hashed: list[int] = []
    real = hashlib.sha256

    def counting(data: bytes = b"", **options: Any) -> Any:
        hashed.append(memoryview(data).nbytes)
        return real(data, **options)

    monkeypatch.setattr(botocore.auth, "sha256", counting)
    monkeypatch.setattr(hashlib, "sha256", counting)
    assert run(box.put_if_absent(key, data)) is True
    monkeypatch.undo()
    assert hashed, "the signature itself needs a hash"
    assert max(hashed) < 10_000
    sent = next(request for request in seen if digest in request.path)
    assert sent.header("x-amz-content-sha256") == digest
    assert sent.header("if-none-match") == "*"
    assert (sent.header("transfer-encoding"), sent.header("x-amz-trailer")) == ("", "")
    whole = base64.b64encode(bytes.fromhex(digest)).decode() * (checksums == "when_supported")
    assert sent.header("x-amz-checksum-sha256") == whole


def test_no_checksum_that_was_not_asked_for(
    proxy: FaultProxy, seen: list[Message], prefix: str
) -> None:
    box = mailbox(proxy, prefix, request_checksums="when_required")

    async def main() -> None:
        for key in ("a", "b", "c"):
            assert await box.put_if_absent(key, b"1")
        await box.delete(["a", "b"])
        await box.delete(["c"])
        assert await box.list("") == []

    run(main())
    lines = [line.lower() for request in seen for line in request.headers]
    assert [line for line in lines if line.startswith(("x-amz-checksum", "x-amz-sdk"))] == []
    batch = next(request for request in seen if request.method == "POST")
    expected = base64.b64encode(hashlib.md5(batch.body).digest()).decode()
    assert batch.header("content-md5") == expected


@pytest.mark.parametrize("nbytes", [100, 100_000])
def test_a_key_that_only_looks_like_a_payloads(nbytes: int, endpoint: str, prefix: str) -> None:
    """Any bytes may be under any key: who damages a run on purpose, for a test, say."""
    box = S3Mailbox("tests", prefix, endpoint_url=endpoint, region="us-east-1")
    key, _, _ = payload(nbytes)

    async def main() -> None:
        other = bytes(nbytes)
        assert await box.put_if_absent(key, other) is True
        assert await box.put_if_absent(key, b"x" * nbytes) is False
        assert holds(await box.get(key), other)

    run(main())


@pytest.mark.parametrize("size", ["small", "whole", "parts"])
@pytest.mark.parametrize("width", [1, 8])
def test_nobody_looks_at_the_buffer_afterwards(
    size: str, width: int, moto: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (s3, s3_transfers):
        monkeypatch.setattr(module, "WHOLE_BYTES", 5 * 2**20)
    monkeypatch.setattr(s3_parts, "PART_BYTES", 5 * 2**20)
    key, data, _ = payload({"small": 1000, "whole": 200_000, "parts": 11 * 2**20}[size])
    box = S3Mailbox("tests", prefix, endpoint_url=moto, region="us-east-1", max_concurrency=width)

    async def main() -> None:
        view, ended = show(memoryview(data))
        storing = box.put_if_absent(key, view)
        del view
        assert await storing is True
        assert ended()
        found = await box.get(key)
        assert holds(found, data)
        if size != "small":
            assert found is not None
            with pytest.raises(TypeError):
                memoryview(found)[:1] = b"x"

    run(main())


def test_a_small_object_is_one_request(proxy: FaultProxy, seen: list[Message], prefix: str) -> None:
    box = mailbox(proxy, prefix)
    run(box.put_if_absent("first", b"x"))
    while not any("list-type=2" in request.path for request in tuple(seen)):
        time.sleep(0.01)  # what it tidies in the background
    seen.clear()

    async def main() -> None:
        assert await box.put_if_absent("rounds/0000000001.json", b"{}")
        assert content(await box.get("rounds/0000000001.json")) == b"{}"
        assert await box.get("nothing") is None
        assert await box.put_if_absent("empty", b"")
        assert content(await box.get("empty")) == b""
        await box.delete(["empty"])

    run(main())
    assert [request.method for request in seen] == ["PUT", "GET", "GET", "PUT", "GET", "DELETE"]
    assert [request.header("expect") for request in seen] == [""] * 6


def test_keys_of_all_kinds_can_be_deleted(seaweedfs: str, prefix: str) -> None:
    box = S3Mailbox("tests", prefix, endpoint_url=seaweedfs, region="us-east-1")
    keys = ["a\x01b", "c\rd", "e\nf", "<&>'\"", "+ %20", "é", "\U00010000", "plain"]

    async def main() -> None:
        for key in keys:
            assert await box.put_if_absent(key, b"1"), key
        assert list(await box.list("")) == sorted(keys)
        await box.delete(keys)
        assert await box.list("") == []

    run(main())


def test_a_forked_child_has_connections_of_its_own(moto: str, prefix: str, tmp_path: Path) -> None:
    box = S3Mailbox("tests", prefix, endpoint_url=moto, region="us-east-1")
    run(box.put_if_absent("parent", b"1"))
    out = tmp_path / "out"
    child = os.fork()
    if child == 0:
        try:
            out.write_text(repr(run(box.put_if_absent("child", b"2"))))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert out.read_text() == "True"
    assert content(run(box.get("child"))) == b"2"


def test_a_folder_in_the_place_of_an_object_is_told(seaweedfs: str, prefix: str) -> None:
    """SeaweedFS refuses to create the object, and has none: whoever believed that would wait."""
    name = f"{prefix}/leases/a/0000000001.json/x"
    servers.client(seaweedfs).put_object(Bucket="tests", Key=name, Body=b"x")
    box = gm.S3Mailbox("tests", prefix, endpoint_url=seaweedfs, region="us-east-1")
    with pytest.raises(gm.MailboxRefused, match="a folder of that name: remove what begins with"):
        gm.Session(
            torch.nn.Linear(2, 2),
            algorithm=gm.DiLoCo(sync_every=2, fragments=1, in_flight=1),
            mailbox=box,
            learner_id="a",
            callbacks=(),
        )
    asyncio.run(box.delete([name.removeprefix(f"{prefix}/")]))


@pytest.mark.parametrize("nbytes", [5, 100_000, 11 * 2**20], ids=["small", "whole", "parts"])
def test_no_size_hides_a_folder_in_the_place(
    nbytes: int, seaweedfs: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_requests, "PAUSES_SECONDS", (0.001, 0.001))
    monkeypatch.setattr(s3, "MAX_WHOLE_BYTES", 5 * 2**20)
    monkeypatch.setattr(s3_parts, "PART_BYTES", 5 * 2**20)
    box = S3Mailbox("tests", prefix, endpoint_url=seaweedfs, region="us-east-1")

    async def main() -> None:
        assert await box.put_if_absent("odd/inner", b"x")
        with pytest.raises(gm.MailboxRefused, match="a folder of that name: remove what begins"):
            await box.put_if_absent("odd", bytes(nbytes))
        assert await box.get("odd") is None
        assert await box.put_if_absent("even", bytes(nbytes)) is True
        assert await box.put_if_absent("even", bytes(nbytes)) is False

    run(main())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bucket": ""}, "name of a bucket"),
        ({"bucket": "s3://b/p"}, "name of a bucket"),
        ({"bucket": 3}, "string"),
        ({"prefix": None}, "string"),
        ({"prefix": "a//b"}, "cannot begin a key"),
        ({"prefix": "../a"}, "cannot begin a key"),
        ({"endpoint_url": "localhost:9000"}, "https://host"),
        ({"endpoint_url": ""}, "https://host"),
        ({"region": ""}, "region"),
        ({"endpoint_url": "http://[::1"}, "https://host.*not 'http://"),
        ({"endpoint_url": "http://host:99999"}, "https://host.*not 'http://"),
        ({"endpoint_url": "http://host:x"}, "https://host.*not 'http://"),
        ({"endpoint_url": "http://host/?token=secret"}, "https://host.*not 'http://"),
        ({"endpoint_url": "http://me:secret@host"}, "^credentials do not belong into endpoint_url"),
        ({"max_concurrency": 0}, "from 1 to 1000"),
        ({"max_concurrency": 10**30}, "from 1 to 1000"),
        ({"max_concurrency": True}, "integer"),
        ({"max_concurrency": 2.0}, "integer"),
        ({"request_checksums": "off"}, "when_supported"),
        ({"addressing": "host"}, "virtual"),
        ({"addressing": np.array(["path", "auto"])}, "virtual"),
        ({"allow_overwrites": "no"}, "True or False"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"bucket": "b", "prefix": "p"}
    with pytest.raises((ValueError, TypeError), match=words):
        gm.S3Mailbox(**(usual | arguments))


def test_prefixes_and_keys() -> None:
    assert gm.S3Mailbox("b", "/runs/one/").prefix == "runs/one"
    assert gm.S3Mailbox("b", "")._name("a") == "a"
    box = gm.S3Mailbox("b", "p" * 100)
    with pytest.raises(ValueError, match="longer than 1024 bytes with the prefix"):
        box._name("k" * 1000)
    with pytest.raises(ValueError, match="keeps to itself"):
        box._name(".tmp/x")
    assert repr(gm.S3Mailbox("b", "p")) == "S3Mailbox('b', 'p')"
