"""The broker process: open the store, serve, drain, close."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from tidemill.broker.data_dir import locked_data_dir
from tidemill.broker.settings import BrokerSettings
from tidemill.broker.sync_process import SyncProcess
from tidemill.common.lifecycle import leaf_errors, run, stop_on_signal
from tidemill.common.log import configure_logging
from tidemill.common.parent import die_with_parent
from tidemill.common.replica_group import ReplicaId, ReplicaRun

if TYPE_CHECKING:
    from tidemill.broker.controller_link.port import SupervisorPort
    from tidemill.broker.server.replicas.ports import ControllerPort
    from tidemill.transport.aio.connect import Connector
    from tidemill.transport.aio.tls import ReloadableCredentials

log = structlog.get_logger()

INCARNATION_BYTES: Final = 16  # of the name of this run of a replica: nobody else's, by all odds


def main(arguments: Sequence[str]) -> int:
    """Start the broker with command-line `arguments`; return its exit status."""
    settings = BrokerSettings.load(arguments)
    configure_logging(
        process=settings.name, level=settings.log_level, log_format=settings.log_format
    )
    if settings.supervisor_fd is not None or settings.controllers_fd is not None:
        die_with_parent()
    if settings.controllers and settings.controllers_fd is None:
        return supervise(settings, arguments)
    # Before gRPC, threads and the event loop exist: their locks do not survive a fork. The log has
    # a helper of its own, so that it never waits behind a long background sync.
    log_syncs, background_syncs = SyncProcess.fork("log sync"), SyncProcess.fork("background sync")
    port = port_of(settings)
    return run(lambda: serve(settings, log_syncs, background_syncs, port))


def supervise(settings: BrokerSettings, arguments: Sequence[str]) -> int:
    """Be the first process of a replica, whose broker is started by it."""
    from tidemill.broker.controller_link.supervisor import main as run_supervisor
    from tidemill.transport.aio.tls import Certificates

    _, tls = cluster_tls(settings)
    certificates = Certificates([] if tls is None else [tls])
    return run_supervisor(settings, arguments, connect_of(tls), certificates)


def port_of(settings: BrokerSettings) -> SupervisorPort | None:
    """Return the way to the controllers, where this broker is a replica with a supervisor."""
    if settings.controllers_fd is None:
        return None
    from tidemill.broker.controller_link.port import SupervisorPort

    return SupervisorPort(settings.controllers_fd)


async def serve(
    settings: BrokerSettings,
    log_syncs: SyncProcess,
    background_syncs: SyncProcess,
    controllers: ControllerPort | None = None,
) -> None:
    """Run the broker until SIGTERM, then drain it and close the store cleanly.

    One of several replicas hears of `controllers` which of them is the master. When it is that no
    more its store is opened again, by the same process.
    """
    from tidemill.broker.engine.replica.replica_engine import MustBeEmptied
    from tidemill.broker.life import Process
    from tidemill.broker.server.replicas.replica_shell import SteppedDown
    from tidemill.broker.store import give_up_store
    from tidemill.transport.aio.tls import Certificates

    cluster, members_tls = cluster_tls(settings)
    certificates = Certificates([each for each in (cluster, members_tls) if each is not None])
    me = new_run(settings)
    with (
        # Before signals are caught: whoever is stopped while it waits for its folder just ends.
        locked_data_dir(settings.data_dir, wait_ms=settings.data_dir_wait_ms),
        stop_on_signal(supervisor_fd=settings.supervisor_fd, on_hangup=certificates.reload) as stop,
    ):
        async with (
            log_syncs.attached(),
            background_syncs.attached(),
            watched(log_syncs, background_syncs),
            certificates.watching(),
            tied(controllers, stop),
        ):
            process = Process(
                settings,
                log_syncs,
                background_syncs,
                cluster,
                connect_of(members_tls),
                certificates,
                stop,
            )
            is_over = False
            while not is_over:
                try:
                    if controllers is None:
                        await process.live_alone()
                    else:
                        await process.live_as_replica(me, controllers)
                    is_over = True
                except* SteppedDown:
                    log.info("the store is opened again, as a replica's")
                except* MustBeEmptied as group:
                    reason = "; ".join(map(str, leaf_errors(group)))
                    log.warning("the store is emptied, and copied again", reason=reason)
                    give_up_store(settings.data_dir)
                    # What was acked of the store that is gone counts for nobody (F-11).
                    me = new_run(settings)
    log.info("broker stopped")


def new_run(settings: BrokerSettings) -> ReplicaRun:
    """Return a name for a run of this replica."""
    return ReplicaRun(ReplicaId(settings.replica_id), secrets.token_hex(INCARNATION_BYTES))


@contextlib.asynccontextmanager
async def tied(controllers: ControllerPort | None, stop: asyncio.Event) -> AsyncIterator[None]:
    """Speak with the supervisor until the block ends; without it this process stops."""
    from tidemill.broker.controller_link.port import SupervisorPort

    if not isinstance(controllers, SupervisorPort):
        yield
        return

    async def speak() -> None:
        await controllers.run()
        log.error("the supervisor is gone: this broker stops")
        stop.set()

    async with asyncio.TaskGroup() as tasks:
        speaking = tasks.create_task(speak(), name="supervisor")
        yield
        speaking.cancel()


def cluster_tls(
    settings: BrokerSettings,
) -> tuple[
    ReloadableCredentials[ssl.SSLContext] | None, ReloadableCredentials[ssl.SSLContext] | None
]:
    """Return what others are served with, and what members are connected to with.

    None without TLS. Raises StartError.
    """
    from tidemill.transport.aio.tls import (
        ReloadableCredentials,
        client_context,
        cluster_files,
        server_context,
    )

    files = cluster_files(settings)
    if files is None:
        return None, None
    return (
        ReloadableCredentials("cluster", files, functools.partial(server_context, files)),
        ReloadableCredentials(
            "members", files, functools.partial(client_context, files), is_server=False
        ),
    )


def connect_of(tls: ReloadableCredentials[ssl.SSLContext] | None) -> Connector:
    """Return how to get at a member."""
    from tidemill.transport.aio.channel import connected
    from tidemill.transport.aio.tls import newest_context

    return connected if tls is None else functools.partial(connected, tls=newest_context(tls))


@contextlib.asynccontextmanager
async def watched(*helpers: SyncProcess) -> AsyncIterator[None]:
    """End the block with the failure of any helper."""
    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(helper.watch(), name=helper.name) for helper in helpers]
        yield
        for watch in watches:
            watch.cancel()
