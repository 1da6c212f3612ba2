"""The broker process: open the store, serve, drain, close."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import structlog

from tidemill.broker.data_dir import locked_data_dir
from tidemill.broker.settings import BrokerSettings
from tidemill.broker.sync_process import SyncProcess
from tidemill.common.lifecycle import (
    announce_ready,
    die_with_parent,
    run,
    settle_memory,
    stop_on_signal,
)
from tidemill.common.log import configure_logging

if TYPE_CHECKING:
    from tidemill.broker.server.rounds import Rounds
    from tidemill.transport.aio.connect import Connect
    from tidemill.transport.aio.tls import Reloading

log = structlog.get_logger()


def main(arguments: Sequence[str]) -> int:
    """Start the broker with command-line `arguments`; return its exit status."""
    settings = BrokerSettings.load(arguments)
    configure_logging(
        process=settings.name, level=settings.log_level, log_format=settings.log_format
    )
    if settings.supervisor_fd is not None:
        die_with_parent()
    # Before gRPC, threads and the event loop exist: their locks do not survive a fork. The log has
    # a helper of its own, so that it never waits behind a long background sync.
    log_syncs, background_syncs = SyncProcess.fork("log sync"), SyncProcess.fork("background sync")
    return run(lambda: serve(settings, log_syncs, background_syncs))


async def serve(
    settings: BrokerSettings, log_syncs: SyncProcess, background_syncs: SyncProcess
) -> None:
    """Run the broker until SIGTERM, then drain it and close the store cleanly."""
    from tidemill.broker.metrics import BrokerMetrics, Lag, TopicSizes, Traffic
    from tidemill.broker.server.durability import Durability
    from tidemill.broker.server.grpc_server import broker_server
    from tidemill.broker.server.lag import LagReader
    from tidemill.broker.server.long_polling import LongPolling
    from tidemill.broker.server.members import Members
    from tidemill.broker.server.rounds import Rounds
    from tidemill.broker.server.topic_sizes import SizeReader
    from tidemill.broker.store import open_engine
    from tidemill.broker.timer_metrics import TimerMetrics
    from tidemill.common.clock import SystemClock
    from tidemill.common.metrics import MetricsServer, Registry
    from tidemill.common.readiness import Readiness
    from tidemill.transport.aio.tls import Certificates, newest_of

    cluster, members_tls = cluster_tls(settings)
    certificates = Certificates([each for each in (cluster, members_tls) if each is not None])
    clock = SystemClock()
    registry = Registry(cluster=settings.cluster, node_type="broker", node_id=settings.name)
    with (
        stop_on_signal(supervisor_fd=settings.supervisor_fd, on_hangup=certificates.reload) as stop,
        locked_data_dir(settings.data_dir),
        open_engine(settings, now_ms=clock.wall_ms()) as engine,
    ):
        readiness = Readiness()
        traffic, lag, sizes = Traffic(), Lag(), TopicSizes()
        rounds = Rounds(
            engine,
            durability=Durability(engine, log_syncs),
            background_syncs=background_syncs,
            clock=clock,
            polls=LongPolling(parked_max=settings.parked_max),
            pending_bytes_max=settings.pending_bytes_max,
            clock_hold_ms=settings.timer_clock_hold_ms,
        )
        members = Members(rounds, connect_of(members_tls))
        BrokerMetrics(registry, traffic, lag, sizes, rounds)
        TimerMetrics(registry, rounds)
        registry.register(certificates.collect)
        registry.register(members.collect)
        async with (
            log_syncs.attached(),
            background_syncs.attached(),
            watched(log_syncs, background_syncs),
            running(rounds),
            certificates.watching(),
            MetricsServer(
                registry, readiness, LagReader(rounds, lag, clock), SizeReader(rounds, sizes, clock)
            ).serving(settings.metrics_host, settings.metrics_port) as metrics,
            broker_server(
                rounds, traffic, members, settings, newest_of(cluster) if cluster else None
            ) as server,
            members.running(),
        ):
            registry.register(server.collect)
            settle_memory()
            readiness.phase = "serving"
            announce_ready(settings.supervisor_fd, grpc=server.address, metrics=metrics.url)
            log.info("broker serves", grpc=server.address, metrics=metrics.url)
            await stop.wait()
            log.info("broker drains")
            readiness.phase = "draining"
            rounds.drain()
            await server.drain(settings.drain_timeout_ms)
    log.info("broker stopped")


def cluster_tls(
    settings: BrokerSettings,
) -> tuple[Reloading[ssl.SSLContext] | None, Reloading[ssl.SSLContext] | None]:
    """Return what others are served with, and what members are connected to with.

    None without TLS. Raises StartRefused.
    """
    from tidemill.transport.aio.tls import Reloading, client_context, cluster_files, server_context

    files = cluster_files(
        ca=settings.cluster_tls_ca_file,
        certificate=settings.cluster_tls_certificate_file,
        key=settings.cluster_tls_key_file,
    )
    if files is None:
        return None, None
    return (
        Reloading("cluster", files, functools.partial(server_context, files)),
        Reloading("members", files, functools.partial(client_context, files), is_server=False),
    )


def connect_of(tls: Reloading[ssl.SSLContext] | None) -> Connect:
    """Return how to get at a member."""
    from tidemill.transport.aio.channel import connected
    from tidemill.transport.aio.tls import newest_of

    return connected if tls is None else functools.partial(connected, tls=newest_of(tls))


@contextlib.asynccontextmanager
async def running(rounds: Rounds) -> AsyncIterator[None]:
    """Run the round loop; at the end of the block do one last round and wait for it."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rounds.run(), name="rounds")
        yield
        rounds.stop()


@contextlib.asynccontextmanager
async def watched(*helpers: SyncProcess) -> AsyncIterator[None]:
    """End the block with the failure of any helper."""
    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(helper.watch(), name=helper.name) for helper in helpers]
        yield
        for watch in watches:
            watch.cancel()
