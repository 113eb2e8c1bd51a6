"""What every error of S3, boto3 and the network under it means for a mailbox: one table.

An answer of the store is looked up by its code, then by its status; an error of the client by its
class, then by the classes above it. What is in no list is ``REFUSED``: it is reported at once, with
what the store said. Names, not classes, so that nothing has to be imported.
"""

from enum import Enum
from typing import Any

from gradientmail.errors import MailboxRefused, MailboxUnavailable


class Meaning(Enum):
    """What to do about an error."""

    MISSING = "there is no such object"
    EXISTS = "the condition did not hold: the object exists, or is another one now"
    CONFLICT = "another write to this key is under way; try again"
    EMPTY = "the object has no bytes in that range"
    DAMAGED = "the bytes that arrived are not those of the hash that came with them"
    UNAVAILABLE = "the store or the way to it is in trouble; try later"
    EXPIRED = "the credentials have expired or cannot be had now"
    CLOCK = "this machine's clock is wrong"
    UNSUPPORTED = "the store does not know this request, or a header of it"
    REFUSED = "the store will not do it, however often it is asked"


NAMES = {
    Meaning.MISSING: "NoSuchKey NoSuchVersion",
    Meaning.EXISTS: "PreconditionFailed",
    Meaning.CONFLICT: "ConditionalRequestConflict OperationAborted",
    Meaning.EMPTY: "InvalidRange",
    Meaning.DAMAGED: "BadDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch",
    Meaning.UNAVAILABLE: (
        "RequestTimeout RequestTimeoutException SlowDown SlowDownRead SlowDownWrite Throttling "
        "ThrottlingException ThrottledException RequestThrottled RequestThrottledException "
        "TooManyRequests TooManyRequestsException RequestLimitExceeded BandwidthLimitExceeded "
        "LimitExceededException ProvisionedThroughputExceededException PriorRequestNotComplete "
        "TransactionInProgressException InternalError InternalFailure InternalServerError "
        "ServiceUnavailable ServiceUnavailableException ServerBusy Busy BadGateway GatewayTimeout "
        "IncompleteBody NoSuchUpload InvalidPart TemporaryRedirect Redirect "
        "XMinioServerNotInitialized XMinioReadQuorum XMinioWriteQuorum ClientDisconnected"
    ),
    Meaning.EXPIRED: (
        "ExpiredToken ExpiredTokenException RequestExpired TokenRefreshRequired AuthFailureExpired"
    ),
    Meaning.CLOCK: "RequestTimeTooSkewed RequestInTheFuture",
    Meaning.UNSUPPORTED: (
        "NotImplemented MethodNotAllowed UnsupportedOperation XNotImplemented InvalidChecksum"
    ),
    Meaning.REFUSED: (
        "NoSuchBucket AccessDenied AllAccessDisabled AccountProblem Forbidden InvalidAccessKeyId "
        "SignatureDoesNotMatch InvalidToken InvalidSecurity NotSignedUp InvalidDigest "
        "AuthorizationHeaderMalformed PermanentRedirect IllegalLocationConstraintException "
        "InvalidBucketName InvalidRequest "
        "InvalidArgument EntityTooLarge EntityTooSmall KeyTooLongError MalformedXML "
        "MissingContentLength MissingContentMD5 QuotaExceeded InsufficientStorage StorageFull "
        "XMinioStorageFull InvalidObjectState InvalidStorageClass KMS.DisabledException"
    ),
}
"""The error codes of stores, by their meaning."""

CODES = {code: meaning for meaning, names in NAMES.items() for code in names.split()}
"""What a store's error code means."""

STATUSES = {
    304: Meaning.EXISTS,
    307: Meaning.UNAVAILABLE,
    404: Meaning.MISSING,
    405: Meaning.UNSUPPORTED,
    408: Meaning.UNAVAILABLE,
    409: Meaning.CONFLICT,
    412: Meaning.EXISTS,
    416: Meaning.EMPTY,
    423: Meaning.UNAVAILABLE,
    425: Meaning.UNAVAILABLE,
    429: Meaning.UNAVAILABLE,
    499: Meaning.UNAVAILABLE,
    501: Meaning.UNSUPPORTED,
    507: Meaning.REFUSED,
}
"""What a status means whose code is not in ``CODES``; another from 500 on is ``UNAVAILABLE``."""


