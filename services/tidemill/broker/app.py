"""The broker process: open the store, serve, drain, close."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import signal
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from tidemill.broker.controller_link.forked_broker import ForkedBroker, fork_broker
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

INCARNATION_BYTES: Final = 16  # of the random, unique name of this run of a replica


def main(arguments: Sequence[str]) -> int:
    """Start the broker with command-line `arguments`; return its exit status."""
    settings = BrokerSettings.load(arguments)
    configure_logging(
        process=settings.name, level=settings.log_level, log_format=settings.log_format
    )
    if settings.supervisor_fd is not None or settings.controllers_fd is not None:
        die_with_parent()
    if settings.controllers and settings.controllers_fd is None:
        # Process 1 of a container may inherit an ignored SIGCHLD, and a supervisor waits.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        forked = fork_broker()
        if isinstance(forked, ForkedBroker):
            return supervise(settings, arguments, forked)
        die_with_parent()
        settings = settings.model_copy(update={"controllers_fd": forked})
    # Fork before gRPC, threads and the event loop exist: their locks do not survive a fork. The log
    # has a helper of its own, so that it never waits for a long background sync.
    log_syncs, background_syncs = SyncProcess.fork("log sync"), SyncProcess.fork("background sync")
    port = supervisor_port(settings)
    return run(lambda: serve(settings, log_syncs, background_syncs, port))


def supervise(settings: BrokerSettings, arguments: Sequence[str], broker: ForkedBroker) -> int:
    """Run the supervisor of a replica, which restarts the broker."""
    from tidemill.broker.controller_link.supervisor import main as run_supervisor
    from tidemill.transport.aio.tls import Certificates

    _, tls = cluster_tls(settings)
    certificates = Certificates([] if tls is None else [tls])
    return run_supervisor(settings, arguments, broker, connect_of(tls), certificates)


def supervisor_port(settings: BrokerSettings) -> SupervisorPort | None:
    """Return the port to the supervisor, which reaches the controllers; None without replicas."""
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

    With `controllers` the broker is one of several replicas. If it steps down, the same process
    opens its store again.
    """
    from tidemill.broker.engine.replica.replica_engine import MustBeEmptied
    from tidemill.broker.server.replicas.replica_shell import SteppedDown
    from tidemill.broker.store import discard_store
    from tidemill.broker.store_life import BrokerProcess
    from tidemill.transport.aio.tls import Certificates

    cluster, members_tls = cluster_tls(settings)
    certificates = Certificates([each for each in (cluster, members_tls) if each is not None])
    me = new_run(settings)
    with (
        # Lock before installing signal handlers: SIGTERM then ends a waiting process at once.
        locked_data_dir(settings.data_dir, wait_ms=settings.data_dir_wait_ms),
        stop_on_signal(supervisor_fd=settings.supervisor_fd, on_hangup=certificates.reload) as stop,
    ):
        async with (
            log_syncs.attached(),
            background_syncs.attached(),
            watching(log_syncs, background_syncs),
            certificates.watching(),
            supervised(controllers, stop),
        ):
            process = BrokerProcess(
                settings,
                log_syncs,
                background_syncs,
                cluster,
                connect_of(members_tls),
                certificates,
                stop,
            )
            is_stopped = False
            while not is_stopped:
                try:
                    if controllers is None:
                        await process.live_alone()
                    else:
                        await process.live_as_replica(me, controllers)
                    is_stopped = True
                except* SteppedDown:
                    log.info("opening the store again as a replica")
                except* MustBeEmptied as group:
                    reason = "; ".join(map(str, leaf_errors(group)))
                    log.warning("discarding the store to copy it again", reason=reason)
                    discard_store(settings.data_dir)
                    # Acks of the discarded store must not count, so this is a new run (F-11).
                    me = new_run(settings)
    log.info("broker stopped")


def new_run(settings: BrokerSettings) -> ReplicaRun:
    """Return a new name for a run of this replica."""
    return ReplicaRun(ReplicaId(settings.replica_id), secrets.token_hex(INCARNATION_BYTES))


@contextlib.asynccontextmanager
async def supervised(
    controllers: ControllerPort | None, stop: asyncio.Event
) -> AsyncIterator[None]:
    """Talk to the supervisor until the block ends; if the supervisor ends, stop this process."""
    from tidemill.broker.controller_link.port import SupervisorPort

    if not isinstance(controllers, SupervisorPort):
        yield
        return

    async def talk() -> None:
        await controllers.run()
        log.error("supervisor ended, stopping the broker")
        stop.set()

    async with asyncio.TaskGroup() as tasks:
        talking = tasks.create_task(talk(), name="supervisor")
        yield
        talking.cancel()


def cluster_tls(
    settings: BrokerSettings,
) -> tuple[
    ReloadableCredentials[ssl.SSLContext] | None, ReloadableCredentials[ssl.SSLContext] | None
]:
    """Return the credentials for serving and for connections to members; None without TLS.

    Raises StartError.
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
    """Return the function that connects to a member."""
    from tidemill.transport.aio.channel import connected
    from tidemill.transport.aio.tls import newest_context

    return connected if tls is None else functools.partial(connected, tls=newest_context(tls))


@contextlib.asynccontextmanager
async def watching(*helpers: SyncProcess) -> AsyncIterator[None]:
    """End the block with the failure of a helper."""
    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(helper.watch(), name=helper.name) for helper in helpers]
        yield
        for watch in watches:
            watch.cancel()
