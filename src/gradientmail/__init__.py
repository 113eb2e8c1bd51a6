"""GradientMail: train one model on many independent machines that share a folder or a bucket.

Each machine trains alone; a fragment of the model at a time, machines exchange through a mailbox
how far they moved. Put ``with gradientmail.Session(...) as session:`` around a training loop and
call ``session.step(samples=...)`` after every optimizer step.
"""

from gradientmail import events
from gradientmail.algorithm.diloco import ByBytes, DiLoCo, Rda, Strided, WeightedMean
from gradientmail.alignment import align
from gradientmail.errors import (
    GradientMailError,
    LearnerReplaced,
    MailboxRefused,
    MailboxUnavailable,
    MissingExtra,
    PayloadCorrupt,
    ProtocolError,
    RunConfigMismatch,
    SchemaMismatch,
    SessionClosed,
)
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.filesystem import FilesystemMailbox
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.mailbox.s3 import S3Mailbox
from gradientmail.mailbox.urls import open_mailbox
from gradientmail.session import Session

__all__ = [
    "ByBytes",
    "DiLoCo",
    "FilesystemMailbox",
    "GradientMailError",
    "LearnerReplaced",
    "Mailbox",
    "MailboxRefused",
    "MailboxUnavailable",
    "MemoryMailbox",
    "MissingExtra",
    "PayloadCorrupt",
    "ProtocolError",
    "Rda",
    "RunConfigMismatch",
    "S3Mailbox",
    "SchemaMismatch",
    "Session",
    "SessionClosed",
    "Strided",
    "WeightedMean",
    "align",
    "events",
    "open_mailbox",
]


def __getattr__(name: str) -> str:
    """``__version__``, which is read from the installed package only when somebody asks."""
    if name == "__version__":
        from importlib.metadata import version

        return version("gradientmail")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
