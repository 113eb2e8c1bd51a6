"""The store in a folder, by the contract that every mailbox passes."""

from pathlib import Path

import pytest

from gradientmail.mailbox import FilesystemMailbox
from gradientmail.testing.mailbox_contract import MailboxContract
from gradientmail.testing.mailbox_races import OpenMailbox


class TestFilesystemMailbox(MailboxContract):
    @pytest.fixture
    def open_mailbox(self, tmp_path: Path) -> OpenMailbox:
        return lambda: FilesystemMailbox(tmp_path)
