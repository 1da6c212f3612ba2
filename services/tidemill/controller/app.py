"""The controller process: open the store, control broker groups, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Sequence

import structlog

from tidemill.common.clock import SystemClock
from tidemill.common.lifecycle import (
    StartError,
    announce_ready,
    run,
    stop_on_signal,
    tune_garbage_collector,
)
from tidemill.common.log import configure_logging
from tidemill.common.metrics import Registry
from tidemill.common.metrics_server import MetricsServer
from tidemill.common.parent import die_with_parent
from tidemill.common.readiness import ProcessReadiness
from tidemill.common.scrape_access import scrape_access_of
from tidemill.controller.group import BrokerGroupControl
from tidemill.controller.groups import BrokerGroupControls
from tidemill.controller.lease_keeper import LeaseKeeper
from tidemill.controller.meta_store import MetaStore, StoreUnreachable
from tidemill.controller.metrics import ControllerMetrics
from tidemill.controller.server.grpc_server import controller_server
from tidemill.controller.server.service import ControllerService
from tidemill.controller.settings import ControllerSettings
from tidemill.controller.sqlite_store import SqliteStore
from tidemill.transport.aio import metrics as transport_metrics
from tidemill.transport.aio.process_service import ProcessService
from tidemill.transport.aio.tls import (
    Certificates,
    ReloadableCredentials,
    cluster_files,
    newest_context,
    server_context,
)

log = structlog.get_logger()


def main(arguments: Sequence[str]) -> int:
    """Start the controller with command-line `arguments`; return its exit status."""
    settings = ControllerSettings.load(arguments)
    configure_logging(
        process=settings.name, level=settings.log_level, log_format=settings.log_format
    )
    if settings.supervisor_fd is not None:
        die_with_parent()
    return run(lambda: serve(settings))


async def serve(settings: ControllerSettings) -> None:
    """Control broker groups until SIGTERM, then release the lease."""
    clock, counters = SystemClock(), ControllerMetrics()
    registry = Registry(
        cluster=settings.cluster, node_type="controller", node_id=settings.node_id or settings.name
    )
    tls = tls_of(settings)
    certificates = Certificates([tls] if tls is not None else [])
    with stop_on_signal(
        supervisor_fd=settings.supervisor_fd, on_hangup=certificates.reload
    ) as stop:
        async with (
            certificates.watching(),
            store_of(settings) as store,
            MetricsServer(
                registry, readiness := ProcessReadiness(), access=scrape_access_of(settings)
            ).serving(settings.metrics_host, settings.metrics_port) as metrics,
        ):
            lease = LeaseKeeper(settings.name, store, clock, deputy_rank=settings.deputy_rank)
            make = functools.partial(
                BrokerGroupControl,
                store=store,
                clock=clock,
                timing=settings.timing,
                rank=lease.rank,
                metrics=counters,
                cluster=settings.cluster,
                feature_level_max=settings.feature_level_max,
            )
            founds_with = settings.min_in_sync if settings.makes_groups else None
            groups = BrokerGroupControls(store, make, founds_with=founds_with)
            service = ControllerService(
                groups,
                clock=clock,
                timing=settings.timing,
                metrics=counters,
                is_leading=lease.is_leading,
            )
            process = ProcessService(
                "controller",
                settings.node_id or settings.name,
                settings,
                clock.wall_ms,
                is_ready=lambda: readiness.report().is_ready,
                certificates=certificates,
            )
            registry.register(counters.collector(lambda: groups.by_name, lease.is_leading))
            registry.register(certificates.collect)
            async with (
                background(groups, lease, store),
                controller_server(
                    service, process, settings, newest_context(tls) if tls else None
                ) as server,
            ):
                registry.register(functools.partial(transport_metrics.collect, server))
                process.address = server.address
                tune_garbage_collector()
                readiness.phase = "serving"
                announce_ready(settings.supervisor_fd, grpc=server.address, metrics=metrics.url)
                log.info("controller serves", grpc=server.address, metrics=metrics.url)
                await stop.wait()
                log.info("controller drains")
                readiness.phase = "draining"
                # First, so that another controller leads while this one still drains.
                await lease.release()
    log.info("controller stopped")


def tls_of(settings: ControllerSettings) -> ReloadableCredentials[ssl.SSLContext] | None:
    """Return the credentials of the server; None: TLS is off. Raises StartError."""
    files = cluster_files(settings)
    if files is None:
        return None
    return ReloadableCredentials("cluster", files, functools.partial(server_context, files))


@contextlib.asynccontextmanager
async def store_of(settings: ControllerSettings) -> AsyncIterator[MetaStore]:
    """Open the store of group records. Raises StartError."""
    async with contextlib.AsyncExitStack() as running:
        if settings.kubernetes_groups:
            yield kubernetes_store(settings, running)
            return
        try:
            store = await running.enter_async_context(SqliteStore.open(settings.group_store))
        except StoreUnreachable as error:
            raise StartError(f"group_store: {error}") from error
        yield store


def kubernetes_store(settings: ControllerSettings, running: contextlib.AsyncExitStack) -> MetaStore:
    """Open the store in the namespace of this pod or kubeconfig. Raises StartError."""
    # Imported here: the Kubernetes client takes 0.2 s and 15 MiB, and a laptop does not need it.
    from tidemill.common.kubernetes_access import NoKubernetesAccess, find_access
    from tidemill.controller.kubernetes_calls import KubernetesCalls
    from tidemill.controller.kubernetes_store import KubernetesStore

    try:
        access = find_access()
    except NoKubernetesAccess as error:
        raise StartError(f"kubernetes_groups: {error}") from error
    calls = running.enter_context(KubernetesCalls.open(access))
    return KubernetesStore(calls, settings.cluster)


@contextlib.asynccontextmanager
async def background(
    groups: BrokerGroupControls, lease: LeaseKeeper, store: MetaStore
) -> AsyncIterator[None]:
    """Keep the lease and control all groups until the block ends."""
    async with asyncio.TaskGroup() as tasks:
        loops = [
            tasks.create_task(lease.run(), name="lease"),
            tasks.create_task(groups.run(), name="groups"),
        ]
        if not isinstance(store, SqliteStore):
            from tidemill.controller.kubernetes_scale import ReplicaScaling
            from tidemill.controller.kubernetes_store import KubernetesStore

            assert isinstance(store, KubernetesStore), "there are two stores"
            scaling = ReplicaScaling(store, groups, lease.is_leading)
            loops.append(tasks.create_task(scaling.run(), name="replicas"))
        yield
        for loop in loops:
            loop.cancel()
