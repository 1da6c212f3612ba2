"""The port of the scaler, which serves only KEDA."""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from tidemill.admin.scaling.demand_queries import DemandQueries
from tidemill.admin.scaling.metrics import ScalerMetrics
from tidemill.admin.scaling.service import SERVICE, ExternalScaler
from tidemill.transport.aio import health
from tidemill.transport.aio.listener import ListenSettings
from tidemill.transport.aio.server import RpcServer
from tidemill.transport.aio.tls import (
    ReloadableCredentials,
    TlsFiles,
    newest_context,
    server_context,
)
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.admin.settings import AdminSettings
    from tidemill.common.metrics import Registry

REQUEST_BYTES_MAX: Final = 64 << 10  # the metadata of a trigger has a few lines
HELD_BYTES_MAX: Final = 64 << 20  # of all connections; a normal one holds a few KiB
CONNECTIONS_MAX: Final = 64  # the operator of KEDA opens one per address in triggers
# A stream may be silent for a day.
LIMITS: Final = Limits(streams_max=1_024, large_messages_bytes=1 << 20, held_bytes_max=4 << 20)


def scaler_tls(settings: AdminSettings) -> ReloadableCredentials[ssl.SSLContext] | None:
    """Return the TLS context of the scaler, or None without TLS. Raises StartError."""
    if settings.scaler_port is None or not settings.scaler_tls_certificate_file:
        return None
    files = TlsFiles(
        certificate=settings.scaler_tls_certificate_file,
        key=settings.scaler_tls_key_file,
        authorities=settings.scaler_tls_client_ca_file,
        certificate_setting="scaler_tls_certificate_file",
        key_setting="scaler_tls_key_file",
        authorities_setting="scaler_tls_client_ca_file",
    )
    return ReloadableCredentials("scaler", files, functools.partial(server_context, files))


@contextlib.asynccontextmanager
async def scaler_server(
    demands: DemandQueries,
    settings: AdminSettings,
    registry: Registry,
    tls: ReloadableCredentials[ssl.SSLContext] | None,
) -> AsyncIterator[RpcServer | None]:
    """Serve KEDA until the block ends, then drain. Yield the server; None without a port."""
    if settings.scaler_port is None:
        yield None
        return
    counted = ScalerMetrics()
    scaler, serving = ExternalScaler(demands, counted), health.HealthService((SERVICE,))
    listen = ListenSettings(
        host=settings.scaler_host,
        port=settings.scaler_port,
        tls="required" if tls else "off",
        tls_context=newest_context(tls) if tls else None,
        connections_max=CONNECTIONS_MAX,
        connections_per_address_max=CONNECTIONS_MAX,
    )
    server = RpcServer(
        {**scaler.methods(), **serving.methods()},
        LIMITS,
        listen,
        message_bytes_max=REQUEST_BYTES_MAX,
        held_bytes_max=HELD_BYTES_MAX,
    )
    registry.register(counted.collect)
    async with server.serving():
        try:
            yield server
        finally:
            serving.drain()
            scaler.drain()
            await server.drain(settings.drain_timeout_ms / 1000)
