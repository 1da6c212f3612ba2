"""Heartbeat and NotifyClientTermination: the clients that are alive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Final

from tidemill.message.client_key import ClientKey
from tidemill.message.resource_names import check_group
from tidemill.proxy.clients.clients import Client
from tidemill.proxy.clients.settings import check_client_type
from tidemill.proxy.message_codec import OK_STATUS
from tidemill.security.acl import Action, group_resource
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.proxy.clients.clients import Clients, LostClients
    from tidemill.proxy.cluster.cluster import BrokerCluster
    from tidemill.proxy.polling.shell import PollingShell
    from tidemill.proxy.server.call import Call


RECONNECT_S: Final = 10.0  # for a client to come back after the end of its last connection
REPORTED_A_TURN: Final = 100  # clients without a connection, in about ten microseconds each


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
        # Clients that lost their last connection in the last RECONNECT_S, and when to report them.
        self._lost: deque[tuple[float, LostClients]] = deque()

    async def heartbeat(self, call: Call, request: bytes) -> bytes:
        """Record a sign of life.

        Every client with an id and a type gets OK, also an unknown one. After a successful
        heartbeat, producers use an isolated endpoint again. If a client reports no type, as Java
        5.0.0 does, its type is that of its telemetry.
        """
        parsed = service.HeartbeatRequest.FromString(request)
        if parsed.client_type == v2.CLIENT_TYPE_UNSPECIFIED:
            known = self._clients.find(call.client)
            if known is not None:
                parsed.client_type = v2.ClientType.ValueType(known.client.client_type)
        check_client_type(parsed.client_type)
        group = call.name_of(parsed.group)
        if group:
            check_group(group)
        if parsed.client_type != v2.PRODUCER:
            call.require(group_resource(group), Action.SUB)
        now_ms = self._clock.monotonic_ms()
        if parsed.client_type != v2.PRODUCER:
            self._cluster.report_alive(call.client, now_ms)
        self._clients.record(
            call.client,
            Client(
                client_type=parsed.client_type,
                group=group,
                language=call.language,
                version=call.version,
                seen_at_ms=now_ms,
                address=call.peer(),
                user=call.user,
            ),
            connection=call.connection,
        )
        return OK_STATUS

    def forget_connection(self, connection: Hashable) -> None:
        """Forget a connection that ended. Report its clients unless they come back soon.

        A proxy that stops closes its connections itself, and its clients continue at another proxy.
        """
        self._forget_slice(self._clients.forget_connection(connection))

    def end_connection(self, connection: Hashable) -> None:
        """End the clients of a connection from a banned address: others get their messages."""
        self._end_slice(self._clients.forget_connection(connection))

    def _end_slice(self, slices: Iterator[LostClients]) -> None:
        lost = next(slices, None)
        if lost is None:
            return
        asyncio.get_running_loop().call_soon(self._end_slice, slices)
        for client in lost.clients:
            self._clients.forget(client)
            self._polling.end_client(client)
            self._cluster.report_revoked(client, ())

    def _forget_slice(self, slices: Iterator[LostClients]) -> None:
        """Forget the next clients of a connection that ended; the others in later turns."""
        lost = next(slices, None)
        if lost is None:
            return
        loop = asyncio.get_running_loop()
        loop.call_soon(self._forget_slice, slices)
        if self.is_draining or not lost.clients:
            return
        if not self._lost:
            loop.call_later(RECONNECT_S, self._report_disconnected)
        self._lost.append((loop.time() + RECONNECT_S, lost))

    def _report_disconnected(self) -> None:
        """Report the clients that did not come back in time, and call this again for others."""
        loop = asyncio.get_running_loop()
        reported = 0
        while self._lost and self._lost[0][0] <= loop.time() and reported < REPORTED_A_TURN:
            _, lost = self._lost.popleft()
            reported += len(lost.clients)
            for client in lost.clients:
                if self._clients.is_lost(client, lost.loss) and self._is_consumer(client):
                    self._cluster.report_disconnected(client)
        if self._lost and not self.is_draining:
            loop.call_at(self._lost[0][0], self._report_disconnected)

    def _is_consumer(self, client: ClientKey) -> bool:
        listing = self._clients.find(client)
        return listing is not None and listing.client.client_type != v2.PRODUCER

    async def notify_client_termination(self, call: Call, request: bytes) -> bytes:
        """Forget a client that ends, end its polls, and release its messages to others.

        Only a connection that presented the id of a client can end it, and only for its user.
        Other calls get OK and change nothing: ids are no secrets. Silence then ends the client.
        """
        group = call.name_of(service.NotifyClientTerminationRequest.FromString(request).group)
        if group:
            call.require(group_resource(group), Action.SUB)
        presented = self._clients.find_presented(call.client, call.connection)
        for client in presented:
            self._clients.forget(client)
            self._polling.end_client(client)
        if presented:
            # Producers hold no messages, but not every client reports its type.
            self._cluster.report_ended(call.client)
        return OK_STATUS
