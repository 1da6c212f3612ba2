"""The simulated processes: brokers over faulty disks, and proxies."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from tests.simulation.loop import BEGIN_S
from tests.simulation.network import Network, ServerEnd
from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.worlds.engine_world import ENTROPY
from tests.support.worlds.timer_world import TIMERS
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.recovery import open_engine
from tidemill.broker.engine.store.disk import DiskFailed
from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.server.link.link_service import BrokerLinkService
from tidemill.broker.server.members.cluster_members import ClusterMembers
from tidemill.broker.server.members.home_service import BrokerHomeService
from tidemill.broker.server.members.member_connection import FOLLOW
from tidemill.broker.server.round.durability import Durability
from tidemill.broker.server.round.long_polling import LongPolling
from tidemill.broker.server.round.rounds import Rounds
from tidemill.broker.sync_process import HasFileno
from tidemill.proxy.app import cluster_of, telemetry_of, wire
from tidemill.proxy.clients.clients import Clients
from tidemill.proxy.cluster.broker_calls import BrokerCalls
from tidemill.proxy.metrics import ProxyMetrics
from tidemill.proxy.polling.shell import PollingShell
from tidemill.proxy.server.call import Boundary
from tidemill.proxy.server.pull_pages import PullPages
from tidemill.proxy.settings import ProxySettings

T = TypeVar("T")

EPOCH_MS = 1_700_000_000_000
RESTART_S = 0.3  # the time that the supervisor and a start take
SYNC_S_MAX = 0.003  # of a normal sync
STALL_PART = 0.02  # the share of slow syncs
STALL_S_MAX = 0.5  # of a slow sync
CONFIG = EngineConfig(
    segment_bytes=64 << 10,
    checkpoint_log_bytes=48 << 10,
    files_merged=3,
    disk_reserve_bytes=512 << 10,
    auto_create=True,
    default_queues=2,
    timer=replace(TIMERS, flush_log_bytes=16 << 10),
)


class MachineClock:
    """The clocks of a machine: a wall clock that can be set, and a monotonic clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.wrong_by_ms = 0
        self._wall_ms = 0  # the last reading of this process
        self._read_at_ms = 0  # the monotonic time of that reading

    def process_began(self) -> None:
        """Forget the readings of the previous process."""
        self._wall_ms = self._read_at_ms = 0

    def wall_ms(self) -> int:
        wall_ms, monotonic_ms = self.unsteady_wall_ms(), self.monotonic_ms()
        if wall_ms < self._wall_ms:
            wall_ms = self._wall_ms + monotonic_ms - self._read_at_ms
        self._wall_ms, self._read_at_ms = wall_ms, monotonic_ms
        return wall_ms

    def unsteady_wall_ms(self) -> int:
        return EPOCH_MS + self._true_ms() + self.wrong_by_ms

    def monotonic_ms(self) -> int:
        return self._true_ms()

    def _true_ms(self) -> int:
        return round((self._loop.time() - BEGIN_S) * 1000)


