"""The store of a run of processes, by one line of text."""

import gradientmail as gm


def store_at(root: str) -> gm.Mailbox:
    """The folder ``root``, or the bucket and prefix at ``http://host/bucket/prefix``."""
    if not root.startswith("http://"):
        return gm.FilesystemMailbox(root)
    scheme, _, host, bucket, prefix = root.split("/", 4)
    return gm.S3Mailbox(
        bucket, prefix, endpoint_url=f"{scheme}//{host}", region="us-east-1", max_concurrency=4
    )
