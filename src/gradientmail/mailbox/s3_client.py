"""The boto3 client behind ``S3Mailbox``: the only file that names boto3 or botocore."""

import base64
import hashlib
import re
from contextlib import suppress
from functools import cache
from typing import Any, Literal
from urllib.parse import urlsplit

from gradientmail.errors import MissingExtra

CONNECT_SECONDS = 15.0
"""Also for each chunk that is sent over a new connection."""
READ_SECONDS = 30.0
"""For the next bytes of an answer. A connection that is silent for longer is given up."""

type Addressing = Literal["auto", "path", "virtual"]
type Checksums = Literal["when_supported", "when_required"]

SIGNATURE = "gradientmail-s3v4"


def check_endpoint(value: str, name: str) -> str:
    """An address of a server, given as ``name``; ``ValueError`` when it is none.

    It is shown in logs, so it may have no credentials in it.
    """
    if "@" in value:
        raise ValueError(f"credentials do not belong into {name}; boto3 finds them itself")
    with suppress(ValueError):  # an address or a port that is none
        parts = urlsplit(value)
        is_whole = bool(parts.hostname) and parts.port != 0 and not re.search(r"[?#\s]", value)
        if parts.scheme in ("http", "https") and is_whole:
            return value
    raise ValueError(f"{name} must be like https://host or http://host:port, not {value!r}")


def require_boto3() -> None:
    """Raise ``MissingExtra`` unless boto3 can be imported."""
    try:
        import boto3  # noqa: F401
    except ImportError:
        raise MissingExtra("s3", "boto3") from None


def make_client(
    *,
    endpoint_url: str | None,
    region: str | None,
    connections: int,
    addressing: Addressing,
    checksums: Checksums,
) -> Any:
    """A client with credentials from boto3's default chain, looked up now. Safe from any thread.

    It repeats nothing by itself: who calls it knows better, and ``RetryingMailbox`` tells the user.
    """
    import boto3
    import botocore.auth
    import botocore.session
    from botocore.config import Config

    botocore.auth.AUTH_TYPE_MAPS.setdefault(SIGNATURE, _signature())
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader())
    client = boto3.session.Session(botocore_session=session).client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=region,
        config=Config(
            max_pool_connections=connections,
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            tcp_keepalive=True,
            retries={"total_max_attempts": 1, "mode": "standard"},
            request_checksum_calculation=checksums,
            response_checksum_validation="when_required",  # the reader checks the sha256
            s3={"addressing_style": addressing},
            user_agent_extra="gradientmail",
        ),
    )
    events = client.meta.events
    for operation in ("PutObject", "UploadPart"):
        events.register(f"choose-signer.s3.{operation}", _choose)
    # Waiting for "100 Continue" costs a round trip, and a second where it never comes. Small bodies
    # are sent at once; so are parts, as the upload's creation has shown that they are welcome.
    events.register_last("before-call.s3.PutObject", _expect_if_large)
    events.register_last("before-call.s3.UploadPart", _expect_nothing)
    if checksums == "when_required":
        events.register_last("before-call.s3.DeleteObjects", _sum_by_md5)
    return client


@cache
def _loader() -> Any:
    """What reads the description of S3, once a process: clients are made again at times."""
    from botocore.loaders import create_loader

    return create_loader()


def _signature() -> type[Any]:
    """The signature of S3, for bodies that know their own hash (``Body.sha256``)."""
    from botocore.auth import UNSIGNED_PAYLOAD, S3SigV4Auth

    class KnownHash(S3SigV4Auth):
        def payload(self, request: Any) -> str:
            """The hash that the store is to check, or word that it shall not."""
            body = request.body
            if hasattr(body, "sha256"):
                return body.sha256 or UNSIGNED_PAYLOAD
            return super().payload(request)

    return KnownHash


def _choose(signature_version: str, **_: Any) -> str | None:
    return SIGNATURE if signature_version in ("v4", "s3v4") else None


def _expect_if_large(params: Any, **_: Any) -> None:
    if not hasattr(params["body"], "sha256"):
        params["headers"].pop("Expect", None)


def _expect_nothing(params: Any, **_: Any) -> None:
    params["headers"].pop("Expect", None)


def _sum_by_md5(params: Any, **_: Any) -> None:
    """Deleting several objects needs a checksum; the one that every store knows is MD5."""
    params["context"].pop("checksum", None)
    for name in [name for name in params["headers"] if name.lower().startswith("x-amz-checksum")]:
        del params["headers"][name]
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
