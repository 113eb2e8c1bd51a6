"""The stores that a run can live in, and what wraps them.

``base`` states the contract. ``MemoryMailbox``, ``FilesystemMailbox`` and ``S3Mailbox`` are stores,
``open_mailbox`` opens one by its URL, ``RetryingMailbox`` waits for a store that is away. Import
them from their modules or from here.
"""

from gradientmail.mailbox.base import Mailbox, check_key
from gradientmail.mailbox.filesystem import FilesystemMailbox
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.mailbox.retrying import RetryingMailbox
from gradientmail.mailbox.s3 import S3Mailbox
from gradientmail.mailbox.urls import open_mailbox

__all__ = [
    "FilesystemMailbox",
    "Mailbox",
    "MemoryMailbox",
    "RetryingMailbox",
    "S3Mailbox",
    "check_key",
    "open_mailbox",
]
