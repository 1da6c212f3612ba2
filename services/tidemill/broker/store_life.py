"""The lives of a store in the broker process: open, serve, drain, close.

A broker without replicas has one life. A replica that steps down ends a life and begins the next,
because its memory is ahead of the confirmed log and its files are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final, final
from urllib.parse import urlsplit

import structlog

from tidemill.broker.engine.replication.config import ReplicationConfig
from tidemill.broker.metrics.conflict_metrics import ConflictMetrics
from tidemill.broker.metrics.lag import Lag
from tidemill.broker.metrics.level_metrics import LevelMetrics
from tidemill.broker.metrics.message_metrics import MessageMetrics
from tidemill.broker.metrics.pop_metrics import PopMetrics
from tidemill.broker.metrics.replica_metrics import ReplicaMetrics
from tidemill.broker.metrics.retention_metrics import RetentionMetrics
from tidemill.broker.metrics.store_metrics import StoreMetrics, TopicSizes
from tidemill.broker.metrics.timer_metrics import TimerMetrics
from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.server.grpc_server import broker_server
from tidemill.broker.server.members.cluster_members import ClusterMembers
from tidemill.broker.server.replicas.mending import Mender
from tidemill.broker.server.replicas.replica_shell import ReplicaShell
from tidemill.broker.server.replicas.start_mending import StartupMender
from tidemill.broker.server.round.durability import Durability
from tidemill.broker.server.round.long_polling import LongPolling
from tidemill.broker.server.round.rounds import Rounds
from tidemill.broker.server.scrape.lag import LagReader
from tidemill.broker.server.scrape.topic_sizes import SizeReader
from tidemill.broker.startup_health import reporting_startup
from tidemill.broker.store import LogRejected, open_engine, open_replica
from tidemill.common.clock import SystemClock
from tidemill.common.lifecycle import announce_ready, tune_garbage_collector
from tidemill.common.metrics import Registry
from tidemill.common.metrics_server import MetricsServer
from tidemill.common.readiness import ProcessReadiness
from tidemill.common.replica_group import name_in_cluster
from tidemill.common.scrape_access import scrape_access_of
from tidemill.transport.aio.process_service import ProcessService
from tidemill.transport.aio.tls import newest_context

if TYPE_CHECKING:
    import ssl

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.replica.replica_engine import ReplicaEngine
    from tidemill.broker.server.replicas.ports import ControllerPort
    from tidemill.broker.settings import BrokerSettings
    from tidemill.broker.sync_process import SyncProcess
    from tidemill.common.replica_group import ReplicaRun
    from tidemill.transport.aio.connect import Connector
    from tidemill.transport.aio.tls import Certificates, ReloadableCredentials

log = structlog.get_logger()

CHECKPOINT_S: Final = 5.0  # for the checkpoint before a stop; the grace period allows for more
LIFE_BYTES: Final = 8  # of the random, unique name of a life


@final
class BrokerProcess:
    """The parts of the process that outlive a life of the store."""

    def __init__(
        self,
        settings: BrokerSettings,
        log_syncs: SyncProcess,
        background_syncs: SyncProcess,
        cluster: ReloadableCredentials[ssl.SSLContext] | None,
        connect: Connector,
        certificates: Certificates,
        stop: asyncio.Event,
    ) -> None:
        self._settings = settings
        self._group = name_in_cluster(settings.cluster, settings.name)
        self._log_syncs = log_syncs
        self._background_syncs = background_syncs
        self._cluster = cluster
        self._connect = connect
        self._certificates = certificates
        self._stop = stop
        self._clock = SystemClock()
        self._is_announced = False
        self._readiness = ProcessReadiness()  # of the current life
        self._process = ProcessService(
            "broker",
            self._node_id,
            settings,
            self._clock.wall_ms,
            is_ready=lambda: self._readiness.report().is_ready,
            certificates=certificates,
        )

    async def live_alone(self) -> None:
        """Serve until the stop, as a broker without replicas."""
        with contextlib.ExitStack() as opened:
            with self._reporting_startup():
                engine = opened.enter_context(
                    open_engine(self._settings, now_ms=self._clock.wall_ms())
                )
            durability = Durability(engine, self._log_syncs)
            await self._serve(engine, durability)

    async def live_as_replica(self, me: ReplicaRun, controllers: ControllerPort) -> None:
        """Follow or lead until the stop. Raises SteppedDown, MustBeEmptied."""
        with contextlib.ExitStack() as opened:
            with self._reporting_startup():
                replica_engine = await self._open_replica(me, opened)
            durability = Durability(replica_engine.engine, self._log_syncs)
            replicas = ReplicaShell(
                me,
                self._group,
                replica_engine,
                durability,
                ReplicationConfig(),
                connect=self._connect,
                controllers=controllers,
                clock=self._clock,
            )
            await self._serve(replica_engine.engine, durability, replica_engine, replicas)

    async def _open_replica(self, me: ReplicaRun, opened: contextlib.ExitStack) -> ReplicaEngine:
        """Open the store; mend damage of its log from other replicas first. Raises StartError."""
        mending = StartupMender(
            self._settings, me.replica_id, connect=self._connect, stop=self._stop
        )
        while True:
            try:
                return opened.enter_context(
                    open_replica(
                        self._settings,
                        now_ms=self._clock.wall_ms(),
                        cuts_damage=mending.cuts_damage,
                    )
                )
            except LogRejected as rejected:
                await mending.mend(rejected)

    @property
    def _node_id(self) -> str:
        settings = self._settings
        return settings.node_id or settings.replica_name or settings.name

    def _registry(self) -> Registry:
        return Registry(cluster=self._settings.cluster, node_type="broker", node_id=self._node_id)

    def _metrics_server(
        self, registry: Registry, readiness: ProcessReadiness, lag: LagReader, sizes: SizeReader
    ) -> MetricsServer:
        access = scrape_access_of(self._settings)
        return MetricsServer(registry, readiness, lag, sizes, access=access)

    def _reporting_startup(self) -> contextlib.AbstractContextManager[None]:
        settings = self._settings
        return reporting_startup(
            self._registry(),
            settings.metrics_host,
            settings.metrics_port,
            scrape_access_of(settings),
        )

    async def _serve(
        self,
        engine: Engine,
        durability: Durability,
        replica_engine: ReplicaEngine | None = None,
        replicas: ReplicaShell | None = None,
    ) -> None:
        settings, clock, registry = self._settings, self._clock, self._registry()
        readiness = self._readiness = ProcessReadiness(
            find_missing=lambda: "" if replicas is None else replicas.lacks()
        )
        traffic, lag, sizes = Traffic(), Lag(), TopicSizes()
        polls = LongPolling(parked_max=settings.parked_max)
        rounds = Rounds(
            engine,
            durability=durability,
            background_syncs=self._background_syncs,
            clock=clock,
            polls=polls,
            pending_bytes_max=settings.pending_bytes_max,
            clock_hold_ms=settings.timer_clock_hold_ms,
            replica_engine=replica_engine,
        )
        members = ClusterMembers(
            rounds,
            self._connect,
            life=secrets.token_hex(LIFE_BYTES),
            controllers=settings.controllers,
        )
        ConflictMetrics(registry, polls.filters, rounds, clock)
        _export_messages(registry, rounds, traffic, lag)
        _export_store(registry, rounds, sizes)
        if replica_engine is not None and replicas is not None:
            replicas.hold.on_rejection = rounds.report_rejection
            ReplicaMetrics(registry, settings.name, replica_engine, replicas)
        lag_reader = LagReader(rounds, lag, clock)
        mender = self._mender(replica_engine, replicas, rounds)
        registry.register(self._certificates.collect)
        registry.register(members.collect)
        async with (
            running(rounds),
            self._metrics_server(
                registry, readiness, lag_reader, SizeReader(rounds, sizes, clock)
            ).serving(settings.metrics_host, settings.metrics_port) as metrics,
            broker_server(
                rounds,
                traffic,
                lag_reader,
                members,
                settings,
                self._process,
                newest_context(self._cluster) if self._cluster else None,
                replicas,
            ) as server,
            following(replicas, rounds, settings.replica_address or server.address),
            mending(mender),
            members.running(),
        ):
            server.register(registry, rounds)
            self._announce(server.address, metrics.url)
            readiness.phase = "serving"
            await self._wait_for_stop(rounds, is_alone=replicas is None)
            log.info("broker drains")
            readiness.phase = "draining"
            rounds.drain()
            await server.drain(settings.drain_timeout_ms)

    async def _wait_for_stop(self, rounds: Rounds, *, is_alone: bool) -> None:
        """Serve until the stop. A broker without replicas then writes a checkpoint first.

        Its clients are served meanwhile, and wait less for the next process. The clients of a
        replicated group have another master by then.
        """
        await self._stop.wait()
        if is_alone:
            await rounds.write_checkpoint(CHECKPOINT_S)

    def _mender(
        self, replica_engine: ReplicaEngine | None, replicas: ReplicaShell | None, rounds: Rounds
    ) -> Mender | None:
        if replica_engine is None or replicas is None:
            return None
        return Mender(
            self._group,
            replica_engine,
            replicas,
            connect=self._connect,
            syncs=self._background_syncs,
            clock=self._clock,
            wake=rounds.wake,
        )

    def _announce(self, grpc: str, metrics_url: str) -> None:
        """Announce the addresses once; the next lives of the store serve at the same ones."""
        self._process.address = grpc
        if self._is_announced:
            return
        self._is_announced = True
        tune_garbage_collector()
        announce_ready(self._settings.supervisor_fd, grpc=grpc, metrics=metrics_url)
        log.info("broker serves", grpc=grpc, metrics=metrics_url)
        self._settings = self._settings.model_copy(
            update={"grpc_port": port_of(grpc), "metrics_port": port_of(metrics_url)}
        )


def port_of(address: str) -> int:
    """Return the port of host:port, or of a URL."""
    port = urlsplit(address if "//" in address else f"//{address}").port
    assert port is not None, "a served address has a port"
    return port


@contextlib.asynccontextmanager
async def running(rounds: Rounds) -> AsyncIterator[None]:
    """Run the round loop; at the end of the block, do a last round and wait for it."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rounds.run(), name="rounds")
        yield
        rounds.stop()


