"""The table of foreign errors is total, and its words say what to do."""

import inspect
from typing import Any

import botocore.exceptions
import botocore.parsers
import pytest
import urllib3.exceptions

from gradientmail.errors import MailboxRefused, MailboxUnavailable
from gradientmail.mailbox.s3_errors import CLASSES, CODES, NAMES, Meaning, meaning_of, translate

# Wrong arguments, wrong configuration, and what only other services' clients raise: an error of
# such a class is reported at once. A new class of botocore's belongs here or into the table.
REPORTED = {
    "AliasConflictParameterError",
    "ApiVersionNotFoundError",
    "AwsChunkedWrapperError",
    "BaseEndpointResolverError",
    "BotoCoreError",
    "ClientError",
    "ConfigNotFound",
    "ConfigParseError",
    "DataNotFoundError",
    "EndpointProviderError",
    "EndpointResolutionError",
    "EndpointVariantError",
    "EventStreamError",
    "InfiniteLoopConfigError",
    "InvalidChecksumConfigError",
    "InvalidConfigError",
    "InvalidDNSNameError",
    "InvalidDefaultsMode",
    "InvalidEndpointConfigurationError",
    "InvalidEndpointDiscoveryConfigurationError",
    "InvalidExpressionError",
    "InvalidHostLabelError",
    "InvalidIMDSEndpointError",
    "InvalidIMDSEndpointModeError",
    "InvalidMaxRetryAttemptsError",
    "InvalidProxiesConfigError",
    "InvalidRegionError",
    "InvalidRetryConfigurationError",
    "InvalidRetryModeError",
    "InvalidS3AddressingStyleError",
    "InvalidS3UsEast1RegionalEndpointConfigError",
    "InvalidSTSRegionalEndpointsConfigError",
    "MD5UnavailableError",
    "MissingDependencyException",
    "MissingParametersError",
    "MissingServiceIdError",
    "NoRegionError",
    "OperationNotPageableError",
    "PaginationError",
    "ParamValidationError",
    "ProfileNotFound",
    "RangeError",
    "ServiceNotInRegionError",
    "StubAssertionError",
    "StubResponseError",
    "UnStubbedResponseError",
    "UndefinedModelAttributeError",
    "UnknownClientMethodError",
    "UnknownCredentialError",
    "UnknownEndpointError",
    "UnknownEndpointResolutionBuiltInName",
    "UnknownFIPSEndpointError",
    "UnknownKeyError",
    "UnknownParameterError",
    "UnknownRegionError",
    "UnknownServiceError",
    "UnknownServiceStyle",
    "UnknownSignatureVersionError",
    "UnknownTokenProviderError",
    "UnseekableStreamError",
    "UnsupportedOutpostResourceError",
    "UnsupportedS3AccesspointConfigurationError",
    "UnsupportedS3ArnError",
    "UnsupportedS3ConfigurationError",
    "UnsupportedS3ControlArnError",
    "UnsupportedS3ControlConfigurationError",
    "UnsupportedServiceProtocolsError",
    "UnsupportedSignatureVersionError",
    "ValidationError",
    "WaiterConfigError",
    "WaiterError",
}
NOT_CONNECTED = {
    "LocationParseError",
    "LocationValueError",
    "ProxySchemeUnknown",
    "ProxySchemeUnsupported",
    "URLSchemeUnknown",
}
"""urllib3's words for addresses that cannot be used."""


def classes_of(module: Any) -> list[type[BaseException]]:
    """The exceptions of a module, without its warnings."""
    found = [one for _, one in inspect.getmembers(module, inspect.isclass)]
    return [
        one
        for one in found
        if issubclass(one, Exception)
        and not issubclass(one, Warning)
        and one.__module__ == module.__name__
    ]


def made(kind: type[BaseException]) -> BaseException:
    """An instance, however its constructor looks."""
    return kind.__new__(kind)


@pytest.mark.parametrize("kind", classes_of(botocore.exceptions), ids=lambda kind: kind.__name__)
def test_every_class_of_botocore_has_its_meaning(kind: type[BaseException]) -> None:
    lined = [base.__name__ for base in kind.__mro__ if base.__name__ in CLASSES]
    meaning = meaning_of(made(kind))
    assert lined, f"{kind.__name__} has no line in the table"
    assert (meaning is Meaning.REFUSED) == (kind.__name__ in REPORTED)


@pytest.mark.parametrize("kind", classes_of(urllib3.exceptions), ids=lambda kind: kind.__name__)
def test_what_comes_through_from_urllib3_is_transient(kind: type[BaseException]) -> None:
    known = Meaning.REFUSED if kind.__name__ in NOT_CONNECTED else Meaning.UNAVAILABLE
    assert (meaning_of(made(kind)) is known) is True


