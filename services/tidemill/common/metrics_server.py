"""The HTTP endpoint of metrics and probes, which every process has.

    GET /metrics   Prometheus text, or OpenMetrics if the scraper asks for it; gzip if it accepts it
    GET /livez     200 while the event loop runs
    GET /readyz    200 while the process is ready, else 503; the body gives the reason and the
                   state of each broker

The endpoint runs in the event loop of the process, so a hanging scrape shows a hanging process.
`scrape_access.py` decides about requests to /metrics. Without a token, /metrics is open to all that
reach its port, so its cost has a bound: one scrape is computed at a
time, all that wait for it share its text, and the next one begins after a pause. A text that took
long serves further scrapes until it has cost a twentieth of a core.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, Final, NamedTuple, TypeVar

import structlog
from prometheus_client import exposition

from tidemill.common.addresses import HostPort, without_brackets
from tidemill.common.lifecycle import bound_sockets
from tidemill.common.metrics import Registry
from tidemill.common.readiness import ProcessReadiness
from tidemill.common.scrape_access import ScrapeAccess, ScrapeRefusal

log = structlog.get_logger()

T = TypeVar("T")

CONNECTIONS_MAX: Final = 64  # open at a time; beyond it the oldest one without a request is closed
BACKLOG: Final = 128  # connections in the kernel before they are accepted
# A flood gets at most two thousand connections per second. A probe waits for those before it.
ACCEPTS_PER_PAUSE: Final = 2
ACCEPT_PAUSE_S: Final = 0.001
SCRAPES_MAX: Final = 8  # GET /metrics that wait for the text or read it
# Between two scrapes, as a multiple of the time of the first one: a flood of scrapes costs at most
# a fifth of a core, unless scrapes are very long.
PAUSE_PER_SCRAPE: Final = 4
PAUSE_S_MAX: Final = 3.0
# A text of this cost serves further scrapes, so that scrapes take at most a twentieth of a core at
# the usual interval of ten seconds.
COSTLY_S: Final = 0.5
REUSE_PER_COST: Final = 20
PACED_S: Final = 4.0  # of a scrape with pauses; scrapers give up after ten seconds
REQUEST_BYTES_MAX: Final = 16_384  # of a request head; scrapers send a few hundred
REQUEST_TIMEOUT_S: Final = 10.0  # to receive a request head; it ends idle connections
WRITE_TIMEOUT_S: Final = 5.0  # for a client to read the next piece of the response
GZIP_LEVEL: Final = 3  # a tenth of the size at a third of the time of the default
_METHODS = "GET, HEAD"
_REASONS = {
    200: "OK",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class _Form(NamedTuple):
    """The form of a text of the metrics."""

    content_type: str
    is_gzip: bool


class SharedScrapes:
    """The texts of a registry: one is computed at a time, for all that wait for it.

    The `before_scrape` functions update values that are too expensive to keep current at all times.
    """

    def __init__(
        self,
        registry: Registry,
        before_scrape: tuple[Callable[[], Awaitable[None]], ...],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._now_s = now_s
        self._before_scrape = before_scrape
        self._tasks: dict[_Form, asyncio.Task[list[bytes]]] = {}
        # Costly texts, with the time until which they serve scrapes.
        self._reused: dict[_Form, tuple[float, list[bytes]]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._next_at_s = 0.0  # monotonic

    async def text(self, accept: str, *, is_gzip: bool) -> tuple[str, list[bytes]]:
        """Return the content type and the pieces of the text for a scraper.

        Raises ConnectionAbortedError if the server stops meanwhile.
        """
        encode, content_type = exposition.choose_encoder(accept)
        form = _Form(content_type, is_gzip)
        until_s, pieces = self._reused.get(form, (0.0, []))
        if self._now_s() < until_s:
            return content_type, pieces
        task = self._tasks.get(form)
        if task is None:
            task = asyncio.create_task(self._scrape(encode, form), name="scrape")
            self._tasks[form] = task
            task.add_done_callback(lambda _done: self._tasks.pop(form, None))
        # A scraper that gives up does not end the scrape of the others.
        try:
            return content_type, await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ConnectionAbortedError("the server stops") from None
            raise

    def close(self) -> None:
        """Cancel the scrapes."""
        for task in self._tasks.values():
            task.cancel()

    async def _scrape(self, encode: Callable[[Any], bytes], form: _Form) -> list[bytes]:
        async with self._one_at_a_time:
            await asyncio.sleep(self._next_at_s - self._now_s())
            began_s = self._now_s()
            for update in self._before_scrape:
                await update()
            pieces, cost_s = await _paced(self._registry.text(encode), self._now_s)
            if form.is_gzip:
                pieces, gzip_s = await _paced(_gzipped(pieces), self._now_s)
                cost_s += gzip_s
            now_s = self._now_s()
            for other in [key for key, (until_s, _) in self._reused.items() if until_s <= now_s]:
                del self._reused[other]
            if cost_s >= COSTLY_S:
                self._reused[form] = began_s + REUSE_PER_COST * cost_s, pieces
            self._next_at_s = now_s + min(PAUSE_PER_SCRAPE * (now_s - began_s), PAUSE_S_MAX)
            return pieces


class MetricsServer:
    """The small HTTP server of `/metrics`, `/livez` and `/readyz`."""

    def __init__(
        self,
        registry: Registry,
        readiness: ProcessReadiness,
        *before_scrape: Callable[[], Awaitable[None]],
        access: ScrapeAccess,
    ) -> None:
        """Await the `before_scrape` functions before each scrape."""
        self._access = access
        self._scrapes = SharedScrapes(registry, before_scrape)
        self._readiness = readiness
        registry.register(readiness.collect)
        self._scrape_count = 0
        # The open connections, the oldest first, and whether each has sent its request.
        self._connections: dict[asyncio.StreamWriter, bool] = {}
        self.address = ""

    @property
    def url(self) -> str:
        """The address of the metrics."""
        return f"http://{self.address}/metrics"

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[MetricsServer]:
        """Serve until the block ends; port 0 picks a free port, see `address`.

        Raises StartError if the port is in use.
        """
        sockets = bound_sockets(host, port, settings=("metrics_host", "metrics_port"))
        self.address = str(HostPort(without_brackets(host), sockets[0].getsockname()[1]))
        async with asyncio.TaskGroup() as tasks:
            for listening in sockets:
                listening.setblocking(False)
                listening.listen(BACKLOG)
            accepting = [tasks.create_task(self._accept(listening)) for listening in sockets]
            try:
                yield self
            finally:
                for task in accepting:
                    task.cancel()
                for writer in list(self._connections):
                    writer.transport.abort()
                self._scrapes.close()

    async def _accept(self, listening: socket.socket) -> None:
        """Accept connections until cancelled, with pauses."""
        loop, count = asyncio.get_running_loop(), 0
        with listening:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except OSError:  # The client is gone, or no descriptor is left.
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                with contextlib.suppress(OSError):
                    await loop.connect_accepted_socket(self._new_protocol, accepted)
                count += 1
                await asyncio.sleep(0 if count % ACCEPTS_PER_PAUSE else ACCEPT_PAUSE_S)

    def _new_protocol(self) -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader(limit=REQUEST_BYTES_MAX)
        return asyncio.StreamReaderProtocol(reader, self._serve_connection)

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not self._make_room():
            writer.transport.abort()
            return
        self._connections[writer] = False
        # A scraper that disconnects, or a client that does not send HTTP, is not an error here.
        with contextlib.suppress(
            TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            self._connections[writer] = True
            await self._answer(head.decode("latin-1"), writer)
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                writer.close()
                await writer.wait_closed()
        self._connections.pop(writer, None)
        # Do not wait for a client that has not read the response by now.
        writer.transport.abort()

    def _make_room(self) -> bool:
        """Close the oldest connection without a request if there are too many; False if none."""
        if len(self._connections) < CONNECTIONS_MAX:
            return True
        oldest = next((one for one, has_asked in self._connections.items() if not has_asked), None)
        if oldest is None:
            return False
        del self._connections[oldest]
        oldest.transport.abort()
        return True

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        request, *lines = head.split("\r\n")
        method, _, target = request.partition(" ")
        path = target.split(" ")[0].partition("?")[0]
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        if method not in _METHODS.split(", "):
            text, allow = b"only GET and HEAD are supported\n", f"Allow: {_METHODS}\r\n"
            pieces = _response(405, "text/plain", text, more_head=allow)
        elif path == "/metrics" and (refusal := self._find_refusal(headers)) is not None:
            reason = refusal.text.encode()
            pieces = _response(refusal.status, "text/plain", reason, more_head=refusal.more_head)
            pieces = pieces[:1] if method == "HEAD" else pieces
        elif path == "/metrics" and method == "GET":
            await self._answer_scrape(headers, writer)
            return
        elif path == "/metrics":
            _, content_type = exposition.choose_encoder(headers.get("accept", ""))
            # Without a length, which only a scrape knows.
            pieces = [_head(200, content_type, "")]
        else:
            pieces = self._answer_probe(path)
            pieces = pieces[:1] if method == "HEAD" else pieces
        await _write(writer, pieces)

    def _find_refusal(self, headers: dict[str, str]) -> ScrapeRefusal | None:
        return self._access.find_refusal(headers.get("host", ""), headers.get("authorization", ""))

    def _answer_probe(self, path: str) -> list[bytes]:
        match path:
            case "/livez":
                return _response(200, "text/plain", b"ok\n")
            case "/readyz":
                is_ready, reasons = self._readiness.report()
                text = "\n".join([*reasons, ""])
                return _response(200 if is_ready else 503, "text/plain", text.encode())
            case _:
                return _response(404, "text/plain", b"see /metrics, /livez and /readyz\n")

    async def _answer_scrape(self, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        if self._scrape_count >= SCRAPES_MAX:
            text = f"{SCRAPES_MAX} scrapers already wait; scrape less often\n".encode()
            await _write(writer, _response(503, "text/plain", text))
            return
        self._scrape_count += 1
        try:
            is_gzip = _accepts_gzip(headers.get("accept-encoding", ""))
            accept = headers.get("accept", "")
            content_type, pieces = await self._scrapes.text(accept, is_gzip=is_gzip)
            more = "Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n" if is_gzip else ""
            await _write(writer, _response(200, content_type, *pieces, more_head=more))
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            log.exception("scrape failed")
            text = b"the metrics could not be read; the log has the error\n"
            await _write(writer, _response(500, "text/plain", text))
        finally:
            self._scrape_count -= 1


async def _paced(slices: Generator[None, None, T], now_s: Callable[[], float]) -> tuple[T, float]:
    """Run `slices`, each in a turn of its own; pause for as long as each takes.

    Return their result, and their time in seconds.

    A long scrape goes on without pauses after a while.
    """
    began_s, cost_s = now_s(), 0.0
    while True:
        slice_s = now_s()
        try:
            next(slices)
        except StopIteration as ended:
            return ended.value, cost_s
        end_s = now_s()
        cost_s += end_s - slice_s
        await asyncio.sleep(end_s - slice_s if end_s - began_s < PACED_S else 0)


def _gzipped(pieces: list[bytes]) -> Generator[None, None, list[bytes]]:
    """Return the pieces as one gzip file, in pieces; each slice compresses one."""
    compressor = zlib.compressobj(GZIP_LEVEL, wbits=zlib.MAX_WBITS | 16)
    found = []
    for piece in pieces:
        if compressed := compressor.compress(piece):
            found.append(compressed)
        yield
    return [*found, compressor.flush()]


def _accepts_gzip(accept_encoding: str) -> bool:
    for part in accept_encoding.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "") not in {"q=0", "q=0.0"}
    return False


async def _write(writer: asyncio.StreamWriter, pieces: list[bytes]) -> None:
    """Write a response; raise TimeoutError if the client does not read."""
    for piece in pieces:
        writer.write(piece)
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await writer.drain()


def _response(status: int, content_type: str, *body: bytes, more_head: str = "") -> list[bytes]:
    """Return the response as a list: the head, then the parts of the body."""
    length = f"Content-Length: {sum(map(len, body))}\r\n"
    return [_head(status, content_type, length + more_head), *body]


def _head(status: int, content_type: str, more: str) -> bytes:
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n{more}"
    return f"{head}Connection: close\r\n\r\n".encode()