def _all(names: str, meaning: Meaning) -> dict[str, Meaning]:
    return dict.fromkeys(names.split(), meaning)


CLASSES = {
    "ClientError": Meaning.REFUSED,  # one without code and status
    "BotoCoreError": Meaning.REFUSED,  # wrong arguments and configuration
    "UndefinedModelAttributeError": Meaning.REFUSED,
    "Abandoned": Meaning.UNAVAILABLE,
    # urllib3's: addresses that cannot be used.
    **_all(
        "LocationValueError LocationParseError URLSchemeUnknown ProxySchemeUnknown "
        "ProxySchemeUnsupported",
        Meaning.REFUSED,
    ),
    **_all(
        # botocore's: the way to the store, and answers cut short.
        "HTTPClientError ConnectionError EndpointConnectionError SSLError ConnectionClosedError "
        "ReadTimeoutError ConnectTimeoutError ProxyConnectionError ResponseStreamingError "
        "IncompleteReadError ChecksumError FlexibleChecksumError ResponseParserError "
        "CapacityNotAvailableError "
        # What may come through from urllib3 and below it.
        "HTTPError HTTPException OSError EOFError",
        Meaning.UNAVAILABLE,
    ),
    **_all(
        "NoCredentialsError PartialCredentialsError CredentialRetrievalError NoAuthTokenError "
        "TokenRetrievalError SSOError UnauthorizedSSOTokenError SSOTokenLoadError LoginError "
        "LoginRefreshRequired LoginTokenLoadError LoginAuthorizationCodeError "
        "MetadataRetrievalError RefreshWithMFAUnsupportedError",
        Meaning.EXPIRED,
    ),
}
"""What a class of errors means, unless a class closer to the error's own has a line too."""

ADVICE = {
    "NoSuchBucket": "there is no bucket of that name there: create it, or check the name, the "
    "endpoint and the region",
    "AccessDenied": "these credentials may not do that. A run needs s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:ListBucket on its prefix; without s3:ListBucket, S3 also says this of "
    "objects that do not exist",
    "InvalidAccessKeyId": "the store does not know this access key: check which credentials are "
    "in use, and that they are for this endpoint",
    "SignatureDoesNotMatch": "the secret key is not that of the access key, or a proxy changes the "
    "request: check the credentials and the endpoint",
    "AuthorizationHeaderMalformed": "the bucket is in another region: pass region=… as the store "
    "names it",
    "PermanentRedirect": "the bucket is elsewhere: pass the region=… or endpoint_url=… that it is "
    "in",
    "IllegalLocationConstraintException": "the bucket is in another region: pass region=…",
    "InvalidBucketName": "this store takes no bucket of such a name: check it",
    "EntityTooLarge": "the store takes no object of this size",
    "MissingContentLength": "a proxy on the way drops Content-Length: go round it",
    "QuotaExceeded": "the quota is used up: free space or raise it",
    "KeyTooLongError": "the store takes no key of this length: use a shorter prefix",
}
"""What to do about a ``REFUSED`` code."""

ADVICE_BY_STATUS = {
    301: "the bucket is elsewhere: pass the region=… or endpoint_url=… that it is in",
    400: "the store does not accept this request. If it is not AWS S3, pass "
    'request_checksums="when_required"; check region and endpoint, too',
    401: "the store wants other credentials: check them, and the endpoint",
    403: "these credentials may not do that: a run needs to get, put, delete and list objects "
    "under its prefix",
    404: "nothing is there: check bucket and endpoint",
    411: "a proxy on the way drops Content-Length: go round it",
    413: "the store, or a proxy on the way, takes no object of this size",
    507: "the store is full: free space there, or move the run",
}
"""The same by status, for codes without a line of their own."""

