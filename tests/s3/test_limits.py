"""An object larger than its reader has use for: told by its size, before its bytes come."""

import asyncio

import pytest
from tests.s3 import servers

from gradientmail.errors import ProtocolError
from gradientmail.mailbox.base import get_at_most
from gradientmail.mailbox.s3 import S3Mailbox


@pytest.mark.parametrize("size", [5_000, 3_000_000, 40_000_000])
def test_no_memory_is_taken_for_it(
    size: int, moto: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.client(moto).put_object(Bucket="tests", Key=f"{prefix}/a", Body=b"x" * size)

    async def main() -> None:
        box = S3Mailbox("tests", prefix, endpoint_url=moto, region="us-east-1")
        taken: list[int] = []
        take = box._take

        def counted(nbytes: int) -> memoryview:
            taken.append(nbytes)
            return take(nbytes)

        monkeypatch.setattr(box, "_take", counted)
        for _ in range(20):  # more than there are connections
            with pytest.raises(ProtocolError, match=f"a has {size} bytes, more than the 4999 it"):
                await get_at_most(box, "a", 4999)
        assert taken == []
        found = await get_at_most(box, "a", size)
        assert found is not None
        assert memoryview(found).nbytes == size

    asyncio.run(main())
