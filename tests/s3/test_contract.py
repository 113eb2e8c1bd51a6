"""The contract suite over real servers, and what only a bucket has."""

import pytest

from gradientmail.mailbox.s3 import S3Mailbox
from gradientmail.testing.mailbox_contract import MailboxContract
from gradientmail.testing.mailbox_races import OpenMailbox


def opener(endpoint: str, prefix: str) -> OpenMailbox:
    return lambda: S3Mailbox("tests", prefix, endpoint_url=endpoint, region="us-east-1")


class TestSeaweedFS(MailboxContract):
    examples = 10
    many_keys = 1100

    @pytest.fixture
    def open_mailbox(self, seaweedfs: str, prefix: str) -> OpenMailbox:
        return opener(seaweedfs, prefix)


class TestMoto(MailboxContract):
    examples = 10

    @pytest.fixture
    def open_mailbox(self, moto: str, prefix: str) -> OpenMailbox:
        return opener(moto, prefix)
