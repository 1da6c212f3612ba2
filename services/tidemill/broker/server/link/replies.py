"""The results that one round has for one link, kept as plain values until the round is committed.

Protobuf is built and the messages of a pop are read only then (`reply_frames.py`): a result that is
not durable leaves the process in no form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, final

if TYPE_CHECKING:
    from tidemill.broker.engine.metadata.security_items import ItemKey
    from tidemill.broker.server.round.round_times import RoundTimes
    from tidemill.common.errors import ServiceError
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# The result of one request; its request id, or its poll, comes first.
Result: TypeAlias = tuple[Any, ...]


@final
class LinkReplies:
    """The effect of one round for one link."""

    __slots__ = (
        "_send",
        "answered_sequence",
        "arrived_s",
        "configs",
        "failures",
        "pop_bytes",
        "results",
        "security",
        "times",
    )

    def __init__(self, send: Callable[[LinkReplies], Iterator[None]], times: RoundTimes) -> None:
        self._send = send
        self.times = times
        self.answered_sequence = 0
        self.arrived_s = math.inf  # time.monotonic() of the oldest frame that is answered
        self.configs: list[pb.ConfigUpdate] = []
        # Changed security items and the new version of their table.
        self.security: tuple[Mapping[ItemKey, bytes], int | None] | None = None
        self.results: dict[str, list[Result]] = {}  # by the name of their command
        self.pop_bytes = 0
        self.failures: list[tuple[int, ServiceError]] = []

    def of(self, command_name: str) -> list[Result]:
        """Return the list for the results of a command."""
        return self.results.setdefault(command_name, [])

    def release(self) -> Iterator[None]:
        """Send the replies over the link; yield between slices."""
        return self._send(self)
