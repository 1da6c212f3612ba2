"""A call as the checks of rights see it, its user, and its watch if it is a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

if TYPE_CHECKING:
    from tidemill.common.errors import ServiceError
    from tidemill.message.client_key import ClientKey
    from tidemill.security.acl import Resource, SourceAddress
    from tidemill.security.secret_uses import SecretUse
    from tidemill.security.table import KnownUser


class GatedCall(Protocol):
    """A call as the gate sees it. `caller`, `failure` and `watch` are the gate's."""

    method: str
    started_at: float
    caller: Caller | None
    failure: tuple[int, ServiceError] | None
    watch: StreamWatch | None

    @property
    def client_id(self) -> str:
        """The id of the client."""

    @property
    def client(self) -> ClientKey:
        """The client, as far as its user is known."""

    @property
    def certificate_names(self) -> Sequence[str]:
        """The names in the client's certificate; none without a certificate."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The headers."""

    def find_address(self) -> SourceAddress | None:
        """Return the address of the connection; None if it has none."""


class Caller(NamedTuple):
    """The user of a call, as of one state of the table."""

    known: KnownUser
    not_after_ms: int  # end of the secret that signed the call; 0: none
    generation: int
    sealed: bytes = b""  # the secret that signed the call, encrypted; its id may be used again
    use: SecretUse | None = None  # of the secret that signed the call


@final
class StreamWatch:
    """One open stream."""

    __slots__ = ("call", "check_rights", "end_check", "error", "is_over", "refused", "task")

    def __init__(self, call: GatedCall, task: asyncio.Task[None]) -> None:
        self.call = call
        self.task = task
        self.end_check: asyncio.TimerHandle | None = None  # at the end of the credential
        # Checks all rights that the stream needs now; None: it needs only valid credentials. A
        # list of the rights would need a bound of its own: a request may name 4,096 topics.
        self.check_rights: Callable[[], None] | None = None
        # During a check: the resources of missing rights, and the error of each.
        self.refused: list[tuple[Resource, ServiceError]] | None = None
        self.is_over = False  # whether `end` was called
        self.error: ServiceError | None = None  # for the client of an ended stream, if any

    def end(self, error: ServiceError | None) -> None:
        """End the stream with an error, or else as if the client had half-closed it."""
        self.is_over, self.error = True, error
        self.task.cancel()
