"""One request to S3 at a time, blocking: asked, answered, its errors translated."""

import base64
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from gradientmail.errors import MailboxRefused, MailboxUnavailable
from gradientmail.mailbox.base import Abandoned
from gradientmail.mailbox.s3_answers import Content, content_of
from gradientmail.mailbox.s3_client import Addressing, Checksums, make_client
from gradientmail.mailbox.s3_errors import CODES, Meaning, meaning_of, translate
from gradientmail.mailbox.s3_parts import Body

PAUSES_SECONDS = (0.2, 0.4)
"""After a try of a part, a range, a write in conflict, what is left of a deletion; jittered."""

FILL_BYTES = 2**18
"""How much is taken from a connection at a time."""


class Damaged(MailboxUnavailable):
    """The store got other bytes than the request's hash is of, and made no object."""


class Requests:
    """What can be asked of one bucket. Blocking; safe from any thread.

    Raises ``MailboxUnavailable`` and ``MailboxRefused``, by the table in ``s3_errors``. What is
    an answer rather than an error comes back as a value.
    """

    def __init__(
        self,
        bucket: str,
        *,
        endpoint_url: str | None,
        region: str | None,
        connections: int,
        addressing: Addressing,
        checksums: Checksums,
    ) -> None:
        """Connect to nothing yet."""
        self.bucket = bucket
        self.where = f"bucket {bucket!r}" + (f" at {endpoint_url}" if endpoint_url else "")
        self._checksums = checksums == "when_supported"
        self._options: dict[str, Any] = {
            "endpoint_url": endpoint_url,
            "region": region,
            "connections": connections,
            "addressing": addressing,
            "checksums": checksums,
        }
        self._lock = threading.Lock()
        self._client: Any = None
        self._answered = False
        self._random = Random()

    # Objects

    def put(self, name: str, body: bytes | Body, *, sha256: bytes, condition: bool = True) -> bool:
        """Create an object in one request; False when it exists, which a second one confirms.

        ``sha256`` is checked by the store. ``Damaged`` when it is not that of what arrived.
        """
        params: dict[str, Any] = {"Key": name, "Body": body}
        if condition:
            params["IfNoneMatch"] = "*"
        if self._checksums:
            params["ChecksumSHA256"] = _base64(sha256)
        expected = (Meaning.EXISTS, Meaning.CONFLICT, Meaning.DAMAGED)
        for pause in (*PAUSES_SECONDS, 0.0):
            if isinstance(body, Body):
                body.seek(0)
            answer = self.call(f"putting {name!r}", "put_object", expected, **params)
            if answer is Meaning.EXISTS and self.exists(name):
                return False
            if answer is Meaning.DAMAGED:
                raise Damaged(
                    f"putting {name!r} in {self.where}: the bytes that arrived do not hash to the "
                    "sha256 that was sent with them"
                )
            if answer not in (Meaning.CONFLICT, Meaning.EXISTS):
                return True
            self._sleep(pause)  # in conflict, or deleted between the two requests
        if answer is Meaning.EXISTS:
            raise self._in_the_way(name)
        raise MailboxUnavailable(
            f"putting {name!r} in {self.where}: again and again, others wrote this key at "
            "the same moment (409); try again"
        )

    def _in_the_way(self, name: str) -> MailboxRefused:
        """The error for an object that the store will not create, and has not got."""
        return MailboxRefused(
            f"putting {name!r} in {self.where}: the store says that it exists and has no such "
            f"object. Stores that keep folders do so when there is a folder of that name: remove "
            f"what begins with {name + '/'!r}"
        )

    def exists(self, name: str) -> bool:
        """Whether there is such an object.

        Its first byte is asked for: the answer to a HEAD has no body, so that no error in it could
        be told from another. Credentials that have expired are no more than a 400 there.
        """
        found = self.open(name, 1)
        if isinstance(found, Content):
            if found.stop > 1:  # a store that knows no ranges sends all of it
                found.body.close()
            else:
                self.fill(name, found, memoryview(bytearray(found.stop)))
        return found is not Meaning.MISSING

    def open(self, name: str, stop: int) -> Content | Meaning:
        """The first ``stop`` bytes of an object, to be read by ``fill``; or all of it.

        ``MISSING``, or ``EMPTY`` for an object of no bytes.
        """
        return self._open(name, 0, stop, (Meaning.MISSING, Meaning.EMPTY))

    def _open(
        self, name: str, start: int, stop: int, expected: Sequence[Meaning], **params: Any
    ) -> Content | Meaning:
        """Ask for a range, and see that it is the one that comes, or all of the object."""
        span = f"bytes={start}-{stop - 1}"
        answer = self.call(
            f"getting {name!r}", "get_object", expected, Key=name, Range=span, **params
        )
        if isinstance(answer, Meaning):
            return answer
        found = content_of(answer)
        if found is not None and found.start == start and found.stop >= min(stop, found.total):
            return found
        answer["Body"].close()
        came = answer.get("ContentRange") or f"of {answer.get('ContentLength', 'unknown')} bytes"
        raise MailboxUnavailable(
            f"getting {name!r} from {self.where}: {span} was asked for, the answer is {came}. A "
            "proxy or cache that does not pass ranges on as they are must not be on the way"
        )

    def fill(self, name: str, found: Content, view: memoryview) -> None:
        """Read the body of an answer, which must be as long as ``view``, into it."""
        body, done = found.body, 0
        try:
            while done < view.nbytes:
                count = body.readinto(view[done : done + FILL_BYTES])
                if not count:
                    break
                done += count
        except Exception as error:
            raise self._translated(f"getting {name!r}", error) from error
        finally:
            if done < view.nbytes:
                body.close()
        if done < view.nbytes:
            raise MailboxUnavailable(
                f"getting {name!r} from {self.where}: {done} of {view.nbytes} bytes came"
            )

    def get_range(
        self, name: str, view: memoryview, start: int, *, total: int, etag: str | None
    ) -> bool:
        """Read a part of an object into ``view``; False when it is another object by now."""
        params: dict[str, Any] = {"IfMatch": etag} if etag else {}
        expected = (Meaning.MISSING, Meaning.EXISTS, Meaning.EMPTY)

        def attempt() -> bool:
            found = self._open(name, start, start + view.nbytes, expected, **params)
            if isinstance(found, Meaning):
                return False
            if (found.total, found.stop) != (total, start + view.nbytes):
                found.body.close()
                return False
            self.fill(name, found, view)
            return True

        return self._persist(attempt)

    # Objects in parts

    def begin(self, name: str) -> str:
        """Begin an upload in parts; its id."""
        params = {"ChecksumAlgorithm": "CRC32"} if self._checksums else {}
        answer = self.call(f"putting {name!r}", "create_multipart_upload", Key=name, **params)
        return str(answer["UploadId"])

    def put_part(
        self, name: str, upload: str, number: int, view: memoryview, abandoned: threading.Event
    ) -> dict[str, Any]:
        """Send one part; what ``complete`` needs of it."""
        body = Body(view, abandoned, None)
        params: dict[str, Any] = {"Key": name, "UploadId": upload, "PartNumber": number}
        if self._checksums:
            params["ChecksumCRC32"] = _base64(zlib.crc32(view).to_bytes(4))

        def attempt() -> Any:
            if abandoned.is_set():
                raise Abandoned
            body.seek(0)
            return self.call(f"putting a part of {name!r}", "upload_part", Body=body, **params)

        try:
            answer = self._persist(attempt)
        finally:
            body.release()
        part = {"PartNumber": number, "ETag": answer["ETag"]}
        if self._checksums:
            part["ChecksumCRC32"] = params["ChecksumCRC32"]
        return part

    def complete(
        self, name: str, upload: str, parts: Sequence[dict[str, Any]], *, condition: bool
    ) -> bool:
        """Make the object of its parts; False when it exists and ``condition`` forbids it.

        A second request confirms that it does.
        """
        params: dict[str, Any] = {"IfNoneMatch": "*"} if condition else {}
        for pause in (*PAUSES_SECONDS, 0.0):
            answer = self.call(
                f"putting {name!r}",
                "complete_multipart_upload",
                (Meaning.EXISTS,),
                Key=name,
                UploadId=upload,
                MultipartUpload={"Parts": list(parts)},
                **params,
            )
            if answer is not Meaning.EXISTS:
                return True
            if self.exists(name):
                return False
            self._sleep(pause)  # deleted between the two requests
        raise self._in_the_way(name)

    def abort(self, name: str, upload: str) -> None:
        """Have the store forget the parts of an upload, if it can be reached."""
        with suppress(MailboxUnavailable, MailboxRefused):
            self.call(f"giving up {name!r}", "abort_multipart_upload", Key=name, UploadId=upload)

    # Listing and deleting

    def list_names(self, prefix: str, start_after: str) -> list[str]:
        """The names below ``prefix``, as the store orders them; cut at ``start_after`` or not."""
        names: list[str] = []
        params: dict[str, Any] = {"StartAfter": start_after} if start_after else {}
        seen: set[str] = set()
        while True:
            answer = self.call(f"listing {prefix!r}", "list_objects_v2", Prefix=prefix, **params)
            names.extend(one["Key"] for one in answer.get("Contents", ()))
            token = answer.get("NextContinuationToken")
            if not answer.get("IsTruncated"):
                return names
            if not token or token in seen:
                raise MailboxUnavailable(
                    f"listing {prefix!r} of {self.where}: the store says that there is more, and "
                    "not where it goes on"
                )
            seen.add(token)
            params["ContinuationToken"] = token

    def delete_one(self, name: str) -> None:
        """Remove an object."""
        self.call(f"deleting {name!r}", "delete_object", (Meaning.MISSING,), Key=name)

    def delete_batch(self, names: Sequence[str]) -> bool:
        """Remove up to 1,000 objects in one request; False when the store does not know how to."""
        left = list(names)
        for pause in (*PAUSES_SECONDS, 0.0):
            answer = self.call(
                f"deleting {len(left)} objects",
                "delete_objects",
                (Meaning.UNSUPPORTED,),
                Delete={"Objects": [{"Key": name} for name in left], "Quiet": True},
            )
            if answer is Meaning.UNSUPPORTED:
                return False
            left = self._not_deleted(answer.get("Errors", ()))
            if not left:
                return True
            self._sleep(pause)
        raise MailboxUnavailable(
            f"deleting in {self.where}: {len(left)} objects are still there, {left[0]!r} for one"
        )

    def _not_deleted(self, errors: Sequence[dict[str, str]]) -> list[str]:
        """The names to try again; raises for one that the store refuses to delete."""
        again: list[str] = []
        for error in errors:
            name, code = error.get("Key", ""), error.get("Code", "")
            meaning = CODES.get(code, Meaning.REFUSED)
            if meaning in (Meaning.UNAVAILABLE, Meaning.CONFLICT):
                again.append(name)
            elif meaning is not Meaning.MISSING:
                raise MailboxRefused(
                    f"deleting {name!r} in {self.where}: {code} ({error.get('Message', '')}); "
                    "allow these credentials s3:DeleteObject on it, and see that it is not locked"
                )
        return again

    # The request itself

    def call(
        self, doing: str, operation: str, expected: Sequence[Meaning] = (), /, **params: Any
    ) -> Any:
        """The answer of the store, or what an error means if that is ``expected``.

        With credentials that have expired it looks for new ones, and tries once more.
        """
        for last in (False, True):
            client = None
            try:
                client = self.client()
                answer = getattr(client, operation)(Bucket=self.bucket, **params)
            except Exception as error:
                meaning = meaning_of(error)
                if meaning in expected:
                    self._answered = True
                    return meaning
                if last or meaning is not Meaning.EXPIRED:
                    raise self._translated(doing, error) from error
                self._renew(client)
                if isinstance(params.get("Body"), Body):
                    params["Body"].seek(0)
            else:
                self._answered = True
                return answer
        raise AssertionError("unreachable")

    def client(self) -> Any:
        """The boto3 client, made when it is first needed."""
        with self._lock:
            if self._client is None:
                self._client = make_client(**self._options)
            return self._client

    def _renew(self, client: Any) -> None:
        """Have the next request look for credentials again."""
        with self._lock:
            if self._client is client:
                self._client = None

    def _translated(self, doing: str, error: Exception) -> Exception:
        return translate(error, f"{doing} in {self.where}", answered=self._answered)

    def _persist[T](self, attempt: Callable[[], T]) -> T:
        """Try a part of something large a few times before all of it is given up."""
        for pause in PAUSES_SECONDS:
            try:
                return attempt()
            except MailboxUnavailable:
                self._sleep(pause)
        return attempt()

    def _sleep(self, pause: float) -> None:
        time.sleep(pause * self._random.uniform(0.5, 1.0))


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
