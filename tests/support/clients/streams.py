"""What tests do with connections, and want to know of them, and no process does."""

from __future__ import annotations

from tidemill.transport.grpc.client_connection import ClientCall, ClientConnection
from tidemill.transport.http2.connection import Connection


def half_close(connection: ClientConnection, call: ClientCall) -> None:
    """Tell the server that no more messages come."""
    if not call.is_ended:
        connection.http.send_data(call.stream, b"", is_last=True)


def stream_count(connection: Connection) -> int:
    """Return how many streams are open."""
    return len(connection._streams.by_id)
