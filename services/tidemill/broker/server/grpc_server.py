"""The broker's gRPC server: the link, the admin service, health and reflection."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tidemill.broker.server.admin import BrokerAdminService
from tidemill.broker.server.link import BrokerLinkService
from tidemill.common.lifecycle import cannot_listen
from tidemill.common.rpc.stubs.tidemill.broker.v1 import broker_pb2, broker_pb2_grpc

if TYPE_CHECKING:
    from tidemill.broker.metrics import Traffic
    from tidemill.broker.server.rounds import Rounds
    from tidemill.broker.settings import BrokerSettings

FRAME_BYTES_MAX = 64 << 20  # a frame may carry many messages of 4 MiB
SERVICES = tuple(service.full_name for service in broker_pb2.DESCRIPTOR.services_by_name.values())


class BrokerServer:
    """The running server."""

    def __init__(self, server: grpc.aio.Server, links: BrokerLinkService, address: str) -> None:
        self._server = server
        self._links = links
        self.health = health.aio.HealthServicer()
        self.address = address

    async def drain(self, timeout_ms: int) -> None:
        """Accept nothing new, answer what is in flight, at most for `timeout_ms`."""
        await self.health.enter_graceful_shutdown()
        self._links.drain()
        await self._server.stop(timeout_ms / 1000)


@contextlib.asynccontextmanager
async def broker_server(
    rounds: Rounds, traffic: Traffic, settings: BrokerSettings
) -> AsyncIterator[BrokerServer]:
    """Serve until the block ends; raise StartRefused when the port is taken."""
    server = grpc.aio.server(
        options=(
            ("grpc.so_reuseport", int(settings.grpc_reuse_port)),
            ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
            ("grpc.max_send_message_length", FRAME_BYTES_MAX),
            # Proxies notice a dead broker, and it them, without waiting for TCP.
            ("grpc.keepalive_time_ms", 20_000),
            # A proxy's pings on an idle link must not end in GOAWAY too_many_pings.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
        )
    )
    links = BrokerLinkService(rounds, traffic, auto_create=settings.auto_create)
    broker_pb2_grpc.add_BrokerLinkServicer_to_server(links, server)
    broker_pb2_grpc.add_BrokerAdminServicer_to_server(
        BrokerAdminService(rounds, auto_create=settings.auto_create), server
    )
    wanted = f"{settings.grpc_host}:{settings.grpc_port}"
    try:
        port = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise cannot_listen(
            settings.grpc_host, settings.grpc_port, settings=("grpc_host", "grpc_port")
        ) from error
    running = BrokerServer(server, links, f"{settings.grpc_host}:{port}")
    health_pb2_grpc.add_HealthServicer_to_server(running.health, server)
    reflection.enable_server_reflection((*SERVICES, reflection.SERVICE_NAME), server)
    for service in ("", *SERVICES):
        await running.health.set(service, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    try:
        yield running
    finally:
        await server.stop(None)
