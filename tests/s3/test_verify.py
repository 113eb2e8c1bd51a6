"""``gradientmail verify`` over a bucket: it reads only."""

import json

import pytest
from tests.exchange.wire import recorded
from tests.s3 import servers

from gradientmail.commands import main


def test_a_recorded_run_in_a_bucket_holds_and_nothing_is_written(
    moto: str, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    client = servers.client(moto)
    objects = recorded("bf16-f4-zstd", "**/*.*")
    for key, data in objects.items():
        client.put_object(Bucket="tests", Key=f"{prefix}/{key}", Body=data)
    url = f"s3://tests/{prefix}?endpoint={moto}&region=us-east-1"
    assert main(["verify", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["objects"] == len(objects)
    assert found["recomputed"] == found["rounds"] > 4
    listed = client.list_objects_v2(Bucket="tests", Prefix=f"{prefix}/")["Contents"]
    assert {row["Key"].removeprefix(f"{prefix}/") for row in listed} == objects.keys()
