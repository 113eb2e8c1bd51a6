"""What an answer to a GET carries, by its own word: which bytes of how many."""

import re
from dataclasses import dataclass
from typing import Any

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,16})-([0-9]{1,16})/([0-9]{1,16})")


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes ``start`` to ``stop`` of an object that has ``total``, still to be read."""

    body: Any
    start: int
    stop: int
    total: int
    etag: str | None


def content_of(answer: Any) -> Content | None:
    """What an answer says that it carries; None when it does not, or contradicts itself."""
    length, told = answer.get("ContentLength"), answer.get("ContentRange")
    body, etag = answer["Body"], answer.get("ETag")
    if told is None or length == 0:
        whole = length is not None and (length == 0 or _status(answer) != 206)
        return Content(body, 0, length, length, etag) if whole else None
    match = _CONTENT_RANGE.fullmatch(told)
    if match is None:
        return None
    start, last, total = map(int, match.groups())
    if not start <= last < total or length not in (None, last + 1 - start):
        return None
    return Content(body, start, last + 1, total, etag)


def _status(answer: Any) -> int:
    return answer["ResponseMetadata"]["HTTPStatusCode"]