UNSUPPORTED_ADVICE = (
    'the store does not support this request: pass request_checksums="when_required" if it is not '
    "AWS S3; if that does not help, use another store or a newer version of it"
)
EXPIRED_ADVICE = (
    "no valid credentials: put them, or renew them, where boto3 looks for them (environment, "
    "~/.aws, instance role; for single sign-on: aws sso login)"
)
CLOCK_ADVICE = "this machine's clock is wrong: set it (the store's says {time})"
TLS_ADVICE = {
    "CERTIFICATE_VERIFY_FAILED": (
        "the server's certificate is not trusted here: check the endpoint, or name the authority's "
        "file in AWS_CA_BUNDLE"
    ),
    "WRONG_VERSION_NUMBER": "the server answers without TLS: write http:// for https:// there",
}
"""By what OpenSSL calls it: no TLS with this server, however often it is tried."""


def code_of(error: BaseException) -> tuple[str, int]:
    """Code and status of an answer of the store; empty and 0 for any other error."""
    answer: Any = getattr(error, "response", None)
    if not isinstance(answer, dict):
        return "", 0
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(answer.get("Error", {}).get("Code", "")), status


def meaning_of(error: BaseException) -> Meaning | None:
    """Look the error up; None when it comes from neither the store, nor boto3, nor the network."""
    code, status = code_of(error)
    if code or status:
        if code in CODES:
            return CODES[code]
        if status in STATUSES:
            return STATUSES[status]
        return Meaning.UNAVAILABLE if status >= 500 else Meaning.REFUSED
    names = [kind.__name__ for kind in type(error).__mro__]
    if "SSLError" in names and _tls_advice(error):
        return Meaning.REFUSED
    return next((CLASSES[name] for name in names if name in CLASSES), None)


def translate(error: Exception, doing: str, *, answered: bool) -> Exception:
    """The error to raise instead of ``error``, which came up while ``doing`` something.

    ``answered``: the store has accepted a request of this process before. Then credentials that
    ran out and a clock that jumped are waited for, as somebody may set them right while the run
    goes on; a process that has just begun is told at once. An error that is nobody's but this
    package's own stays what it is.
    """
    meaning = meaning_of(error)
    if meaning is None:
        return error
    said = f"{doing}: {_said(error)}"
    if meaning in (Meaning.EXPIRED, Meaning.CLOCK):
        advice = EXPIRED_ADVICE
        if meaning is Meaning.CLOCK:
            advice = CLOCK_ADVICE.format(time=_server_time(error))
        return (MailboxUnavailable if answered else MailboxRefused)(f"{said}; {advice}")
    if meaning in (Meaning.UNAVAILABLE, Meaning.CONFLICT, Meaning.DAMAGED):
        return MailboxUnavailable(said)
    return MailboxRefused(f"{said}; {_advice(error, meaning)}")


def _said(error: BaseException) -> str:
    code, status = code_of(error)
    if not code and not status:
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    answer: Any = getattr(error, "response", {})
    words = str(answer.get("Error", {}).get("Message", ""))[:300]
    return f"the store answered {status} {code}" + (f" ({words})" if words else "")


def _advice(error: BaseException, meaning: Meaning) -> str:
    code, status = code_of(error)
    if meaning is Meaning.UNSUPPORTED:
        return UNSUPPORTED_ADVICE
    if advice := _tls_advice(error):
        return advice
    if code in ADVICE:
        return ADVICE[code]
    if status in ADVICE_BY_STATUS:
        return ADVICE_BY_STATUS[status]
    return "check the arguments of S3Mailbox, and boto3's configuration on this machine"


def _tls_advice(error: BaseException) -> str:
    """What to do about an error of TLS that stays; empty for any other."""
    return next((advice for name, advice in TLS_ADVICE.items() if name in str(error)), "")


def _server_time(error: BaseException) -> str:
    answer: Any = getattr(error, "response", {})
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return answer.get("Error", {}).get("ServerTime") or headers.get("date") or "another time"
