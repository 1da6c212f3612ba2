"""What a shell needs of a connection that it keeps up: `aio.channel` has one, tests have others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tidemill.transport.grpc.status import RpcError
    from tidemill.transport.http2.limits import Limits


class OpenStream(Protocol):
    """A bidirectional call under way; `ClientStream` is one."""

    def write(self, message: bytes) -> None:
        """Send a frame at once and without waiting."""

    def write_last(self, message: bytes) -> None:
        """Send the last frame, or the only one."""

    def cancel(self) -> None:
        """End the call; nothing more is heard of it."""

    def fail(self, error: RpcError) -> None:
        """End the call because what came makes no sense."""

    async def ended(self) -> None:
        """Wait for the end of the call; raise RpcError unless it is OK."""


class OpenChannel(Protocol):
    """A connection to a server; `Channel` is one."""

    @property
    def heard_at_s(self) -> float:
        """When the server gave its last sign of life, in monotonic seconds."""

    def open(self, path: str, on_message: Callable[[bytes], None], /) -> OpenStream:
        """Begin a bidirectional call. Raises RpcError."""


class Connector(Protocol):
    """How to get at a server; `connected` is one way."""

    def __call__(
        self, address: str, limits: Limits, /, *, message_bytes_max: int, timeout_s: float
    ) -> AbstractAsyncContextManager[OpenChannel]:
        """Connect for the block. Raises RpcError."""
