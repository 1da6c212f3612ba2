"""ReadEvents: pages of a broker's lifecycle events, forwarded unchanged."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final, final

from tidemill.message import limits
from tidemill.proxy.server.broker_pages import BrokerPages
from tidemill.proxy.server.broker_queue import find_broker
from tidemill.stubs.tidemill.broker.v1 import broker_pb2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

if TYPE_CHECKING:
    from tidemill.proxy.cluster.broker_calls import BrokerCalls
    from tidemill.proxy.cluster.cluster import BrokerCluster

LOG_BYTES_MAX: Final = 64 << 20  # per call
# Per page: up to 16 MiB of log from a cold disk, in slices between the broker's other work.
PAGE_TIMEOUT_MS: Final = 30_000


@final
class EventPageRelay:
    """The method ReadEvents."""

    def __init__(self, cluster: BrokerCluster, calls: BrokerCalls) -> None:
        self._cluster = cluster
        self._pages = BrokerPages(calls)

    async def read_events(
        self, request: pb.ReadEventsRequest, address: str
    ) -> AsyncGenerator[bytes, None]:
        """Yield pages up to the committed end of the log at the first page.

        All reads of one address share one place in the rotation.
        """
        limits.EVENT_TOPICS.check_count(len(request.topics))
        limits.EVENT_KINDS.check_count(len(request.kinds))
        broker = find_broker(self._cluster, request.broker)
        remaining_bytes = min(request.log_bytes_max or LOG_BYTES_MAX, LOG_BYTES_MAX)
        until = request.until_position
        while True:
            request.log_bytes_max = remaining_bytes
            page = await self._pages.ask(
                broker, "ReadEvents", request, reader=address, timeout_ms=PAGE_TIMEOUT_MS
            )
            yield page
            # EventsPage has no field for the events, so they are not parsed.
            end = broker_pb2.EventsPage.FromString(page)
            if not request.from_message:  # Else the start of the page is unknown.
                remaining_bytes -= end.next_position - max(request.from_position, end.log_min)
            # A restored log may end before the requested position.
            until = min(until or end.log_end, end.log_end)
            request.from_message = False
            request.from_position, request.from_index = end.next_position, end.next_index
            # The following positions are valid only in this log.
            request.log_id, request.until_position = end.log_id, until
            if end.next_position >= until or remaining_bytes <= 0:
                return
