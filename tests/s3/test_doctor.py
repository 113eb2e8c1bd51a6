"""The doctor and URLs over real S3 servers."""

import json

import pytest
from tests.s3 import servers
from tests.s3.conftest import BUCKET

import gradientmail as gm
from gradientmail.commands import main

SMALL = ["--large", "33", "--keys", "1010", "--samples", "3"]


def test_a_server_is_fit_and_left_as_it_was(
    endpoint: str, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{BUCKET}/{prefix}/deep?endpoint={endpoint}&region=us-east-1&addressing=path"
    assert main(["doctor", url, "--json", *SMALL]) == 0
    told = json.loads(capsys.readouterr().out)
    states = {finding["check"]: finding["state"] for finding in told["findings"]}
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
    assert shown.endswith("\nThis store cannot be used.\n")


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    url = "s3://b/x?endpoint=http://127.0.0.1:9&region=us-east-1"
    assert main(["doctor", url, "--seconds", "1"]) == 1
    shown = capsys.readouterr().out
    assert "no answer" in shown
    assert "127.0.0.1:9" in shown