class Syncs:
    """Syncs that take a random time and make all writes before their end durable."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def sync(self, files: Iterable[HasFileno]) -> None:
        is_stall = self._random.random() < STALL_PART
        await asyncio.sleep(self._random.uniform(0, STALL_S_MAX if is_stall else SYNC_S_MAX))
        for file in files:
            file.sync()  # type: ignore[attr-defined]  # files of the faulty disk


class Process:
    """Tasks that a kill ends together."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(coroutine))

    async def kill(self) -> None:
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Broker(Process):
    """A broker, its disk and its machine."""

    def __init__(self, network: Network, random: Random, *, name: str = "broker-0") -> None:
        super().__init__()
        self.address = name
        self.disk = FaultyDisk(random)
        self.clock = MachineClock(asyncio.get_running_loop())
        self.lives = 0
        self.failure: BaseException | None = None  # the error that ended a life
        self._network = network
        self._random = random
        self.rounds: Rounds
        self.members: ClusterMembers
        self._links: BrokerLinkService
        self._homes: BrokerHomeService
        self._is_alive = False

    def start(self) -> None:
        """Start the broker on its disk. Raises CorruptStore."""
        self.lives += 1
        self.clock.process_began()
        config = replace(CONFIG, broker_name=self.address)
        engine, _ = open_engine(self.disk, config, now_ms=self.clock.wall_ms(), entropy=ENTROPY)
        rounds = Rounds(
            engine,
            durability=Durability(engine, Syncs(self._random)),
            background_syncs=Syncs(self._random),
            clock=self.clock,
            polls=LongPolling(parked_max=1_000),
            pending_bytes_max=1 << 20,
        )
        self.rounds = rounds
        self._links = BrokerLinkService(rounds, Traffic(), auto_create=True)
        self._homes = BrokerHomeService(rounds)
        self.begin(self._run(rounds))
        self.members = ClusterMembers(rounds, self._connect, life=f"{self.address} {self.lives}")
        self.begin(self._follow_members(self.members))
        self._network.servers[self.address] = self
        self._is_alive = True

    def try_to_start(self) -> None:
        """Start the broker; if the disk fails during the start, the broker ends."""
        try:
            self.start()
        except (DiskFailed, PowerCut):
            self.disk = self.disk.after_kill()

    async def _run(self, rounds: Rounds) -> None:
        try:
            await rounds.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failure = error
            raise

    async def _follow_members(self, members: ClusterMembers) -> None:
        async with members.running():
            await asyncio.Event().wait()

    def _connect(self, address: str, limits: object, **options: Any) -> Any:
        return self._network.connect(address.removesuffix(":1"), limits, **options)

    async def serve(self, path: str, call: ServerEnd) -> None:
        """Serve one stream of a proxy or of the home broker."""
        task = asyncio.current_task()
        assert task is not None, "a link is served outside a task"
        self.tasks.append(task)
        serve = self._homes.follow if path == FOLLOW else self._links.exchange
        await serve(call)  # type: ignore[arg-type]  # it does what RpcCall does

    async def stop(self, how: str) -> None:
        """End the broker by "kill" or "power cut", with the effect of that on its disk."""
        # The new disk comes first, so nothing that a cancelled task still writes reaches it.
        before, self.disk = self.disk, self.disk
        self.disk = before.after_power_cut() if how == "power cut" else before.after_kill()
        before.cut_at = -1
        self._is_alive = False
        self._network.close_server(self.address)
        await self.kill()

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    def check(self) -> None:
        """Raise the error that ended the broker, unless the disk caused it."""
        if self.failure is not None and not _is_disk_failure(self.failure):
            raise AssertionError("the broker failed by itself") from self.failure


def _is_disk_failure(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_disk_failure, error.exceptions))
    return isinstance(error, DiskFailed | PowerCut)


class Proxy(Process):
    """A proxy, whose methods clients call."""

    def __init__(self, network: Network, brokers: list[str], *, name: str) -> None:
        super().__init__()
        self.name = name
        self._network = network
        self._brokers = brokers
        self._clock = MachineClock(asyncio.get_running_loop())

    def start(self) -> None:
        settings = ProxySettings(brokers=[f"{name}:1" for name in self._brokers])
        metrics = ProxyMetrics()
        self.cluster = cluster_of(settings, metrics, connect=self._connect)
        clients = Clients(clients_max=1_000, monotonic_ms=self._clock.monotonic_ms)
        calls = BrokerCalls(self._connect)
        self.methods = wire(
            settings,
            self.cluster,
            PollingShell(self.cluster, self._clock, pop_timeout_ms=settings.request_timeout_ms),
            clients,
            telemetry_of(settings, self.cluster, clients, self._clock),
            self._clock,
            calls,
            PullPages(calls),
        )
        self.boundary = Boundary(metrics, self._clock)
        self.begin(self._run())

    def _connect(self, address: str, limits: object, **options: Any) -> Any:
        return self._network.connect(address.removesuffix(":1"), limits, **options)

    async def serve(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a call; it waits until the proxy knows its brokers."""
        try:
            await self.cluster.configured()
        except asyncio.CancelledError:
            coroutine.close()
            raise
        return await coroutine

    async def _run(self) -> None:
        async with self.cluster.running():
            await asyncio.Event().wait()
