"""The end of a client by an operator. Nothing is kept: the client may come back at once (ADR 0078).

Polls end empty, pulls with the same code, and telemetry streams as at a drain of the proxy. Brokers
give the deliveries of the client to others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import structlog

from tidemill.common.errors import MessageNotFound
from tidemill.message.client_key import NO_OWNER, ClientKey
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.proxy.clients.clients import Clients
    from tidemill.proxy.cluster.cluster import BrokerCluster
    from tidemill.proxy.polling.shell import PollingShell
    from tidemill.proxy.server.access import AccessGate

log = structlog.get_logger()

_KICKED: Final = "an operator has ended this client; it may call again"


@final
class Kicks:
    """The kicks of clients at this proxy."""

    def __init__(
        self, gate: AccessGate, clients: Clients, polling: PollingShell, cluster: BrokerCluster
    ) -> None:
        self._gate = gate
        self._clients = clients
        self._polling = polling
        self._cluster = cluster

    def kick(self, asked: pb.KickClient) -> pb.KickedClient:
        """End a client, and return its polls and streams. A dry run only counts them."""
        owner: int | None = None
        if asked.user:
            owner = self._gate.find_owner(asked.user)
            if owner is None:
                return pb.KickedClient()
        client_id = asked.client_id
        records = [one.key for one in self._clients.find_all(client_id) if _is_of(one.key, owner)]
        polls = {
            key: count
            for key, count in self._polling.open_polls(client_id).items()
            if _is_of(key, owner)
        }
        streams = self._gate.streams.of_client(client_id, owner)
        telemetry = [watch for watch in streams if watch.call.method == "telemetry"]
        pulls = [watch for watch in streams if watch.call.method == "pull_message"]
        kicked = pb.KickedClient(
            is_known=bool(records or polls or telemetry or pulls),
            polls=sum(polls.values()) + len(pulls),
            streams=len(telemetry),
        )
        if asked.is_dry_run or not kicked.is_known:
            return kicked
        for watch in telemetry:
            watch.end(None)
        for watch in pulls:
            watch.end(MessageNotFound(_KICKED))
        for key in polls:
            self._polling.end_client(key)
        for key in records:
            self._clients.forget(key)
        # Brokers compare the owner, and no owner matches those of all users.
        self._cluster.report_revoked(ClientKey(client_id, NO_OWNER if owner is None else owner), ())
        log.info(
            "client kicked",
            client=client_id,
            user=asked.user,
            polls=kicked.polls,
            streams=kicked.streams,
            by=asked.requested_by,
        )
        return kicked


def _is_of(key: ClientKey, owner: int | None) -> bool:
    return owner in {None, key.owner}
