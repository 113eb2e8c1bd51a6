"""A mailbox from one line of text, the same on every machine: ``open_mailbox``.

    s3://bucket/prefix?endpoint=https://…&region=…&checksums=…&addressing=…
    file:///absolute/path      or the path of a folder, absolute or relative, as it is
    memory://name              one store a process and name

Parsing is strict: what looks like a slip is an error that says what to write instead, because a
mailbox opened in the wrong place is a new, empty run. Nothing of a URL that may be a password
comes back in an error.
"""

import difflib
import os
import re
from dataclasses import dataclass
from typing import TypedDict, cast
from urllib.parse import unquote_to_bytes, urlsplit

from gradientmail.forking import lock_over_forks
from gradientmail.mailbox.base import Mailbox, check_key
from gradientmail.mailbox.filesystem import FilesystemMailbox
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.mailbox.s3_client import Addressing, Checksums, check_endpoint

CHOICES = {
    "checksums": ("when_supported", "when_required"),
    "addressing": ("auto", "path", "virtual"),
}
S3_OPTIONS = ("endpoint", "region", *CHOICES)
EXAMPLE = "s3://bucket/prefix, file:///folder, memory://name or the path of a folder"
OTHER_SCHEMES = {
    "gs": "Google Cloud Storage is reached by its S3 interface: "
    "s3://bucket/prefix?endpoint=https://storage.googleapis.com",
    "hf": "Hugging Face's buckets are reached by their S3 interface: "
    "s3://bucket/prefix?endpoint=https://… (docs/mailboxes.md says which)",
    "s3a": "write s3://",
    "s3n": "write s3://",
    "http": "an address of a server goes into the query: s3://bucket/prefix?endpoint=http://…",
    "https": "an address of a server goes into the query: s3://bucket/prefix?endpoint=https://…",
}


@dataclass(frozen=True, slots=True)
class S3Location:
    """What an ``s3://`` URL says."""

    bucket: str
    prefix: str
    endpoint: str | None = None
    region: str | None = None
    checksums: Checksums = "when_supported"
    addressing: Addressing = "auto"


class _Options(TypedDict, total=False):
    endpoint: str
    region: str
    checksums: Checksums
    addressing: Addressing


_memories: dict[str, MemoryMailbox] = {}
_memories_lock = lock_over_forks()


def open_mailbox(url: str | os.PathLike[str], *, create: bool = True) -> Mailbox:
    """The store at ``url``; the module's docstring has the forms.

    A path is taken as it is, relative to the current directory, with ``~`` and ``%`` unexpanded;
    parts of a URL may be percent-encoded. The options of ``s3://`` are those of ``S3Mailbox``:
    ``endpoint`` (``http://`` or ``https://``), ``region``, ``checksums`` (``when_supported`` or
    ``when_required``) and ``addressing`` (``auto``, ``path`` or ``virtual``). Credentials are
    found as boto3 finds them and have no place in a URL. ``create=False`` is for who only reads:
    a folder is not made, and one that is missing is ``FileNotFoundError``.

    Raises ``ValueError`` for a URL that is malformed or that names nothing, ``TypeError`` for
    what is no text, and what opening the store itself raises.
    """
    if isinstance(url, os.PathLike):
        path = os.fspath(url)
        if isinstance(path, str):
            return FilesystemMailbox(path, create=create)
    if not isinstance(url, str):
        raise TypeError(f"the URL of a mailbox must be a str or a path, not {type(url).__name__}")
    scheme, rest = _split_scheme(url)
    match scheme:
        case "":
            return FilesystemMailbox(_check_path(url), create=create)
        case "file":
            return FilesystemMailbox(parse_file_url(url), create=create)
        case "memory":
            return _memory(rest)
        case _:
            return _open_s3(parse_s3_url(url))


def _open_s3(location: S3Location) -> Mailbox:
    from gradientmail.mailbox.s3 import S3Mailbox

    return S3Mailbox(
        location.bucket,
        location.prefix,
        endpoint_url=location.endpoint,
        region=location.region,
        request_checksums=location.checksums,
        addressing=location.addressing,
    )


def _memory(name: str) -> MemoryMailbox:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(
            f"{_shown(f'memory://{name}')}: write memory:// and a name of letters, digits and . _ -"
        )
    with _memories_lock:
        return _memories.setdefault(name, MemoryMailbox())


