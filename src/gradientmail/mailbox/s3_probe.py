"""Finds out whether a bucket can be a mailbox, and tidies what dead processes left in it."""

import hashlib
import secrets
from contextlib import suppress
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from gradientmail.errors import GradientMailError, MailboxRefused
from gradientmail.mailbox.s3_errors import Meaning, code_of, meaning_of
from gradientmail.mailbox.s3_requests import Requests

OLD = timedelta(days=1)
"""Age, by the store's clock, after which an unfinished upload is taken for abandoned."""

NEEDED = (
    "two nodes that create one object at the same moment would both believe that it is theirs, and "
    "work would be lost. Use a store that honours conditional writes (AWS S3, Cloudflare R2, MinIO "
    "or SeaweedFS in a current version), or a shared folder with FilesystemMailbox; to take the "
    "risk, pass S3Mailbox(…, allow_overwrites=True)"
)


def broken_condition(requests: Requests, folder: str) -> str | None:
    """Why no object can be created once only, in words; None when it can.

    Writes one in ``folder``, writes it again, expects to be refused, removes it.
    """
    name = f"{folder}create-once-{secrets.token_hex(8)}"
    try:
        first = requests.put(name, b"1", sha256=_ONE)
        second = requests.put(name, b"2", sha256=_TWO)
    except MailboxRefused as error:
        cause = error.__cause__
        if cause is None or not _is_about_the_condition(cause):
            raise
        return f"{requests.where} does not take If-None-Match ({error}), so that {NEEDED}"
    finally:
        with suppress(GradientMailError):
            requests.delete_one(name)
    if not first:
        return f"{requests.where} says that {name!r}, drawn at random, exists already; {NEEDED}"
    if second:
        return f"{requests.where} ignores If-None-Match: it made one object twice. So {NEEDED}"
    return None


def _is_about_the_condition(error: BaseException) -> bool:
    code, _ = code_of(error)
    return meaning_of(error) is Meaning.UNSUPPORTED or code in ("InvalidArgument", "InvalidRequest")


def tidy(requests: Requests, base: str, folder: str) -> None:
    """Remove what killed processes left: unfinished uploads below ``base``, files in ``folder``.

    They are billed and never seen. Only old ones, by the store's clock; and only if the store
    can list them and these credentials may.
    """
    with suppress(GradientMailError, KeyError, TypeError, ValueError):
        answer = requests.call("tidying", "list_multipart_uploads", Prefix=base)
        for one in _old(answer, "Uploads", "Initiated"):
            requests.abort(one["Key"], one["UploadId"])
    with suppress(GradientMailError, KeyError, TypeError, ValueError):
        answer = requests.call("tidying", "list_objects_v2", Prefix=folder)
        for one in _old(answer, "Contents", "LastModified"):
            requests.delete_one(one["Key"])


def _old(answer: Any, what: str, since: str) -> list[Any]:
    now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    return [one for one in answer.get(what, ()) if now - one[since] > OLD]


_ONE, _TWO = (hashlib.sha256(data).digest() for data in (b"1", b"2"))
