"""BrokerAdmin's calls about the broker groups of the cluster, served at its home."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Final

from tidemill.broker.server.round.rpc import in_round, read_in_round, rpc_error
from tidemill.broker.server.wire import config_frames, config_log
from tidemill.broker.server.wire.audit_facts import CREATE, UPDATE, audited, broker_group_facts
from tidemill.common.errors import BrokerUnreachable, Conflict, ServiceError
from tidemill.message.broker_names import check_name
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.membership import BrokerGroup
    from tidemill.broker.server.members.cluster_members import ClusterMembers
    from tidemill.broker.server.members.member_connection import MemberConnection
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

COUNT_TIMEOUT_S: Final = 2.0  # for the backlog of a member; after it the list omits the backlog
LEAVE_TIMEOUT_S: Final = 10.0  # for a member to leave; after it the caller has to try again


class BrokerGroupAdmin:
    """Lists, adds, drains and removes broker groups."""

    def __init__(self, rounds: Rounds, members: ClusterMembers, *, replica_name: str) -> None:
        self._rounds = rounds
        self._members = members
        self._replica_name = replica_name

    async def GetBrokerStatus(
        self,
        request: pb.GetBrokerStatusRequest,  # noqa: ARG002  # part of the contract, without fields
    ) -> pb.BrokerStatus:
        """Return the name and epoch of this broker, home or not."""

        def read(engine: Engine, _turn: Turn) -> pb.BrokerStatus:
            name = engine.catalog.broker_name
            return pb.BrokerStatus(
                name=name,
                epoch=engine.log.epoch,
                replica_name=self._replica_name or name,
                feature_level=engine.catalog.feature_level,
            )

        return await read_in_round(self._rounds, read)

    async def ListBrokerGroups(self, request: pb.ListBrokerGroupsRequest) -> pb.BrokerGroupList:
        """Return all broker groups, on request with the backlogs of draining ones."""

        def read(engine: Engine, _turn: Turn) -> tuple[str, list[BrokerGroup]]:
            if engine.catalog.membership.home is not None:
                engine.broker_groups.check_home()
            return engine.catalog.broker_name, engine.catalog.membership.in_order()

        own_name, members = await read_in_round(self._rounds, read)
        if not members:
            alone = pb.ClusterMember(name=own_name, state=pb.MEMBER_STATE_ACTIVE)
            return pb.BrokerGroupList(
                groups=[pb.BrokerGroup(member=alone, is_home=True, is_connected=True)]
            )
        groups = [self._describe(group, own_name) for group in members]
        if request.with_backlog:
            await asyncio.gather(*map(self._add_backlog, groups))
        return pb.BrokerGroupList(groups=groups)

    def _describe(self, group: BrokerGroup, own_name: str) -> pb.BrokerGroup:
        is_home = group.name == own_name
        connection = self._members.connections.get(group.name)
        return pb.BrokerGroup(
            member=config_frames.member(group),
            is_home=is_home,
            is_connected=is_home or (connection is not None and connection.is_connected),
            reason=connection.reason if connection is not None else "",
            unreachable_ms=int(connection.unreachable_s() * 1000) if connection is not None else 0,
        )

    async def _add_backlog(self, group: pb.BrokerGroup) -> None:
        """Add the backlog of a draining broker group, and the last one that it reported."""
        connection = self._members.connections.get(group.member.name)
        if group.member.state != pb.MEMBER_STATE_DRAINING or connection is None:
            return
        group.last_backlog.CopyFrom(connection.last_backlog)
        group.last_backlog_at_ms = connection.last_backlog_at_ms
        if not connection.is_connected:
            return
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_S):
                backlog = await connection.count_backlog()
        except (ServiceError, TimeoutError) as error:
            group.reason = f"backlog unknown: {error or 'timeout'}"
        else:
            group.backlog.CopyFrom(backlog)

    async def AddBrokerGroup(self, request: pb.AddBrokerGroupRequest) -> pb.BrokerGroup:
        """Add a broker group, or end the draining of one."""

        def add(engine: Engine, turn: Turn) -> tuple[str, BrokerGroup]:
            # The name of a member may be older than the rule for names.
            if request.name not in engine.catalog.membership.groups:
                check_name(request.name)
            before = engine.catalog.membership.groups.get(request.name)
            facts = {"address": request.address, "state": "active"}
            action = CREATE if before is None else UPDATE
            with audited(
                engine, request, before=broker_group_facts(before), after=facts, action=action
            ):
                group = engine.broker_groups.add(request.name, request.address, turn.now_ms)
            config_log.broker_group_put(group, by=request.requested_by)
            return engine.catalog.broker_name, group

        own_name, group = await in_round(self._rounds, add)
        return self._describe(group, own_name)

    async def DrainBrokerGroup(self, request: pb.DrainBrokerGroupRequest) -> pb.BrokerGroup:
        """Send no more messages to a broker group."""

        def drain(engine: Engine, turn: Turn) -> tuple[str, BrokerGroup]:
            facts = broker_group_facts(engine.catalog.membership.groups.get(request.name))
            with audited(engine, request, before=facts, after={**facts, "state": "draining"}):
                group = engine.broker_groups.drain(request.name, turn.now_ms)
            config_log.broker_group_put(group, by=request.requested_by)
            return engine.catalog.broker_name, group

        own_name, group = await in_round(self._rounds, drain)
        return self._describe(group, own_name)

    async def RemoveBrokerGroup(self, request: pb.RemoveBrokerGroupRequest) -> pb.BrokerGroup:
        """Remove a draining broker group if it is empty, or by force with its backlog.

        A broker group that is removed by force keeps its store. If it is added again, it serves the
        messages in that store.
        """

        def find(engine: Engine, _turn: Turn) -> tuple[str, BrokerGroup]:
            group = engine.broker_groups.find_removable(request.name)
            return engine.catalog.broker_name, group

        own_name, group = await read_in_round(self._rounds, find)
        described = self._describe(group, own_name)
        connection = self._members.connections.get(group.name)
        if request.force:
            await self._add_backlog(described)
        try:
            if request.force and not described.HasField("backlog"):
                # The broker group is unreachable, so there is nothing to wait for.
                reason = described.reason or "not connected"
                config_log.broker_group_abandoned(described, reason, by=request.requested_by)
            else:
                await self._leave_or_give_up(request, described, connection)

            # The broker group accepts nothing from here on. If this record fails, it reports that
            # it has left on its next connection.
            def remove(engine: Engine, turn: Turn) -> Generator[None, None, None]:
                if request.name not in engine.catalog.membership.groups:
                    return  # Such a report has finished the removal.
                engine.broker_groups.find_removable(request.name)
                facts = broker_group_facts(engine.catalog.membership.groups[request.name])
                with audited(engine, request, before={**facts, "force": request.force}):
                    yield from engine.broker_groups.remove(request.name, turn.now_ms)
                config_log.broker_group_removed(request.name, by=request.requested_by)

            await self._rounds.call_slices(remove)
        except ServiceError as error:
            raise rpc_error(error) from error
        return described

    async def _leave_or_give_up(
        self,
        request: pb.RemoveBrokerGroupRequest,
        group: pb.BrokerGroup,
        connection: MemberConnection | None,
    ) -> None:
        try:
            await self._request_leave(group.member.name, connection)
        except ServiceError as error:
            if not request.force:
                raise
            config_log.broker_group_abandoned(group, error.message, by=request.requested_by)

    async def _request_leave(self, name: str, connection: MemberConnection | None) -> None:
        remedy = (
            f"so its backlog is unknown. Start it again, or remove it with its backlog:"
            f" `tidemill broker-group remove {name} --force`"
        )
        if connection is None:
            raise Conflict(f"{name} is not connected, {remedy}")
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await connection.request_leave()
        except BrokerUnreachable as error:
            raise BrokerUnreachable(f"{error.message}; {remedy}") from error
        except TimeoutError:
            raise Conflict(f"{name} timed out; try again later") from None
