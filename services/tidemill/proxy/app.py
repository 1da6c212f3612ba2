"""The proxy process: its parts in their start order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass

import structlog

from tidemill.common.addresses import HostPort, is_loopback
from tidemill.common.clock import Clock, SystemClock
from tidemill.common.lifecycle import announce_ready, stop_on_signal, tune_garbage_collector
from tidemill.common.log import is_text_format
from tidemill.common.metrics import Registry
from tidemill.common.metrics_server import MetricsServer
from tidemill.common.readiness import ProcessReadiness
from tidemill.common.repeating import repeating
from tidemill.common.scrape_access import scrape_access_of
from tidemill.common.slow_calls import SlowCalls
from tidemill.message.client_key import ClientKey
from tidemill.proxy.clients.clients import Clients
from tidemill.proxy.clients.metrics import ClientMetrics
from tidemill.proxy.clients.questions import Questions
from tidemill.proxy.clients.relay import Relays
from tidemill.proxy.clients.settings import measured_languages
from tidemill.proxy.clients.settings_updates import SettingsUpdates
from tidemill.proxy.cluster.broker_calls import BrokerCalls
from tidemill.proxy.cluster.cluster import BrokerCluster
from tidemill.proxy.cluster.routing import scheme_of
from tidemill.proxy.cluster.security_age import SecurityAge
from tidemill.proxy.keeper import KeeperState, give_to_keep, take_over
from tidemill.proxy.link import BrokerLink, LinkLimits
from tidemill.proxy.metrics import ProxyMetrics
from tidemill.proxy.polling.shell import PollingShell
from tidemill.proxy.polling_metrics import PollingMetrics
from tidemill.proxy.quotas.deliveries import DeliveryQuotas
from tidemill.proxy.quotas.home import lease_from
from tidemill.proxy.quotas.sends import SendQuotas
from tidemill.proxy.server.access import AccessGate
from tidemill.proxy.server.access_reports import CallReports
from tidemill.proxy.server.boundary import Boundary
from tidemill.proxy.server.client_lifecycle import ClientLifecycle
from tidemill.proxy.server.grpc_server import GrpcServer
from tidemill.proxy.server.kicks import Kicks
from tidemill.proxy.server.methods import Methods, methods
from tidemill.proxy.server.metrics_receiver import MetricsReceiver
from tidemill.proxy.server.pipeline_source import pipeline_methods
from tidemill.proxy.server.pipeline_table import pipeline_table
from tidemill.proxy.server.producer import Producer
from tidemill.proxy.server.pull_pages import PullPages
from tidemill.proxy.server.puller import Puller
from tidemill.proxy.server.receive import Receiver
from tidemill.proxy.server.revocation_lines import RevocationLines
from tidemill.proxy.server.routes import Routes
from tidemill.proxy.server.service_accounts import service_accounts_of
from tidemill.proxy.server.settle import Settler
from tidemill.proxy.server.telemetry import Telemetry
from tidemill.proxy.settings import ProxySettings
from tidemill.security.access_lines import TICK_PERIOD_S, access_log_metrics, write_line
from tidemill.security.access_log import AccessLog
from tidemill.security.acl import Resource
from tidemill.security.issuer_keys import IssuerKeys, following, issuer_key_metrics, issuer_keys_of
from tidemill.security.key_file import open_key_file
from tidemill.security.secret_keys import SecretKeys
from tidemill.security.secret_uses import SecretUses
from tidemill.security.table import Mode
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.aio.channel import connected
from tidemill.transport.aio.connect import Connector
from tidemill.transport.aio.process_service import ProcessService
from tidemill.transport.aio.tls import (
    Certificates,
    ReloadableCredentials,
    TlsFiles,
    client_context,
    cluster_files,
    newest_context,
    server_context,
)
from tidemill.transport.routes.master_routes import MasterRoutes

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyParts:
    """The parts of a proxy that start, serve and stop."""

    metrics: ProxyMetrics
    registry: Registry
    certificates: Certificates
    server_tls: ssl.SSLContext | None
    routes: MasterRoutes
    cluster: BrokerCluster
    calls: BrokerCalls
    send_quotas: SendQuotas
    delivery_quotas: DeliveryQuotas
    relays: Relays
    access_log: AccessLog
    revocation_lines: RevocationLines
    issuer_keys: IssuerKeys | None
    telemetry: Telemetry
    clients: Clients
    client_life: ClientLifecycle
    server: GrpcServer
    readiness: ProcessReadiness
    process: ProcessService


async def serve(settings: ProxySettings) -> None:
    """Run the proxy until SIGTERM, then finish the running calls.

    The proxy serves no call before a broker has sent its configuration.
    """
    kept = KeeperState() if settings.keeper_fd is None else take_over(settings.keeper_fd)
    if kept.former_end:
        log.error("the proxy died, and was started again", ended=kept.former_end)
    parts = build(settings, kept)
    starter_fd = settings.supervisor_fd if settings.keeper_fd is None else settings.keeper_fd
    with stop_on_signal(supervisor_fd=starter_fd, on_hangup=parts.certificates.reload) as stop:
        async with (
            parts.certificates.watching(),
            MetricsServer(
                parts.registry, parts.readiness, access=scrape_access_of(settings)
            ).serving(settings.metrics_host, settings.metrics_port) as endpoint,
            parts.routes.following(),
            parts.cluster.running(),
            parts.calls.running(),
            parts.send_quotas.running(),
            parts.delivery_quotas.running(),
            parts.relays.running(),
            repeating(parts.access_log.tick, period_s=TICK_PERIOD_S),
            repeating(parts.revocation_lines.tick, period_s=TICK_PERIOD_S),
            sending(parts.telemetry.updates),
            following(parts.issuer_keys),
        ):
            if await first_of(parts.cluster.configured(), stop):
                async with (
                    parts.server.serving(settings, parts.server_tls),
                    watched(parts.readiness, parts.server),
                ):
                    announce(settings, parts, metrics_url=endpoint.url)
                    await stop.wait()
                    await drain(settings, parts)
    log.info("proxy stopped")


def build(settings: ProxySettings, kept: KeeperState) -> ProxyParts:
    """Wire the parts of the process. Nothing is connected or started yet. Raises StartError.

    It is one piece, because it is the list of the parts.
    """
    metrics = ProxyMetrics(former_lives=kept.former_lives)
    clock = SystemClock()
    clients = Clients(clients_max=settings.clients_max, monotonic_ms=clock.monotonic_ms)
    registry = Registry(
        cluster=settings.cluster,
        node_type="proxy",
        node_id=settings.node_id or settings.name,
        proxy_mode="cluster",
    )
    # Check the files before the wait for the broker, so that an error is reported at once.
    front, link = front_tls(settings), link_tls(settings)
    certificates = Certificates([each for each in (front, link) if each is not None])
    connect = connect_of(link)
    routes = MasterRoutes(
        settings.controllers,
        settings.routes_file,
        connect=connect,
        name=settings.name,
        cluster=settings.cluster,
    )
    cluster = cluster_of(settings, metrics, connect=connect, routes=routes)
    keys = open_key_file(
        settings.security_key_file, clock.monotonic_ms, cluster.security.note_all_changed
    )
    issuer_keys = issuer_keys_of(settings, clock.monotonic_ms)
    accounts = service_accounts_of(settings, cluster.security, issuer_keys, clock.monotonic_ms)
    gate = AccessGate(cluster.security, keys, clock.wall_ms, accounts)
    gate.credentials.signature_age_max_ms = settings.signature_age_max_ms
    bans = cluster.security.bans
    age = SecurityAge(cluster, settings.security_stale_max_ms)
    if settings.security_stale_max_ms:
        gate.check_age = age.check
    access_log = AccessLog(settings.name, clock.wall_ms, clock.monotonic_ms, write_line)
    gate.reports = CallReports(access_log)

    revocation_lines = RevocationLines(clock.monotonic_ms)

    def on_revoked(client: ClientKey, lost: Sequence[Resource]) -> None:
        revocation_lines.note(client)
        cluster.report_revoked(client, lost)  # Its messages go to other consumers at once.

    gate.revoked.on_revoked = on_revoked
    calls = BrokerCalls(connect)
    table, lease = cluster.security.quotas, lease_from(cluster, calls)
    sends = SendQuotas(table, lease, clock.monotonic_ms)
    deliveries = DeliveryQuotas(table, lease, clock.monotonic_ms)
    polling = PollingShell(
        cluster, clock, pop_timeout_ms=settings.request_timeout_ms, quotas=deliveries
    )
    PollingMetrics(registry, polling, cluster.knows)
    telemetry = telemetry_of(settings, cluster, clients, clock)
    client_life = ClientLifecycle(cluster, clients, polling, clock)
    pages = PullPages(calls)
    slow_calls = SlowCalls(settings.slow_call_ms, clock.wall_ms)
    measures = ClientMetrics(
        registry, clock.monotonic_ms, knows_topic=cluster.knows_topic, knows=cluster.knows
    )
    server = GrpcServer(
        wire(
            settings, cluster, polling, clients, telemetry, client_life, clock, calls, pages, sends
        ),
        Boundary(metrics, clock, slow_calls),
        MetricsReceiver(measures) if settings.client_metrics else None,
        pipeline_methods(pipeline_table(cluster, calls, pages, deliveries), metrics, gate)
        if settings.pipeline_source
        else None,
        kept.listening,
        on_lost=client_life.forget_connection,
        is_banned=lambda host: bans.find_host(host, clock.wall_ms()) is not None,
        gate=gate,
    )
    bans.on_addresses = lambda: server.close_banned(client_life.end_connection)
    metrics.register(registry)
    for collect in (
        clients.collect,
        certificates.collect,
        server.collect,
        gate.collect,
        age.collect,
    ):
        registry.register(collect)
    registry.register(lambda: access_log_metrics(access_log))
    registry.register(lambda: issuer_key_metrics(issuer_keys))
    readiness = ProcessReadiness(
        cluster.peers, unready_after_ms=settings.unready_after_ms, find_missing=gate.missing
    )
    process = ProcessService(
        "proxy",
        settings.name,
        settings,
        clock.wall_ms,
        is_ready=lambda: readiness.report().is_ready,
        certificates=certificates,
        slow_calls=slow_calls,
    )
    relays = Relays(
        settings.name,
        cluster.masters,
        Questions(
            clients,
            clock.monotonic_ms,
            access_log,
            Kicks(gate, clients, polling, cluster).kick,
            lambda question: security_state_of(
                age.version,
                cluster.security.mode,
                keys(),
                gate.credentials.uses,
                has_open_port=has_open_port(settings),
                user_id=question.user_id,
            ),
            process,
        ).answer,
        publishers=clients.publishers,
        connect=connect,
    )
    return ProxyParts(
        metrics=metrics,
        registry=registry,
        certificates=certificates,
        server_tls=newest_context(front) if front else None,
        routes=routes,
        cluster=cluster,
        calls=calls,
        send_quotas=sends,
        delivery_quotas=deliveries,
        relays=relays,
        access_log=access_log,
        revocation_lines=revocation_lines,
        issuer_keys=issuer_keys,
        telemetry=telemetry,
        clients=clients,
        client_life=client_life,
        server=server,
        readiness=readiness,
        process=process,
    )


def announce(settings: ProxySettings, parts: ProxyParts, *, metrics_url: str) -> None:
    """Report that the proxy serves: to the keeper, to metrics and to the starter."""
    if settings.keeper_fd is not None:
        give_to_keep(
            settings.keeper_fd,
            parts.server.descriptors(),
            logs_text=is_text_format(settings.log_format),
        )
    parts.metrics.is_serving, parts.readiness.phase = True, "serving"
    parts.process.address = parts.server.address
    addresses = {"grpc": parts.server.address, "metrics": metrics_url}
    log.info("proxy serving", tls=settings.tls, **addresses)
    warn_of_open_port(settings, parts.cluster.security.mode)
    tune_garbage_collector()
    announce_ready(settings.supervisor_fd, **addresses)


def warn_of_open_port(settings: ProxySettings, mode: Mode) -> None:
    """Warn once of a port that other machines reach without credentials or without TLS."""
    port = str(HostPort(settings.grpc_host, settings.grpc_port))
    if is_loopback(settings.grpc_host):
        return
    if mode is not Mode.ON:
        log.warning("every host that reaches this port can read and send all messages", port=port)
    elif has_open_port(settings):
        log.warning("credentials and messages cross the network without TLS", port=port)


async def drain(settings: ProxySettings, parts: ProxyParts) -> None:
    """Move clients to other proxies, and finish the running calls."""
    parts.metrics.is_serving, parts.readiness.phase = False, "draining"
    parts.client_life.is_draining = True
    parts.server.report_health(False)
    # Balancers must see the state before clients reconnect.
    await asyncio.sleep(settings.drain_delay_ms / 1000)
    # Stop accepting first: clients reconnect at once, and must reach another proxy.
    parts.server.stop_accepting()
    await parts.clients.streams.ask_to_reconnect()
    parts.cluster.release_polls()
    await parts.server.drain(settings.drain_timeout_ms)
    await parts.cluster.wait_reported()


@contextlib.asynccontextmanager
async def sending(updates: SettingsUpdates) -> AsyncIterator[None]:
    """Send the settings of changed consumer groups to clients until the block ends."""
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(updates.run(), name="settings updates")
        yield
        run.cancel()


@contextlib.asynccontextmanager
async def watched(readiness: ProcessReadiness, server: GrpcServer) -> AsyncIterator[None]:
    """Report each change of readiness to gRPC health checks until the block ends."""
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(readiness.report_changes(server.report_health), name="readiness")
        yield
        watch.cancel()


def front_tls(settings: ProxySettings) -> ReloadableCredentials[ssl.SSLContext] | None:
    """Return the TLS credentials for clients; None without TLS. Raises StartError."""
    if settings.tls == "off":
        return None
    files = TlsFiles(
        certificate=settings.tls_certificate_file,
        key=settings.tls_key_file,
        authorities=settings.tls_client_ca_file,
    )
    return ReloadableCredentials("clients", files, functools.partial(server_context, files))


def link_tls(settings: ProxySettings) -> ReloadableCredentials[ssl.SSLContext] | None:
    """Return the TLS credentials of links to brokers; None without TLS. Raises StartError."""
    files = cluster_files(settings)
    if files is None:
        return None
    return ReloadableCredentials(
        "cluster", files, functools.partial(client_context, files), is_server=False
    )


def connect_of(link: ReloadableCredentials[ssl.SSLContext] | None) -> Connector:
    """Return the function that connects to a broker."""
    return connected if link is None else functools.partial(connected, tls=newest_context(link))


def cluster_of(
    settings: ProxySettings,
    metrics: ProxyMetrics,
    *,
    connect: Connector = connected,
    routes: MasterRoutes | None = None,
) -> BrokerCluster:
    """Return the broker groups of the settings, without connections."""
    limits = LinkLimits(
        pending_max=settings.link_pending_max,
        pending_bytes_max=settings.memory_bytes_max,
        patience_ms=settings.unready_after_ms,
        clients_max=settings.clients_max,
    )

    def open_link(address: str) -> BrokerLink:
        return BrokerLink(address, metrics, limits, connect=connect, routes=routes)

    return BrokerCluster(open_link, settings)


def has_open_port(settings: ProxySettings) -> bool:
    """Whether other machines can reach the port for clients without TLS."""
    return not is_loopback(settings.grpc_host) and settings.tls != "required"


def security_state_of(
    version: int,
    mode: Mode,
    keys: SecretKeys | None,
    uses: SecretUses,
    *,
    has_open_port: bool,
    user_id: int,
) -> pb.SecurityState:
    """Return the answer to the question of an operator about the security of this process."""
    state = pb.SecurityState(version=version, mode=mode.text, has_open_port=has_open_port)
    if keys is not None:
        state.key_ids.extend(keys.ids)
        state.key_checks.extend(keys.checks)
    if user_id:
        state.uses_since_ms = uses.since_ms
        state.secret_uses.extend([pb.SecretUse(**use._asdict()) for use in uses.of_user(user_id)])
    return state


def telemetry_of(
    settings: ProxySettings, cluster: BrokerCluster, clients: Clients, clock: Clock
) -> Telemetry:
    """Return the handler of telemetry streams."""
    return Telemetry(
        cluster,
        clients,
        clock,
        long_polling_max_ms=settings.long_polling_max_ms,
        item_bytes_max=settings.message_item_bytes_max,
        measured=measured_languages(
            is_on=settings.client_metrics, is_tls_required=settings.tls == "required"
        ),
    )


def wire(
    settings: ProxySettings,
    cluster: BrokerCluster,
    polling: PollingShell,
    clients: Clients,
    telemetry: Telemetry,
    client_life: ClientLifecycle,
    clock: Clock,
    calls: BrokerCalls,
    pages: PullPages,
    quotas: SendQuotas | None = None,
) -> Methods:
    """Build the table of methods."""
    return methods(
        producer=Producer(
            cluster,
            clock,
            item_bytes_max=settings.message_item_bytes_max,
            publishers=clients.publishers,
            quotas=quotas,
        ),
        receiver=Receiver(cluster, polling, clients, clock, settings),
        settler=Settler(cluster),
        routes=Routes(cluster, clients, advertised_endpoints(settings.advertised_address)),
        telemetry=telemetry,
        client_life=client_life,
        puller=Puller(cluster, calls, pages, clock, settings, polling.quotas),
    )


def advertised_endpoints(address: str) -> v2.Endpoints | None:
    """Parse `host:port`; return None for an empty address."""
    if not address:
        return None
    server = HostPort.parse(address)
    return v2.Endpoints(
        scheme=scheme_of(server.host), addresses=[v2.Address(host=server.host, port=server.port)]
    )


async def first_of(event: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """Wait for `event`; return False if `stop` is set first."""
    async with asyncio.TaskGroup() as tasks:
        came, stopped = tasks.create_task(event), tasks.create_task(stop.wait())
        await asyncio.wait((came, stopped), return_when=asyncio.FIRST_COMPLETED)
        has_come = came.done()
        came.cancel()
        stopped.cancel()
    return has_come
