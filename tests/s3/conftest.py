"""The servers, one of each a test process, and credentials for them."""

from collections.abc import Generator
from itertools import count

import pytest
from tests.s3 import servers

BUCKET = "tests"
_prefixes = count()


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The endpoint of a SeaweedFS with the bucket ``tests``."""
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as endpoint:
        servers.make_bucket(endpoint, BUCKET)
        yield endpoint


@pytest.fixture(scope="session")
def moto() -> Generator[str]:
    """The endpoint of a moto server with the bucket ``tests``."""
    with servers.moto() as endpoint:
        servers.make_bucket(endpoint, BUCKET)
        yield endpoint


@pytest.fixture(params=["seaweedfs", "moto"])
def endpoint(request: pytest.FixtureRequest) -> str:
    """The endpoint of each server."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def prefix() -> str:
    """One that nothing is under."""
    return f"run-{next(_prefixes)}"


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What boto3 finds, and nothing of the machine's own."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
