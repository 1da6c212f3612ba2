"""The simulated processes: brokers over faulty disks, and proxies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from tests.simulation.hosts import CONTROLLER, HANG_S, HOSTS, Controller, Follower
from tests.simulation.loop import BEGIN_S
from tests.simulation.network import Network, NetworkLink, ServerEnd
from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.worlds.engine_world import ENTROPY
from tests.support.worlds.timer_world import TIMERS
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
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
from tidemill.proxy.server.boundary import Boundary
from tidemill.proxy.server.client_lifecycle import ClientLifecycle
from tidemill.proxy.server.pull_pages import PullPages
from tidemill.proxy.settings import ProxySettings
from tidemill.transport.routes.master_routes import MasterRoutes

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
    auto_create_topics=True,
    auto_create_groups=True,
    default_queues=2,
    deliveries_max=128,  # fewer than a client that never acks receives
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
    """A broker, its disk and its machine: the master of its broker group."""

    def __init__(
        self,
        network: Network,
        random: Random,
        *,
        name: str = "broker-0",
        controller: Controller | None = None,
    ) -> None:
        """With `controller`, the broker group has replicas, so the broker can move."""
        super().__init__()
        self.name = name
        self.hosts = [f"{name}-{n}" for n in range(HOSTS)] if controller is not None else [name]
        self.address = self.hosts[0]
        self._controller = controller
        self.config = replace(CONFIG, broker_name=name)
        self.watch: Callable[[Engine], None] = lambda _: None  # of the engine of each life
        self._opened: list[NetworkLink] = []  # links of this broker to others
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
        now_ms = self.clock.wall_ms()
        engine, _ = open_engine(self.disk, self.config, now_ms=now_ms, entropy=ENTROPY)
        self.watch(engine)
        rounds = Rounds(
            engine,
            durability=Durability(engine, Syncs(self._random)),
            background_syncs=Syncs(self._random),
            clock=self.clock,
            polls=LongPolling(parked_max=1_000),
            pending_bytes_max=1 << 20,
        )
        self.rounds = rounds
        self._links = BrokerLinkService(rounds, Traffic())
        self._homes = BrokerHomeService(rounds)
        self.begin(self._run(rounds))
        self.members = ClusterMembers(
            rounds,
            self._connect,
            life=f"{self.name} {self.lives}",
            controllers=[f"{CONTROLLER}:1"] if self._controller is not None else [],
        )
        self.begin(self._follow_members(self.members))
        self._network.servers[self.address] = self
        self._is_alive = True
        if self._controller is not None:
            for host in self.hosts:
                self._network.servers.setdefault(host, Follower())
            self._controller.elect(self.name, self.hosts, self.address, engine.log.epoch)

    async def move(self, *, hangs: bool) -> None:
        """Let another host lead with all written bytes: by a transfer, or after this one hangs."""
        former = self.address
        if hangs:
            self._network.hang_server(former, HANG_S)
            for link in self._opened:
                link.lose_at_proxy(0.0, HANG_S)
        await self.stop("kill")
        self._network.servers[former] = Follower(hangs_for_s=HANG_S if hangs else 0.0)
        self.address = self._random.choice([host for host in self.hosts if host != former])
        self.try_to_start()

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

    @contextlib.asynccontextmanager
    async def _connect(
        self, address: str, limits: object, **options: Any
    ) -> AsyncIterator[NetworkLink]:
        host = address.removesuffix(":1")
        async with self._network.connect(host, limits, **options) as link:
            self._opened = [one for one in self._opened if not one.is_closed] + [link]
            yield link

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

    def __init__(
        self, network: Network, brokers: list[str], *, name: str, has_controllers: bool = False
    ) -> None:
        super().__init__()
        self._controllers = [f"{CONTROLLER}:1"] if has_controllers else []
        self.name = name
        self._network = network
        self._brokers = brokers
        self._clock = MachineClock(asyncio.get_running_loop())

    def start(self) -> None:
        settings = ProxySettings(brokers=[f"{name}:1" for name in self._brokers])
        metrics = ProxyMetrics()
        self._routes = MasterRoutes(self._controllers, connect=self._connect, name=self.name)
        self.cluster = cluster_of(
            settings,
            metrics,
            connect=self._connect,
            routes=self._routes if self._controllers else None,
        )
        clients = Clients(clients_max=1_000, monotonic_ms=self._clock.monotonic_ms)
        calls = BrokerCalls(self._connect)
        polling = PollingShell(
            self.cluster, self._clock, pop_timeout_ms=settings.request_timeout_ms
        )
        self.methods = wire(
            settings,
            self.cluster,
            polling,
            clients,
            telemetry_of(settings, self.cluster, clients, self._clock),
            ClientLifecycle(self.cluster, clients, polling, self._clock),
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
        async with self._routes.following(), self.cluster.running():
            await asyncio.Event().wait()
