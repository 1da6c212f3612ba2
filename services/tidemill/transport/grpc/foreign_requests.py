"""HTTP/2 requests that are not gRPC: they get an HTTP status and a sentence for people."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.transport.http2 import header_block
from tidemill.transport.http2.frames import ErrorCode

if TYPE_CHECKING:
    from tidemill.transport.grpc.connection_memory import ConnectionMemory
    from tidemill.transport.http2.connection import Connection
    from tidemill.transport.http2.stream import Stream

FOREIGN_REQUEST_BYTES: Final = 2_048  # of such a request and its response


class ForeignRequest(NamedTuple):
    """An incomplete request and its response."""

    stream: Stream
    block: bytes
    body: bytes


@final
class ForeignRequests:
    """The incomplete requests of one connection that are not gRPC.

    A request is answered when it is complete. If there is no room to wait, it is answered at once.
    """

    def __init__(self, http: Connection, memory: ConnectionMemory) -> None:
        self._http = http
        self._memory = memory
        self._by_stream: dict[int, ForeignRequest] = {}

    def receive(self, stream: Stream, method: str, path: str, *, is_last: bool) -> None:
        """Receive the headers of a request."""
        request = ForeignRequest(stream, *_response(method, path))
        if not is_last and not self._memory.share.is_fair(0):
            self._reject(request)
            return
        self._by_stream[stream.id] = request
        self._count()
        if is_last:
            self._answer(stream)

    def receive_data(self, stream: Stream, count: int, *, is_last: bool) -> None:
        """Discard the data of a request, if `stream` has one."""
        if stream.id in self._by_stream:
            self._http.consume(stream, count)
            if is_last:
                self._answer(stream)

    def discard(self, stream: Stream) -> None:
        """Remove the request of a stream that was reset."""
        self._by_stream.pop(stream.id, None)
        self._memory.foreign_bytes = FOREIGN_REQUEST_BYTES * len(self._by_stream)

    def check(self, now_s: float, patience_s: float) -> None:
        """Reset streams without progress."""
        for stream, _, _ in list(self._by_stream.values()):
            if now_s - stream.moved_at_s > patience_s:
                self.discard(stream)
                self._http.reset(stream, ErrorCode.CANCEL)

    def _answer(self, stream: Stream) -> None:
        _, block, body = self._by_stream.pop(stream.id)
        self._http.send_headers(stream, block, is_last=False)
        self._http.send_data(stream, body, is_last=True)
        self._count()

    def _reject(self, request: ForeignRequest) -> None:
        """Answer at once; send the sentence only if the window allows it."""
        stream, block, body = request
        has_window = self._http.has_window(stream, len(body))
        self._http.send_headers(stream, block, is_last=not has_window)
        if has_window:
            self._http.send_data(stream, body, is_last=True)

    def _count(self) -> None:
        self._memory.foreign_bytes = FOREIGN_REQUEST_BYTES * len(self._by_stream)
        self._memory.count_windows()


def is_grpc(content_type: str) -> bool:
    """Return whether the content type is gRPC; `application/grpc-web` is not."""
    return content_type == "application/grpc" or content_type.startswith(
        ("application/grpc+", "application/grpc;")
    )


def _response(method: str, path: str) -> tuple[bytes, bytes]:
    """Return the headers and the body of a response, which people see in a browser."""
    code = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    allow: tuple[tuple[str, str], ...] = ()
    if method != "POST":
        code, allow = HTTPStatus.METHOD_NOT_ALLOWED, (("allow", "POST"),)
    text = f"{code.phrase}: this port speaks gRPC (POST, application/grpc), not {method} {path}"
    fields = ((":status", str(int(code))), ("content-type", "text/plain"), *allow)
    return header_block.encode(fields), text[:500].encode("ascii", "replace") + b"\n"
