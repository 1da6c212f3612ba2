"""Protocols of a client connection; `aio.channel` implements them, and tests do, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tidemill.transport.grpc.status import RpcError
    from tidemill.transport.http2.limits import Limits


class OpenStream(Protocol):
    """A bidirectional call in progress, such as `ClientStream`."""

    @property
    def part_heard_at_s(self) -> float:
        """The time of the last input if a response has arrived in part, in monotonic seconds.

        0 if none has.
        """

    def write(self, message: bytes) -> None:
        """Send a frame at once without waiting."""

    def write_last(self, message: bytes) -> None:
        """Send the last or only frame."""

    def cancel(self) -> None:
        """End the call; its function is not called again."""

    def fail(self, error: RpcError) -> None:
        """End the call because a response is invalid."""

    async def wait_ended(self) -> None:
        """Wait for the end of the call; raise RpcError unless it is OK."""


class OpenChannel(Protocol):
    """A connection to a server, such as `Channel`."""

    @property
    def heard_at_s(self) -> float:
        """The time of the last input from the server, in monotonic seconds."""

    def open(self, path: str, on_message: Callable[[bytes], None], /) -> OpenStream:
        """Begin a bidirectional call. Raises RpcError."""


class Connector(Protocol):
    """A function that connects to a server, such as `connected`."""

    def __call__(
        self, address: str, limits: Limits, /, *, message_bytes_max: int, timeout_s: float
    ) -> AbstractAsyncContextManager[OpenChannel]:
        """Connect for the block. Raises RpcError."""
