"""The members of the cluster, at its home."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, final

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.broker.engine.metadata.audit_log import AuditedChange
from tidemill.broker.server.members.member_connection import (
    HomeLife,
    MemberConnection,
    StockListener,
)
from tidemill.broker.server.wire import config_frames, config_log, security_frames
from tidemill.broker.server.wire.audit_facts import broker_group_facts
from tidemill.common.errors import ServiceError
from tidemill.transport.routes.master_routes import MasterRoutes

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConfigChanges
    from tidemill.broker.engine.metadata.membership import BrokerGroup
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
    from tidemill.transport.aio.connect import Connector

log = structlog.get_logger()


@final
class ClusterMembers:
    """The connections to all members except the home; none if this broker is not the home."""

    def __init__(
        self, rounds: Rounds, connect: Connector, *, life: str, controllers: Sequence[str] = ()
    ) -> None:
        """Send frames as `life`, a name that no other process of this broker has had.

        `controllers` are those of a broker with replicas. They send the masters of the members.
        """
        self.connections: dict[str, MemberConnection] = {}
        # Called with the stocks of quotas that a member has reported.
        self.on_stocks: StockListener = lambda _name, _stocks, _age_ms: None
        self._rounds = rounds
        self._connect = connect
        self._routes = MasterRoutes(controllers, connect=connect)
        self._following: asyncio.Task[None] | None = None
        self._home_life = HomeLife(life, count(1), is_elected=bool(controllers))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep all members up to date until the block ends."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._rounds.attach(self)
            waiting = None
            if self._rounds.is_master:
                self._update_connections()
            else:
                waiting = group.create_task(self._connect_as_master(), name="wait for mastership")
            try:
                yield
            finally:
                if waiting is not None:
                    waiting.cancel()
                self._rounds.detach(self)
                self._group = None
                self._stop_following()
                for task in (*self._tasks.values(), *self._ending.values()):
                    task.cancel()

    async def _connect_as_master(self) -> None:
        await self._rounds.wait_until_master()
        self._update_connections()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the members; no samples of members if this is not the home."""
        connected = GaugeMetricFamily(
            "rocketmq_member_connected",
            "1 while the broker group has the whole configuration of this home, else 0.",
            labels=("broker_group", "address"),
        )
        for name, connection in self.connections.items():
            connected.add_metric((name, connection.group.address), int(connection.is_connected))
        yield connected
        unreachable = GaugeMetricFamily(
            "rocketmq_member_unreachable_seconds",
            "Time for which the broker group has not answered this home; 0 while it answers.",
            labels=("broker_group",),
        )
        for name, connection in self.connections.items():
            unreachable.add_metric((name,), connection.unreachable_s())
        yield unreachable
        restores = CounterMetricFamily(
            "rocketmq_home_restores",
            "Returns of the home with an older store; newer configuration was deleted here.",
        )
        restores.add_metric((), self._rounds.engine.following.restored_count)
        yield restores

    def _update_connections(self) -> None:
        """Connect to new members, and disconnect from removed ones."""
        if self._group is None:
            return
        engine = self._rounds.engine
        groups: dict[str, BrokerGroup] = {}
        if engine.broker_groups.is_home:
            groups = dict(engine.catalog.membership.groups)
            groups.pop(engine.catalog.broker_name, None)
        for name, connection in list(self.connections.items()):
            group = groups.get(name)
            if group is None or group.address != connection.group.address:
                self._tasks.pop(name).cancel()
                connection.forget_route()
                del self.connections[name]
            else:
                connection.group = group
        for name, group in groups.items():
            if name not in self.connections:
                connection = self.connections[name] = MemberConnection(
                    group,
                    self._rounds,
                    self._connect,
                    self._routes,
                    self._home_life,
                    self._finish_removal,
                    self.on_stocks,
                )
                self._tasks[name] = self._group.create_task(connection.run(), name=f"member {name}")
        if not self.connections:
            self._stop_following()
        elif self._following is None:
            self._following = self._group.create_task(self._follow_routes(), name="routes")

    async def _follow_routes(self) -> None:
        async with self._routes.following():
            await asyncio.Event().wait()

    def _stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None

    def _finish_removal(self, name: str) -> None:
        """Finish the removal of a member that has left while the home was down."""
        if self._group is not None and name not in self._ending:
            self._ending[name] = self._group.create_task(
                self._end_removal(name), name=f"end {name}"
            )

    async def _end_removal(self, name: str) -> None:
        def remove(engine: Engine, turn: Turn) -> Generator[None, None, None]:
            engine.broker_groups.find_removable(name)
            # The record of the operator's request was lost with its answer.
            change = AuditedChange(
                {
                    "process": engine.catalog.broker_name,
                    "call": "end of a removal",
                    "resource": f"BrokerGroup:{name}",
                    "action": "Delete",
                },
                before=broker_group_facts(engine.catalog.membership.groups.get(name)),
            )
            with engine.fold.audited(change):
                yield from engine.broker_groups.remove(name, turn.now_ms)
            config_log.broker_group_removed(name, by="record of the member")

        try:
            await self._rounds.call_slices(remove)
        except ServiceError as error:
            # Added again or removed in the meantime; or the next frame tries this again.
            log.info("removal not finished", broker_group=name, reason=error.message)
        finally:
            del self._ending[name]

    def add_config_changes(self, changes: ConfigChanges) -> None:
        """Keep the changes of the current round until it is committed."""
        if not self.connections and changes.membership is None:
            return
        effects = self._rounds.turn.effects
        update = config_frames.changed_config(changes)
        if changes.has_security:
            update.MergeFrom(
                security_frames.changed_items(changes.security_items, changes.security_version)
            )
        effects[self] = _ConfigEffect(self, self._rounds.count, update)

    def note_rejection(self, _why: str) -> None:
        """Ignore it: members send no messages."""

    def send_update(self, round_number: int, update: pb.ConfigUpdate) -> None:
        """Send the changes of a committed round to every member."""
        if update.HasField("membership"):
            self._update_connections()
        for connection in self.connections.values():
            connection.queue_update(round_number, update)


@final
class _ConfigEffect:
    """The configuration changes of a round, for the members."""

    def __init__(self, members: ClusterMembers, round_number: int, update: pb.ConfigUpdate) -> None:
        self._members = members
        self._round_number = round_number
        self._update = update

    def release(self) -> Iterator[None]:
        self._members.send_update(self._round_number, self._update)
        yield