def _split_scheme(url: str) -> tuple[str, str]:
    """The scheme, empty for a path, and what follows its ``://``."""
    if not url:
        raise ValueError(f"the URL of a mailbox is empty; write {EXAMPLE}")
    if re.search(r"[\x00-\x1f\x7f]", url) or url != url.strip():
        raise ValueError(f"{url!r} begins or ends with a space or contains control characters")
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):(/*)", url)
    if found is None or (not found[2] and found[1].lower() not in ("s3", "file", "memory")):
        return "", url
    scheme, rest = found[1].lower(), url[found.end(1) + 3 :]
    if scheme in OTHER_SCHEMES:
        raise ValueError(f"{scheme}:// is no kind of mailbox: {OTHER_SCHEMES[scheme]}")
    if scheme not in ("s3", "file", "memory"):
        raise ValueError(f"{scheme}: is no kind of mailbox; write {EXAMPLE}")
    if len(found[2]) < 2:
        raise ValueError(
            f"{scheme}:{found[2]} needs two slashes ({'/' * 3 if scheme == 'file' else '//'} "
            f"after the colon); write {EXAMPLE}"
        )
    return scheme, rest


def path_of(url: str) -> str | None:
    """The path of the folder that a URL or a path names, None for another kind of store.

    ``ValueError`` as ``open_mailbox`` has it.
    """
    scheme, _ = _split_scheme(url)
    if scheme == "file":
        return parse_file_url(url)
    return _check_path(url) if not scheme else None


def _check_path(path: str) -> str:
    """A plain path, as it is; ``ValueError`` for what is not one on this system."""
    if "://" in path:
        raise ValueError(f"{_shown(path)} is neither a URL nor a path; write {EXAMPLE}")
    if os.name != "nt" and (re.match(r"[A-Za-z]:([\\/]|$)", path) or "\\" in path):
        raise ValueError(
            f"{path!r} looks like a path of Windows; on this system parts are separated by / (for "
            "a folder whose name really has such characters, pass FilesystemMailbox(path))"
        )
    return path


def parse_file_url(url: str) -> str:
    """The absolute path that a ``file://`` URL names."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(
            f"{_shown(url)}: a file URL has three slashes and an absolute path, file:///folder; "
            "for a relative path, or one below ~, write the path alone"
        )
    if parts.query or "?" in url or parts.fragment or "#" in url:
        raise ValueError(f"{_shown(url)}: a file URL has no ? or #; write %3F and %23 in a path")
    path = _decoded(parts.path, url)
    if not path.strip("/"):
        raise ValueError(f"{_shown(url)} names no folder; write file:///folder")
    return path


def parse_s3_url(url: str) -> S3Location:
    """Bucket, prefix and options that an ``s3://`` URL names."""
    parts = urlsplit(url)
    if "#" in url:
        raise ValueError(f"{_shown(url)}: # begins a fragment, which has no meaning; write %23")
    if "@" in parts.netloc:
        raise ValueError(
            "credentials do not belong into the URL of a mailbox: boto3 finds them in its own "
            "files, in the environment or by the machine's role"
        )
    bucket = parts.netloc
    if not bucket:
        raise ValueError(f"{_shown(url)} names no bucket; write s3://bucket/prefix")
    if ":" in bucket:
        raise ValueError(
            f"{_shown(url)}: the first part is the name of a bucket; a server is named by the "
            "query: s3://bucket/prefix?endpoint=http://host:port"
        )
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", bucket):
        raise ValueError(f"{_shown(url)}: {bucket!r} cannot be the name of a bucket")
    prefix, options = _s3_prefix(parts.path, url), _s3_options(parts.query, url)
    return S3Location(
        bucket,
        prefix,
        endpoint=options.get("endpoint"),
        region=options.get("region"),
        checksums=options.get("checksums", "when_supported"),
        addressing=options.get("addressing", "auto"),
    )


def _s3_prefix(path: str, url: str) -> str:
    prefix = _decoded(path, url).removeprefix("/").removesuffix("/")
    if not prefix:
        raise ValueError(
            f"{_shown(url)} has no prefix; a run has one of its own: "
            f"s3://{urlsplit(url).netloc}/runs/example"
        )
    try:
        return check_key(prefix)
    except ValueError as error:
        raise ValueError(f"{_shown(url)}: the prefix is not usable: {error}") from None


def _s3_options(query: str, url: str) -> _Options:
    options: dict[str, str] = {}
    for piece in query.split("&") if query else ():
        name, equals, value = piece.partition("=")
        name, value = _decoded(name, url), _decoded(value, url, slashes=True)
        if name not in S3_OPTIONS:
            near = difflib.get_close_matches(name, S3_OPTIONS, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"unknown option {name!r} in the URL{hint}; there are {', '.join(S3_OPTIONS)}"
            )
        if name in options:
            raise ValueError(f"the option {name} is given twice in {_shown(url)}")
        if not equals or not value:
            raise ValueError(f"the option {name} has no value in {_shown(url)}")
        options[name] = _checked_option(name, value)
    return cast("_Options", options)


def _checked_option(name: str, value: str) -> str:
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(f"{name} must be {' or '.join(CHOICES[name])}, not {value!r}")
    if name == "endpoint":
        check_endpoint(value, "endpoint")
    if name == "region" and not re.fullmatch(r"[A-Za-z0-9-]+", value):
        raise ValueError(f"region must be a name like eu-central-1 or auto, not {value!r}")
    return value


def _decoded(text: str, url: str, *, slashes: bool = False) -> str:
    """``text`` with percent-encoding undone; ``ValueError`` where it is broken."""
    if re.search(r"%(?![0-9A-Fa-f]{2})", text):
        raise ValueError(f"{_shown(url)}: % begins a code of two hex digits; write % as %25")
    if not slashes and re.search(r"%2[fF]|%00", text):
        raise ValueError(f"{_shown(url)}: an encoded slash or NUL cannot be part of a name")
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{_shown(url)}: the percent-encoded bytes are not UTF-8") from None


def _shown(url: str) -> str:
    """``url`` for an error message, without what stands before an ``@``, and not endless."""
    shown = re.sub(r"//[^/]*@", "//…@", url)
    return repr(shown if len(shown) <= 120 else f"{shown[:120]}…")
