"""What opens which store, and what each malformed URL is told."""

import asyncio
from pathlib import Path

import pytest

import gradientmail as gm
from gradientmail.mailbox.urls import S3Location, parse_file_url, parse_s3_url


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///data/run", "/data/run"),
        ("FILE:///data/run", "/data/run"),
        ("file://localhost/data/run", "/data/run"),
        ("file:///data/my%20run/100%25", "/data/my run/100%"),
        ("file:///data/%C3%A9", "/data/é"),
        ("file:///data/é+1", "/data/é+1"),
        ("file:///data/run/", "/data/run/"),
    ],
)
def test_paths_of_file_urls(url: str, path: str) -> None:
    assert parse_file_url(url) == path


ENDPOINT = "http%3A%2F%2F127.0.0.1%3A9000"


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://b/runs/x", S3Location("b", "runs/x")),
        ("S3://b/runs/x/", S3Location("b", "runs/x")),
        ("s3://My.Bucket_1/x", S3Location("My.Bucket_1", "x")),
        ("s3://b/a%20b", S3Location("b", "a b")),
        ("s3://b/x?", S3Location("b", "x")),
        ("s3://b/x?endpoint=https://h", S3Location("b", "x", "https://h")),
        (f"s3://b/x?endpoint={ENDPOINT}", S3Location("b", "x", "http://127.0.0.1:9000")),
        (
            "s3://b/x?region=auto&checksums=when_required&addressing=path&endpoint=https://h:1/p",
            S3Location("b", "x", "https://h:1/p", "auto", "when_required", "path"),
        ),
    ],
)
def test_locations_of_s3_urls(url: str, location: S3Location) -> None:
    assert parse_s3_url(url) == location


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"file://{tmp_path}/run", f"{tmp_path}/run", "run", "./run", Path("run")):
        box = gm.open_mailbox(url)
        assert isinstance(box, gm.FilesystemMailbox)
        assert box.path == str(tmp_path / "run")
    assert (
        repr(gm.open_mailbox("100% sure: x?")) == f"FilesystemMailbox('{tmp_path}/100% sure: x?')"
    )


def test_memory_is_one_store_a_name() -> None:
    one, same, other = (gm.open_mailbox(f"memory://{name}") for name in ("t-1", "t-1", "t-2"))
    assert isinstance(one, gm.MemoryMailbox)
    assert one is same
    assert one is not other
    assert asyncio.run(other.list("")) == ()


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("", "is empty"),
        (" run", "space"),
        ("s3://b/x\n", "control characters"),
        ("~/run", "expanded by a shell"),
        ("hf://b/p", "s3://bucket/prefix"),
        ("C:\\runs\\x", "path of Windows"),
        ("c:/runs", "path of Windows"),
        ("\\\\server\\share", "path of Windows"),
        ("runs\\x", "path of Windows"),
        ("s3:/b/x", "needs two slashes"),
        ("s3:b/x", "needs two slashes"),
        ("file:/data", "file:/ needs two slashes"),
        ("memory:x", "needs two slashes"),
        ("s4://b/x", "s4: is no kind of mailbox"),
        ("server:/export/runs", "server: is no kind of mailbox"),
        ("gs://b/x", "storage.googleapis.com"),
        ("https://h/b/x", "endpoint=https://"),
        ("b/x?endpoint=http://h", "neither a URL nor a path"),
        ("://x", "neither a URL nor a path"),
        ("file://runs/x", "three slashes"),
        ("file://~/x", "three slashes"),
        ("file://", "names no folder"),
        ("file:///", "names no folder"),
        ("file:///a?endpoint=x", "%3F"),
        ("file:///a#b", "%23"),
        ("file:///a%zz", "%25"),
        ("file:///a%", "%25"),
        ("file:///a%2fb", "encoded slash"),
        ("file:///a%00", "encoded slash or NUL"),
        ("file:///a%ff", "not UTF-8"),
        ("memory://", "a name of letters"),
        ("memory://a/b", "a name of letters"),
        ("memory://a?x=1", "a name of letters"),
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://b", "s3://b/runs/example"),
        ("s3://b/", "has no prefix"),
        ("s3://b?region=x", "has no prefix"),
        ("s3://b//x", "prefix is not usable"),
        ("s3://b/x//y", "prefix is not usable"),
        ("s3://b/../x", "prefix is not usable"),
        ("s3://b/%2e%2e/x", "prefix is not usable"),
        ("s3://h:9000/b/x", "endpoint=http://host:port"),
        ("s3://b b/x", "'b b' cannot be the name"),
        ("s3://b/x#y", "%23"),
        ("s3://b/x?endpoint_url=http://h", "did you mean endpoint"),
        ("s3://b/x?profile=me", "there are endpoint, region"),
        ("s3://b/x?region=a&region=b", "given twice"),
        ("s3://b/x?region", "no value"),
        ("s3://b/x?region=", "no value"),
        ("s3://b/x?region=a&", "unknown option ''"),
        ("s3://b/x?region=a b", "region must be a name"),
        ("s3://b/x?checksums=off", "when_supported or when_required"),
        ("s3://b/x?addressing=host", "auto or path or virtual"),
        (
            "s3://b/x?endpoint=localhost:9000",
            "endpoint must be like https://host or http://host:port, not ",
        ),
        (
            "s3://b/x?endpoint=http://",
            "endpoint must be like https://host or http://host:port, not ",
        ),
        (
            "s3://b/x?endpoint=http://h:port",
            "endpoint must be like https://host or http://host:port, not ",
        ),
        (
            "s3://b/x?endpoint=http://h:99999",
            "endpoint must be like https://host or http://host:port, not ",
        ),
        (
            "s3://b/x?endpoint=http://[::1",
            "endpoint must be like https://host or http://host:port, not ",
        ),
        (
            "s3://b/x?endpoint=http://h/%3Fx",
            "endpoint must be like https://host or http://host:port, not ",
        ),
    ],
)
def test_malformed(url: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as refused:
        gm.open_mailbox(url)
    assert advice in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@b/x",
        "s3://b/x?endpoint=http://key:hunter2@h",
        "ftp://key:hunter2@h/x",
        "file://key:hunter2@h/x",
        "b/x?endpoint=http://key:hunter2@h",
        "s3://key:hunter2@b/x?region",
        "s3://key:hunter2@b/x#y",
        "https://key:hunter2@h/b",
        "memory://key:hunter2@b",
    ],
)
def test_no_password_comes_back(url: str) -> None:
    with pytest.raises(ValueError) as refused:
        gm.open_mailbox(url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", [b"run", None, 3, gm.MemoryMailbox()])
def test_what_is_no_text(url: object) -> None:
    with pytest.raises(TypeError, match="must be a str or a path"):
        gm.open_mailbox(url)  # type: ignore[arg-type]