@contextlib.asynccontextmanager
async def mending(mender: Mender | None) -> AsyncIterator[None]:
    """Mend damage from other replicas until the block ends; nothing without replicas."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(mender.run(), name="mending") if mender is not None else None
        yield
        if task is not None:
            task.cancel()


@contextlib.asynccontextmanager
async def following(
    replicas: ReplicaShell | None, rounds: Rounds, address: str
) -> AsyncIterator[None]:
    """Drive this replica and its probes until the block ends; nothing without replicas."""
    async with asyncio.TaskGroup() as tasks:
        if replicas is not None:
            replicas.address = address
            task = tasks.create_task(replicas.run(rounds.wake), name="replicas")
            probing = tasks.create_task(replicas.probes.run(), name="probes")
        yield
        if replicas is not None:
            task.cancel()
            probing.cancel()


def _export_messages(registry: Registry, rounds: Rounds, traffic: Traffic, lag: Lag) -> None:
    MessageMetrics(registry, traffic, lag, rounds)
    PopMetrics(registry, traffic, lag, rounds)
    LevelMetrics(registry, lag, rounds)
    TimerMetrics(registry, rounds)


def _export_store(registry: Registry, rounds: Rounds, sizes: TopicSizes) -> None:
    StoreMetrics(registry, sizes, rounds)
    RetentionMetrics(registry, sizes, rounds)
