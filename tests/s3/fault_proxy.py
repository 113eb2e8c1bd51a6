"""A proxy in front of an S3 server that breaks what goes through it, on command.

Plain HTTP/1.1 over asyncio in a thread of its own, one request after the other on a connection,
whole bodies in memory. What a test wants broken it says by ``decide``.
"""

import asyncio
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from tests.s3.servers import free_ports

type Broken = Literal["drop before", "drop after", "reset", "truncate", "delay", "lie", "answer"]


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    * ``drop before``, ``drop after``: the connection ends before or after the server has acted.
    * ``reset``: the same after it has, by a TCP reset.
    * ``truncate``: half of the answer's body comes.
    * ``delay``: the answer comes ``seconds`` late.
    * ``lie``: a failed condition is reported as success.
    * ``answer``: the server never hears of it; the answer is ``status`` and ``code``, or ``body``.
    """

    kind: Broken
    status: int = 500
    code: str = "InternalError"
    seconds: float = 0.3
    headers: tuple[str, ...] = ()
    body: str = ""


@dataclass
class Message:
    """A request or an answer."""

    start: str
    headers: list[str]
    body: bytes = b""

    @property
    def method(self) -> str:
        return self.start.split()[0]

    @property
    def path(self) -> str:
        return self.start.split()[1]

    @property
    def status(self) -> int:
        return int(self.start.split()[1])

    def header(self, name: str) -> str:
        for line in self.headers:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return ""

    def encoded(self) -> bytes:
        return "\r\n".join([self.start, *self.headers, "", ""]).encode("latin-1") + self.body


type Decide = Callable[[Message], Fault | None]


TRANSIENT = (
    (408, "RequestTimeout"),
    (423, "Locked"),
    (429, "TooManyRequests"),
    (499, "ClientClosedRequest"),
    (500, "InternalError"),
    (502, "BadGateway"),
    (503, "SlowDown"),
    (504, "GatewayTimeout"),
    (403, "RequestTimeTooSkewed"),
    (400, "ExpiredToken"),
)
"""Statuses and codes of a store that may answer otherwise next time."""


@dataclass
class FaultProxy:
    """``endpoint`` leads to ``upstream``, with what ``decide`` says done to each request."""

    upstream: str
    decide: Decide = lambda _: None
    endpoint: str = ""
    struck: Counter[str] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    """Method and path of each, when it came."""
    answered: list[str] = field(default_factory=list)
    """The same, when the server has acted and answered."""
    connections: int = 0
    """How many were made."""
    port: int = 0
    connects: bool = True
    """Whether there is a server behind it; without, every request needs an ``answer``."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._run(self._listen())
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Refuse connections and end those there are: the store is away."""
        self._run(self._close())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(90)

    async def _listen(self) -> None:
        self.port = self.port or free_ports(1)[0]
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, limit=2**20, reuse_address=True
        )

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        up: asyncio.StreamWriter | None = None
        try:
            up_reader = asyncio.StreamReader()
            if self.connects:
                parts = urlsplit(self.upstream)
                up_reader, up = await asyncio.open_connection(
                    parts.hostname, parts.port, limit=2**20
                )
            while await self._pass_one(reader, writer, up_reader, up):
                pass
        except (OSError, EOFError, ValueError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for one in (writer, up):
                if one is not None:
                    one.transport.abort()

    async def _pass_one(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter | None,
    ) -> bool:
        """Pass one request on, and its answer back; whether the connection goes on."""
        request = await _read(reader, answer_to=None)
        if request.header("expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.headers = [h for h in request.headers if not h.lower().startswith("expect:")]
        request.body = await _read_body(reader, request)
        self.requests.append(f"{request.method} {request.path}")
        fault = self.decide(request)
        if fault is not None:
            self.struck[fault.kind] += 1
            if fault.kind == "drop before":
                return False
            if fault.kind == "answer":
                writer.write(_error(fault, request.method).encoded())
                await writer.drain()
                return True
        assert up_writer is not None, f"nothing answers {request.start}"
        up_writer.write(request.encoded())
        await up_writer.drain()
        answer = await _read(up_reader, answer_to=request.method)
        self.answered.append(f"{request.method} {request.path}")
        return await _send_back(writer, answer, fault)


async def _send_back(writer: asyncio.StreamWriter, answer: Message, fault: Fault | None) -> bool:
    match None if fault is None else fault.kind:
        case "drop after":
            return False
        case "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        case "truncate":
            whole = answer.encoded()
            writer.write(whole[: len(whole) - (len(answer.body) + 1) // 2])
            await writer.drain()
            await asyncio.sleep(0.05)
            return False
        case "delay":
            assert fault is not None
            await asyncio.sleep(fault.seconds)
        case "lie" if answer.status == 412:
            answer = Message("HTTP/1.1 200 OK", ['ETag: "lie"', "Content-Length: 0"])
    writer.write(answer.encoded())
    await writer.drain()
    return True


async def _read(reader: asyncio.StreamReader, *, answer_to: str | None) -> Message:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    start, *headers = head.rstrip("\r\n").split("\r\n")
    message = Message(start, headers)
    if answer_to is not None and answer_to != "HEAD" and message.status not in (204, 304):
        message.body = await _read_body(reader, message)
    return message


async def _read_body(reader: asyncio.StreamReader, message: Message) -> bytes:
    if message.header("transfer-encoding").lower() != "chunked":
        return await reader.readexactly(int(message.header("content-length") or 0))
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        chunk = await reader.readexactly(int(line.split(b";")[0], 16) + 2)
        body += line + chunk
        if chunk == b"\r\n":
            return body


def _error(fault: Fault, method: str) -> Message:
    error = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>"
    body = (fault.body if fault.status < 300 else fault.body or error).encode()
    headers = ["Content-Type: application/xml", *fault.headers]
    if not any(line.lower().startswith("transfer-encoding:") for line in headers):
        headers.append(f"Content-Length: {len(body)}")
    return Message(f"HTTP/1.1 {fault.status} Injected", headers, b"" if method == "HEAD" else body)
