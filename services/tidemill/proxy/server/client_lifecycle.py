"""Heartbeat and NotifyClientTermination: the clients that are alive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.message.resource_names import check_group
from tidemill.proxy.clients.clients import Client
from tidemill.proxy.clients.settings import check_client_type
from tidemill.proxy.message_codec import OK_STATUS
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.proxy.clients.clients import Clients
    from tidemill.proxy.cluster.cluster import BrokerCluster
    from tidemill.proxy.server.call import Call


class ClientLifecycle:
    """Heartbeats and terminations of clients."""

    def __init__(self, cluster: BrokerCluster, clients: Clients, clock: Clock) -> None:
        self._cluster = cluster
        self._clients = clients
        self._clock = clock

    async def heartbeat(self, call: Call, request: bytes) -> bytes:
        """Record a sign of life.

        Every client with an id and a type gets OK, also an unknown one. After a successful
        heartbeat, producers use an isolated endpoint again.
        """
        parsed = service.HeartbeatRequest.FromString(request)
        check_client_type(parsed.client_type)
        if parsed.group.name:
            check_group(parsed.group.name)
        now_ms = self._clock.monotonic_ms()
        if parsed.client_type != v2.PRODUCER:
            self._cluster.report_alive(call.client_id, now_ms)
        self._clients.record(
            call.client_id,
            Client(
                client_type=parsed.client_type,
                group=parsed.group.name,
                language=call.language,
                version=call.version,
                seen_at_ms=now_ms,
                address=call.peer(),
            ),
        )
        return OK_STATUS

    async def notify_client_termination(self, call: Call, request: bytes) -> bytes:
        """Forget a client that ends, and release its messages to others."""
        service.NotifyClientTerminationRequest.FromString(request)
        self._clients.forget(call.client_id)
        # Producers hold no messages, but not every client reports its type.
        self._cluster.report_ended(call.client_id)
        return OK_STATUS