@pytest.mark.parametrize(
    "error",
    [TimeoutError(), ConnectionResetError(), BrokenPipeError(), EOFError(), OSError(5, "EIO")],
    ids=repr,
)
def test_errors_of_the_network_are_transient(error: Exception) -> None:
    assert isinstance(translate(error, "getting 'a'", answered=True), MailboxUnavailable)


@pytest.mark.parametrize("error", [TypeError("x"), ValueError("x"), MemoryError(), KeyError(1)])
def test_own_errors_stay_what_they_are(error: Exception) -> None:
    assert translate(error, "getting 'a'", answered=True) is error


def answer(status: int, code: str, **headers: str) -> botocore.exceptions.ClientError:
    parsed: Any = {
        "Error": {"Code": code, "Message": "words"},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
    }
    return botocore.exceptions.ClientError(parsed, "PutObject")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        *[(status, str(status)) for status in (408, 423, 425, 429, 499)],
        *[(status, str(status)) for status in (500, 502, 503, 504, 509, 520, 524, 599)],
        (503, "SlowDown"),
        (200, "SlowDown"),
        (400, "RequestTimeout"),
        (403, "RequestThrottled"),
        (409, "OperationAborted"),
        (409, "ConditionalRequestConflict"),
        (404, "NoSuchUpload"),
        (400, "BadDigest"),
        (500, "InternalError"),
    ],
)
def test_transient_answers(status: int, code: str) -> None:
    error = translate(answer(status, code), "putting 'a'", answered=False)
    assert type(error) is MailboxUnavailable
    assert str(status) in str(error)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "NoSuchBucket", "create it"),
        (403, "AccessDenied", "s3:ListBucket"),
        (403, "403", "may not"),
        (403, "SignatureDoesNotMatch", "secret key"),
        (403, "InvalidAccessKeyId", "access key"),
        (400, "AuthorizationHeaderMalformed", "region="),
        (301, "PermanentRedirect", "region="),
        (301, "301", "endpoint_url="),
        (501, "NotImplemented", "when_required"),
        (400, "SomethingNew", "when_required"),
        (400, "EntityTooLarge", "size"),
        (507, "InsufficientStorage", "full"),
        (405, "MethodNotAllowed", "another store"),
        (418, "Teapot", "check the arguments"),
    ],
)
def test_answers_that_are_reported(status: int, code: str, words: str) -> None:
    for answered in (False, True):
        error = translate(answer(status, code), "putting 'a'", answered=answered)
        assert type(error) is MailboxRefused
        assert words in str(error)
        assert code in str(error)


@pytest.mark.parametrize("code", ["RequestTimeTooSkewed", "ExpiredToken"])
def test_clock_and_credentials_are_waited_for_once_the_store_has_answered(code: str) -> None:
    error = answer(403, code, date="Mon, 01 Jan 2024 00:00:00 GMT")
    first = translate(error, "putting 'a'", answered=False)
    later = translate(error, "putting 'a'", answered=True)
    assert (type(first), type(later)) == (MailboxRefused, MailboxUnavailable)
    assert str(first) == str(later)
    words = {"RequestTimeTooSkewed": "clock is wrong: set it (the store's says Mon, 01 Jan 2024"}
    assert words.get(code, "renew them") in str(first)


def test_a_server_that_tls_cannot_be_had_with_is_reported() -> None:
    error = botocore.exceptions.SSLError(
        endpoint_url="https://x", error=ValueError("[SSL: CERTIFICATE_VERIFY_FAILED] failed")
    )
    shown = translate(error, "getting 'a'", answered=False)
    assert type(shown) is MailboxRefused
    assert "AWS_CA_BUNDLE" in str(shown)
    plain = botocore.exceptions.SSLError(
        endpoint_url="https://x", error=ValueError("[SSL: WRONG_VERSION_NUMBER] wrong version")
    )
    shown = translate(plain, "getting 'a'", answered=False)
    assert type(shown) is MailboxRefused
    assert str(shown).endswith("the server answers without TLS: write http:// for https:// there")
    other = botocore.exceptions.SSLError(endpoint_url="https://x", error=ValueError("EOF occurred"))
    assert type(translate(other, "getting 'a'", answered=False)) is MailboxUnavailable


def test_no_code_means_two_things() -> None:
    listed = [code for names in NAMES.values() for code in names.split()]
    assert len(listed) == len(set(listed)) == len(CODES) > 70
    assert all(code.isidentifier() or "." in code for code in CODES)
