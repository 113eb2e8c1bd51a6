"""The doctor and URLs over real S3 servers."""

import json

import pytest
from tests.s3 import servers
from tests.s3.conftest import BUCKET

import gradientmail as gm
from gradientmail.commands import checks, main

SMALL = ["--large", "33", "--samples", "3"]


@pytest.mark.parametrize(
    # moto takes its time for many keys. SeaweedFS has who loses a race wait for seconds; the
    # contract suite races 32 there. Each store is tried with much of what is quick for it.
    ("server", "keys", "races"),
    [("seaweedfs", 1010, 1), ("moto", 110, checks.RACES)],
)
def test_a_server_is_fit_and_left_as_it_was(
    server: str,
    keys: int,
    races: int,
    prefix: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = request.getfixturevalue(server)
    monkeypatch.setattr(checks, "RACES", races)
    url = f"s3://{BUCKET}/{prefix}/deep?endpoint={endpoint}&region=us-east-1&addressing=path"
    assert main(["doctor", url, "--json", *SMALL, "--keys", str(keys)]) == 0
    told = json.loads(capsys.readouterr().out)
    states = {finding["check"]: finding["state"] for finding in told["findings"]}
    details = [finding["detail"] for finding in told["findings"]]
    assert f"{races} races of 16, one winner each" in details
    assert f"{keys} keys listed and deleted" in details
    assert set(states.values()) == {"ok"}
    assert {"create once", "clock", "own listing", "large object"} <= set(states)
    left = servers.client(endpoint).list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    # What the mailbox itself tries out when it is first written to is swept, too.
    assert [one["Key"] for one in left.get("Contents", ())] == []
    box = gm.open_mailbox(url)
    assert isinstance(box, gm.S3Mailbox)
    assert (box.bucket, box.prefix, box.endpoint_url) == (BUCKET, f"{prefix}/deep", endpoint)


def test_what_is_wrong_is_said(moto: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"s3://no-such-bucket/x?endpoint={moto}&region=us-east-1"
    assert main(["doctor", url, *SMALL]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("reachable  fault  ")
    assert "no-such-bucket" in shown
    assert shown.endswith("\nThis store cannot be used from here.\n")


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    url = "s3://b/x?endpoint=http://127.0.0.1:9&region=us-east-1"
    assert main(["doctor", url, "--seconds", "1"]) == 1
    shown = capsys.readouterr().out
    assert "no usable answer" in shown
    assert "127.0.0.1:9" in shown
