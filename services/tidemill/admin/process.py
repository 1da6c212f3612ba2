"""The admin process: connect to the brokers, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import structlog
import uvicorn

from tidemill.admin.app import create_app
from tidemill.admin.audit.access_reports import RequestReports
from tidemill.admin.cluster.ban_copy import BanCopy
from tidemill.admin.cluster.broker_client import broker_client
from tidemill.admin.cluster.broker_credentials import broker_credentials
from tidemill.admin.cluster.broker_health import BrokerHealth
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.controllers import ControllerClients
from tidemill.admin.cluster.first_admin import (
    BootstrapPolicy,
    FirstAdmin,
    FirstAdminCreation,
    read_first_admin,
)
from tidemill.admin.cluster.item_copy import ItemCopy
from tidemill.admin.cluster.job_users import JobUserUpkeep
from tidemill.admin.cluster.master_addresses import MasterAddresses
from tidemill.admin.cluster.processes import Processes
from tidemill.admin.cluster.security_client import SecurityClient
from tidemill.admin.cluster.security_copy import AdminSecurityCopy
from tidemill.admin.grpc.calls import AdminParts
from tidemill.admin.grpc.server import GrpcDoor, admin_grpc_server, admin_grpc_tls
from tidemill.admin.http.access import AccessControl, BodyLimit
from tidemill.admin.http.banned_callers import BannedCallers
from tidemill.admin.http.connections import HttpConnection, InvalidRequestFilter
from tidemill.admin.http.forwarded import parse_networks
from tidemill.admin.http.identities import IdentityCheck
from tidemill.admin.http.metrics import AdminMetrics, RequestCounter
from tidemill.admin.http.service_accounts import rest_service_accounts_of
from tidemill.admin.messages.quotas import RestSendQuotas, lease_from
from tidemill.admin.routes.definitions import BODY_LIMITS
from tidemill.admin.routes.message_batches import BATCH_BYTES_MAX, BATCHES
from tidemill.admin.routes.messages import MESSAGES
from tidemill.admin.scaling.demand_queries import DemandQueries
from tidemill.admin.scaling.server import scaler_server, scaler_tls
from tidemill.admin.settings import AdminSettings
from tidemill.common.addresses import HostPort, is_loopback, without_brackets
from tidemill.common.clock import SystemClock
from tidemill.common.lifecycle import StartError, announce_ready, bound_sockets, run, stop_on_signal
from tidemill.common.log import configure_logging
from tidemill.common.metrics import Registry
from tidemill.common.metrics_server import MetricsServer
from tidemill.common.parent import die_with_parent
from tidemill.common.readiness import ProcessReadiness
from tidemill.common.repeating import repeating
from tidemill.common.scrape_access import scrape_access_of
from tidemill.common.token_file import TokenFile
from tidemill.security.access_lines import TICK_PERIOD_S, access_log_metrics, write_line
from tidemill.security.access_log import AccessLog
from tidemill.security.issuer_keys import IssuerKeys, following, issuer_key_metrics, issuer_keys_of
from tidemill.security.key_file import open_key_file
from tidemill.security.quotas import QUOTA
from tidemill.security.table import parse_mode
from tidemill.transport.aio import metrics
from tidemill.transport.aio.misuse_log import MisuseLog
from tidemill.transport.aio.process_service import ProcessService
from tidemill.transport.aio.tls import (
    Certificates,
    ReloadableCredentials,
    TlsFiles,
    newest_context,
    server_context,
)

if TYPE_CHECKING:
    import grpc
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from tidemill.security.secret_keys import SecretKeys

BACKLOG = 128  # connections not accepted yet

log = structlog.get_logger()


def main(arguments: Sequence[str]) -> int:
    """Start the admin process with command-line `arguments`; return its exit status."""
    settings = AdminSettings.load(arguments)
    configure_logging(
        process=settings.name or "admin", level=settings.log_level, log_format=settings.log_format
    )
    if settings.supervisor_fd is not None:
        die_with_parent()
    return run(lambda: serve(settings))


async def serve(settings: AdminSettings) -> None:
    """Serve the REST API, and the service Admin and the scaler if they have ports, until SIGTERM.

    It is one function, because each part needs those that were entered before it.
    """
    node_id = settings.node_id or settings.name or "admin"
    registry = Registry(cluster=settings.cluster, node_type="admin", node_id=node_id)
    served, credentials = tls_of(settings), broker_credentials(settings)
    for_keda, for_grpc = scaler_tls(settings), admin_grpc_tls(settings)
    certificates = Certificates(
        [each for each in (served, credentials, for_keda, for_grpc) if each is not None]
    )
    registry.register(certificates.collect)
    counted = AdminMetrics()
    registry.register(counted.collect)
    clock = SystemClock()
    access_log = AccessLog(settings.name or "admin", clock.wall_ms, clock.monotonic_ms, write_line)
    registry.register(lambda: access_log_metrics(access_log))
    file = settings.admin_token_file
    token = TokenFile(file, setting="admin_token_file") if file else None
    keys = open_key_file(settings.security_key_file, clock.monotonic_ms)
    issuer_keys = issuer_keys_of(settings, clock.monotonic_ms)
    registry.register(lambda: issuer_key_metrics(issuer_keys))
    first_admin = first_admin_of(settings)
    with (
        stop_on_signal(supervisor_fd=settings.supervisor_fd, on_hangup=certificates.reload) as stop,
        listening(settings.host, settings.port) as listeners,
    ):
        async with contextlib.AsyncExitStack() as running:
            enter = running.enter_async_context
            await enter(certificates.watching())
            await enter(repeating(access_log.tick, period_s=TICK_PERIOD_S))
            await enter(following(issuer_keys))
            brokers, controllers = await enter(connected(settings, credentials))
            checks = [BrokerHealth(await brokers.client_at(a), a) for a in settings.broker]
            for check in checks:
                await enter(check.running())
            readiness = ProcessReadiness(
                lambda: [peer for check in checks for peer in check.peers()],
                unready_after_ms=settings.unready_after_ms,
                find_problems=brokers.problems,
            )
            await enter(brokers.watching())
            floor = parse_mode(settings.security_floor)
            copy = AdminSecurityCopy(SecurityClient(brokers).find, clock.monotonic_ms, floor=floor)
            await enter(copy.running())
            await enter(creating_users(settings, SecurityClient(brokers), keys, first_admin))
            scrapes = await enter(
                MetricsServer(registry, readiness, access=scrape_access_of(settings)).serving(
                    settings.metrics_host, settings.metrics_port
                )
            )
            demands = DemandQueries(brokers)
            await enter(demands.running())
            app = create_app(
                brokers,
                demands,
                controllers,
                item_bytes_max=settings.message_item_bytes_max,
                secret_keys=keys,
                key_file=settings.security_key_file,
                security_floor=floor,
                access_log=access_log,
                process=settings.name or "admin",
                needs_identity=True,
            )
            own = ProcessService(
                "admin",
                node_id,
                settings,
                clock.wall_ms,
                is_ready=lambda: readiness.report().is_ready,
                certificates=certificates,
            )
            app.state.processes = Processes(own, brokers, controllers, credentials)
            await enter(app.state.processes.running())
            await enter(app.state.activity.running())
            await enter(app.state.timer_histograms.running())
            await enter(app.state.own_operations.running())
            identities = identities_of(app, settings, token, copy, issuer_keys)
            door = GrpcDoor(parts_of(app, settings), identities, for_grpc)
            servers = {
                "scaler": await enter(scaler_server(demands, settings, registry, for_keda)),
                "adminGrpc": await enter(admin_grpc_server(door, settings, registry)),
            }
            grpc_servers = {name: server for name, server in servers.items() if server}
            if grpc_servers:
                registry.register(functools.partial(metrics.collect, *grpc_servers.values()))
            await enter(
                serving(
                    with_access_control(app, settings, counted, identities),
                    listeners,
                    settings.drain_timeout_ms,
                    tls=newest_context(served) if served else None,
                )
            )
            gc.collect()
            gc.freeze()
            readiness.phase = "serving"
            scheme = "https" if served else "http"
            port = listeners[0].getsockname()[1]
            address = f"{scheme}://{HostPort(without_brackets(settings.host), port)}"
            addresses = {name: server.address for name, server in grpc_servers.items()}
            own.address = address
            announce_ready(settings.supervisor_fd, admin=address, metrics=scrapes.url, **addresses)
            warn_about_open_doors(settings, address)
            log.info("admin serves", admin=address, metrics=scrapes.url, **addresses)
            await stop.wait()
            readiness.phase = "draining"
            # Load balancers see the readiness before the port is closed.
            await asyncio.sleep(settings.drain_delay_ms / 1000)
            await app.state.live_views.end()  # The server waits for the end of streams.
    log.info("admin stopped")


def warn_about_open_doors(settings: AdminSettings, address: str) -> None:
    """Log a warning for each door that admin_open or admin_plain leaves open."""
    if is_loopback(settings.host):
        return
    if not settings.admin_token_file and settings.security_floor != "on":
        log.warning(
            "REST API needs no credentials unless the security mode is on, so every host that"
            " reaches it may change everything (admin_open)",
            admin=address,
        )
    if not settings.admin_tls_certificate_file:
        log.warning(
            "REST API has no TLS, so the network sees credentials and messages (admin_plain)",
            admin=address,
        )


@contextlib.asynccontextmanager
async def connected(
    settings: AdminSettings, credentials: ReloadableCredentials[grpc.ChannelCredentials] | None
) -> AsyncIterator[tuple[Brokers, ControllerClients]]:
    """Stay connected to the brokers, and follow their masters, until the block ends."""
    controllers = ControllerClients(settings.controllers, credentials)
    masters = MasterAddresses(controllers)
    connect = functools.partial(
        broker_client,
        timeout_ms=settings.request_timeout_ms,
        credentials=credentials,
        masters=masters,
    )
    brokers = Brokers(settings.broker, connect, timeout_ms=settings.request_timeout_ms)
    async with masters.following(), brokers.running():
        yield brokers, controllers


def tls_of(settings: AdminSettings) -> ReloadableCredentials[ssl.SSLContext] | None:
    """Return the TLS context of the API, or None for plain HTTP. Raises StartError."""
    if not settings.admin_tls_certificate_file:
        return None
    files = TlsFiles(
        certificate=settings.admin_tls_certificate_file,
        key=settings.admin_tls_key_file,
        certificate_setting="admin_tls_certificate_file",
        key_setting="admin_tls_key_file",
    )
    make = functools.partial(server_context, files, protocols=("http/1.1",))
    return ReloadableCredentials("admin", files, make)


def first_admin_of(settings: AdminSettings) -> FirstAdmin | None:
    """Return the first administrator; None without a file. Raises StartError."""
    if not settings.security_bootstrap_file:
        return None
    if not settings.security_key_file:
        raise StartError(
            "security_bootstrap_file needs security_key_file, which encrypts the secret; set both"
        )
    return read_first_admin(settings.security_bootstrap_file)


@contextlib.asynccontextmanager
async def creating_users(
    settings: AdminSettings,
    items: SecurityClient,
    keys: Callable[[], SecretKeys | None],
    first_admin: FirstAdmin | None,
) -> AsyncIterator[None]:
    """Create the users of the settings until the block ends. Raises StartError."""
    clock, process = SystemClock(), settings.name or "admin"
    async with contextlib.AsyncExitStack() as running:
        if settings.security_job_users_dir:
            if not settings.security_key_file:
                raise StartError(
                    "security_job_users_dir needs security_key_file, which encrypts the secrets;"
                    " set both"
                )
            upkeep = JobUserUpkeep(
                items, keys, clock.wall_ms, folder=settings.security_job_users_dir, process=process
            )
            await running.enter_async_context(upkeep.running())
        if first_admin is not None:
            creation = FirstAdminCreation(
                items,
                keys,
                clock.wall_ms,
                admin=first_admin,
                policy=BootstrapPolicy(settings.security_bootstrap_policy),
                process=process,
            )
            await running.enter_async_context(creation.running())
        yield


def identities_of(
    app: FastAPI,
    settings: AdminSettings,
    token: TokenFile | None,
    copy: AdminSecurityCopy,
    issuer_keys: IssuerKeys | None,
) -> BannedCallers:
    """Return the check of credentials, which the REST API and the service Admin share."""
    clock, reports = SystemClock(), RequestReports(app.state.access_log, app.state.paths)
    read_all = SecurityClient(app.state.brokers).all
    identities = IdentityCheck(
        copy,
        app.state.secret_keys,
        wall_ms=clock.wall_ms,
        monotonic_ms=clock.monotonic_ms,
        token=token,
        reports=reports,
        sessions=app.state.sessions,
        uses=app.state.secret_uses,
        accounts=rest_service_accounts_of(settings, issuer_keys, copy, read_all),
    )
    quotas = ItemCopy(QUOTA, read_all, lambda: copy.version)
    app.state.send_quotas = RestSendQuotas(lease_from(app.state.brokers), quotas)
    bans = BanCopy(read_all, lambda: copy.version)
    return BannedCallers(identities, bans, clock.wall_ms, reports)


def parts_of(app: FastAPI, settings: AdminSettings) -> AdminParts:
    """Return what the service Admin shares with the REST API."""
    return AdminParts(
        brokers=app.state.brokers,
        composer=app.state.composer,
        quotas=app.state.send_quotas,
        access_log=app.state.access_log,
        cluster=settings.cluster,
        process=app.state.process,
    )


def with_access_control(
    app: FastAPI, settings: AdminSettings, metrics: AdminMetrics, identities: BannedCallers
) -> ASGIApp:
    """Return the application behind its access control. Metrics count rejected requests too."""
    door = AccessControl(
        app,
        hosts=[settings.host, *settings.admin_hosts],
        body_bytes_max=settings.admin_body_bytes_max,
        large={
            MESSAGES: BodyLimit(settings.admin_body_bytes_max),
            BATCHES: BodyLimit(BATCH_BYTES_MAX, "send the lines in several batches"),
            **BODY_LIMITS,
        },
        reports=RequestReports(app.state.access_log, app.state.paths),
        identities=identities,
        balancers=parse_networks(settings.admin_forwarded_from),
    )
    counter = RequestCounter(door, metrics, app.state.paths)
    app.state.api = counter  # For the pages of the console.
    return counter


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Listen on `port` (0: a free one) until the block ends; raise StartError if it is in use."""
    settings = "host (standalone: admin_host)", "port (standalone: admin_port)"
    with contextlib.ExitStack() as stack:
        listeners = bound_sockets(host, port, settings=settings)
        for listener in listeners:
            stack.enter_context(listener)
            listener.listen(BACKLOG)
        yield listeners


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    listeners: list[socket.socket],
    drain_timeout_ms: int,
    *,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Serve `app` until the block ends, then finish the requests in flight."""
    logging.getLogger("uvicorn.error").addFilter(InvalidRequestFilter())
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            http=functools.partial(HttpConnection, misuse=MisuseLog()),  # type: ignore[arg-type]  # uvicorn only calls it.
            ws="none",
            # The caller is the connected address, not the value of a header.
            proxy_headers=False,
            ssl_context_factory=(lambda _config, _default: tls) if tls else None,
            timeout_graceful_shutdown=drain_timeout_ms // 1000,
        )
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=listeners), name="http")
        yield
        server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; `stop_on_signal` handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
