"""The port of the gRPC service Admin, with the address and the TLS files of the REST API."""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tidemill.admin.grpc.metrics import AdminGrpcMetrics
from tidemill.admin.grpc.service import SERVICE, AdminService
from tidemill.transport.aio import health
from tidemill.transport.aio.listener import ListenSettings
from tidemill.transport.aio.reflection import reflection_methods
from tidemill.transport.aio.server import RpcServer
from tidemill.transport.aio.tls import (
    ReloadableCredentials,
    TlsFiles,
    newest_context,
    server_context,
)
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.admin.grpc.calls import AdminParts
    from tidemill.admin.http.banned_callers import Identities
    from tidemill.admin.settings import AdminSettings
    from tidemill.common.metrics import Registry

# Of a request: a body over its own limit gets a status with its own code.
REQUEST_BYTES_MAX: Final = 8 << 20
HELD_BYTES_MAX: Final = 64 << 20  # of all connections
CONNECTIONS_MAX: Final = 64  # consoles and tools of operators
# One address does not take the connections of all others. A connection needs no credentials.
CONNECTIONS_PER_ADDRESS_MAX: Final = 16
LIMITS: Final = Limits(streams_max=64, held_bytes_max=16 << 20)


@dataclass(frozen=True, slots=True)
class GrpcDoor:
    """What the calls and the check of their credentials use of the process."""

    parts: AdminParts
    identities: Identities
    tls: ReloadableCredentials[ssl.SSLContext] | None


def admin_grpc_tls(settings: AdminSettings) -> ReloadableCredentials[ssl.SSLContext] | None:
    """Return the TLS context of the port; None without TLS. Raises StartError."""
    if settings.admin_grpc_port is None or not settings.admin_tls_certificate_file:
        return None
    files = TlsFiles(
        certificate=settings.admin_tls_certificate_file,
        key=settings.admin_tls_key_file,
        certificate_setting="admin_tls_certificate_file",
        key_setting="admin_tls_key_file",
    )
    return ReloadableCredentials("admin_grpc", files, functools.partial(server_context, files))


@contextlib.asynccontextmanager
async def admin_grpc_server(
    door: GrpcDoor, settings: AdminSettings, registry: Registry
) -> AsyncIterator[RpcServer | None]:
    """Serve the calls until the block ends, then drain. Yield the server; None without a port."""
    if settings.admin_grpc_port is None:
        yield None
        return
    counted = AdminGrpcMetrics()
    service = AdminService(door.parts, door.identities, counted)
    serving = health.HealthService((SERVICE,))
    listen = ListenSettings(
        host=settings.host,
        port=settings.admin_grpc_port,
        tls="required" if door.tls else "off",
        tls_context=newest_context(door.tls) if door.tls else None,
        connections_max=CONNECTIONS_MAX,
        connections_per_address_max=CONNECTIONS_PER_ADDRESS_MAX,
        setting_names=("host (standalone: admin_host)", "admin_grpc_port"),
    )
    server = RpcServer(
        {
            **service.methods(),
            **serving.methods(),
            **reflection_methods((SERVICE, health.SERVICE), service.admit),
        },
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
            await server.drain(settings.drain_timeout_ms / 1000)
