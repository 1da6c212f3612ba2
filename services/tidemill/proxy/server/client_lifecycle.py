"""Heartbeat and NotifyClientTermination: the clients that are alive."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import TYPE_CHECKING, Final

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
    from tidemill.proxy.polling.shell import PollingShell
    from tidemill.proxy.server.call import Call


RECONNECT_S: Final = 10.0  # for a client to come back after the end of its last connection


class ClientLifecycle:
    """Heartbeats and terminations of clients."""

    def __init__(
        self, cluster: BrokerCluster, clients: Clients, polling: PollingShell, clock: Clock
    ) -> None:
        self._cluster = cluster
        self._clients = clients
        self._polling = polling
        self._clock = clock
        self.is_draining = False  # the proxy stops
        self._timers: dict[str, asyncio.TimerHandle] = {}  # of clients that lost their connections

    async def heartbeat(self, call: Call, request: bytes) -> bytes:
        """Record a sign of life.

        Every client with an id and a type gets OK, also an unknown one. After a successful
        heartbeat, producers use an isolated endpoint again. If a client reports no type, as Java
        5.0.0 does, its type is that of its telemetry.
        """
        parsed = service.HeartbeatRequest.FromString(request)
        if parsed.client_type == v2.CLIENT_TYPE_UNSPECIFIED:
            known = self._clients.find(call.client_id)
            if known is not None:
                parsed.client_type = v2.ClientType.ValueType(known.client.client_type)
        check_client_type(parsed.client_type)
        group = call.name_of(parsed.group)
        if group:
            check_group(group)
        now_ms = self._clock.monotonic_ms()
        if parsed.client_type != v2.PRODUCER:
            self._cluster.report_alive(call.client_id, now_ms)
        self._clients.record(
            call.client_id,
            Client(
                client_type=parsed.client_type,
                group=group,
                language=call.language,
                version=call.version,
                seen_at_ms=now_ms,
                address=call.peer(),
            ),
            connection=call.connection,
        )
        return OK_STATUS

    def forget_connection(self, connection: Hashable) -> None:
        """Forget a connection that ended. Report its clients unless they come back soon.

        A proxy that stops closes its connections itself, and its clients continue at another proxy.
        """
        clients = self._clients.forget_connection(connection)
        if self.is_draining:
            return
        loop = asyncio.get_running_loop()
        for client_id in clients:
            listing = self._clients.find(client_id)
            if listing is not None and listing.client.client_type != v2.PRODUCER:
                earlier = self._timers.get(client_id)
                if earlier is not None:
                    earlier.cancel()
                self._timers[client_id] = loop.call_later(
                    RECONNECT_S, self._report_disconnected, client_id
                )

    def _report_disconnected(self, client_id: str) -> None:
        del self._timers[client_id]
        if not self.is_draining and not self._clients.is_connected(client_id):
            self._cluster.report_disconnected(client_id)

    async def notify_client_termination(self, call: Call, request: bytes) -> bytes:
        """Forget a client that ends, end its polls, and release its messages to others.

        Only a connection that presented the id of a client can end it. Other connections get OK
        and change nothing: ids are no secrets. Silence then ends the client.
        """
        service.NotifyClientTerminationRequest.FromString(request)
        if not self._clients.has_presented(call.client_id, call.connection):
            return OK_STATUS
        self._clients.forget(call.client_id)
        self._polling.end_client(call.client_id)
        # Producers hold no messages, but not every client reports its type.
        self._cluster.report_ended(call.client_id)
        return OK_STATUS
