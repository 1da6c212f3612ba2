"""What BrokerAdmin needs to know of the items that operations change (ADR 0093, ADR 0098)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.turn import Turn
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class BulkCount(Protocol):
    """A count in progress: call `step` until it returns False, then read the numbers."""

    count: int
    size_bytes: int
    begin: int

    @property
    def end(self) -> int:
        """The first item behind those of the count."""

    def step(self) -> bool:
        """Do one slice. Raises ServiceError."""


class BulkStart(NamedTuple):
    """The begin of an operation, as its records have it."""

    subject_id: int
    topic_id: int
    details: dict[str, Any]  # the filter and the change
    facts: dict[str, Any]  # of the audit record


class OperationSubject(Protocol):
    """The items of some kinds of operations."""

    noun: str

    def check(self, engine: Engine, turn: Turn, request: pb.BeginOperationRequest) -> Hashable:
        """Return what identifies the items of a request. Raises ServiceError."""

    def begin_count(
        self, engine: Engine, turn: Turn, request: pb.BeginOperationRequest, as_of_ms: int
    ) -> BulkCount:
        """Begin a count of the items that match."""

    def check_count(self, count: Any) -> None:
        """Raise Conflict if no operation may begin with a complete count."""

    def describe(
        self,
        engine: Engine,
        turn: Turn,
        request: pb.BeginOperationRequest,
        count: Any,  # Its own BulkCount.
        reply: pb.BeginOperationReply,
    ) -> None:
        """Add samples and warnings to the reply of a dry run."""

    def start(
        self,
        engine: Engine,
        turn: Turn,
        request: pb.BeginOperationRequest,
        count: Any,  # Its own BulkCount.
    ) -> BulkStart:
        """Return the begin of an operation on the items of a count."""
