"""The controller's port."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from tidemill.controller.server.service import SERVICE, ControllerService
from tidemill.transport.aio import health
from tidemill.transport.aio.listener import ListenSettings
from tidemill.transport.aio.server import RpcServer
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.controller.settings import ControllerSettings
    from tidemill.transport.aio.process_service import ProcessService

MESSAGE_BYTES_MAX: Final = 256 << 10  # a registration or a heartbeat: some hundred bytes
# Clients are replicas, proxies and admin processes: few, with small messages. Heartbeats detect a
# vanished replica, so its connection may stay open for a while.
LIMITS: Final = Limits(keepalive_period_s=5.0, keepalive_timeout_s=15.0, idle_timeout_s=3_600.0)


@contextlib.asynccontextmanager
async def controller_server(
    service: ControllerService,
    process: ProcessService,
    settings: ControllerSettings,
    tls: ssl.SSLContext | None,
) -> AsyncIterator[RpcServer]:
    """Serve until the block ends, and drain; raise StartError when the port is taken."""
    serving = health.HealthService((SERVICE,))
    listen = ListenSettings(
        host=settings.grpc_host,
        port=settings.grpc_port,
        reuse_port=settings.grpc_reuse_port,
        tls="required" if tls else "off",
        tls_context=tls,
    )
    server = RpcServer(
        {**service.methods(), **process.methods(), **serving.methods()},
        LIMITS,
        listen,
        message_bytes_max=MESSAGE_BYTES_MAX,
    )
    async with server.serving():
        try:
            yield server
        finally:
            serving.drain()
            await service.drain()
            await server.drain(settings.drain_timeout_ms / 1000)
