"""Operations on connections that only tests need."""

from __future__ import annotations

from tidemill.transport.grpc.client_connection import ClientCall, ClientConnection
from tidemill.transport.http2.connection import Connection


def half_close(connection: ClientConnection, call: ClientCall) -> None:
    """End the client's side of a call."""
    if not call.is_ended:
        connection.http.send_data(call.stream, b"", is_last=True)


def stream_count(connection: Connection) -> int:
    """Return the number of open streams."""
    return len(connection._streams.by_id)
