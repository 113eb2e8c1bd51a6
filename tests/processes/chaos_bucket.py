"""A bucket of a SeaweedFS that is killed and started again."""

import contextlib
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Self

from tests.s3 import servers

BUCKET, PREFIX = "chaos", "run"


class Bucket:
    """A store in SeaweedFS. While it is away its process is dead."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = servers.seaweedfs_ports()
        self._process: subprocess.Popen[bytes] | None = None
        self._endpoint = f"http://127.0.0.1:{self._ports['s3.port']}"
        self.description = {"bucket": BUCKET, "prefix": PREFIX, "endpoint": self._endpoint}

    def __enter__(self) -> Self:
        self._start()
        servers.make_bucket(self._endpoint, BUCKET)
        self._client = servers.client(self._endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for port in self._ports.values():
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_file.unlink(missing_ok=True)

    def _start(self) -> None:
        self._process = servers.start_seaweedfs(self._folder, self._ports)
        servers.await_answer(self._endpoint, self._process, self._folder / "log.txt")

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def overwrite(self, key: str, data: bytes) -> None:
        """Change an object behind everybody's back."""
        self._client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/{key}", Body=data)

    @contextlib.contextmanager
    def away(self) -> Generator[None]:
        """SIGKILL, and start it again."""
        self._kill()
        try:
            yield
        finally:
            self._start()
