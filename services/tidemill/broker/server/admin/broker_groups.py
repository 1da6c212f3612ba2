"""BrokerAdmin's calls about the members of the cluster, served at its home."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Final

from tidemill.broker.server.admin.service import in_round, refusal
from tidemill.broker.server.wire import config_frames, config_log
from tidemill.common.errors import Conflict, ServiceError
from tidemill.message.broker_names import check_name
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.membership import BrokerGroup
    from tidemill.broker.server.members.members import Follower, Members
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

COUNT_TIMEOUT_S: Final = 2.0  # of a member that is asked what is left; the list comes without it
LEAVE_TIMEOUT_S: Final = 10.0  # whoever asks for a removal asks again


class BrokerGroupAdmin:
    """The gRPC face of the list of broker groups."""

    def __init__(self, rounds: Rounds, members: Members, *, replica_name: str) -> None:
        self._rounds = rounds
        self._members = members
        self._replica_name = replica_name

    async def GetBrokerStatus(
        self,
        request: pb.GetBrokerStatusRequest,  # noqa: ARG002  # The contract has it, and it is empty.
    ) -> pb.BrokerStatus:
        """Return what this broker says of itself, home or not."""

        def read(engine: Engine, _turn: Turn) -> pb.BrokerStatus:
            name = engine.catalog.broker_name
            return pb.BrokerStatus(
                name=name, epoch=engine.log.epoch, replica_name=self._replica_name or name
            )

        return await in_round(self._rounds, read)

    async def ListBrokerGroups(self, request: pb.ListBrokerGroupsRequest) -> pb.BrokerGroupList:
        """Return all members, and what is left at those that drain where that is asked for."""

        def read(engine: Engine, _turn: Turn) -> tuple[str, list[BrokerGroup]]:
            if engine.catalog.membership.home is not None:
                engine.broker_groups.check_home()
            return engine.catalog.broker_name, engine.catalog.membership.in_order()

        own_name, members = await in_round(self._rounds, read)
        if not members:
            alone = pb.Member(name=own_name, state=pb.MEMBER_STATE_ACTIVE)
            return pb.BrokerGroupList(
                groups=[pb.BrokerGroup(member=alone, is_home=True, is_connected=True)]
            )
        groups = [self._describe(group, own_name) for group in members]
        if request.with_left:
            await asyncio.gather(*map(self._count_left, groups))
        return pb.BrokerGroupList(groups=groups)

    def _describe(self, group: BrokerGroup, own_name: str) -> pb.BrokerGroup:
        is_home = group.name == own_name
        follower = self._members.followers.get(group.name)
        return pb.BrokerGroup(
            member=config_frames.member(group),
            is_home=is_home,
            is_connected=is_home or (follower is not None and follower.is_connected),
            reason=follower.reason if follower is not None else "",
        )

    async def _count_left(self, group: pb.BrokerGroup) -> None:
        follower = self._members.followers.get(group.member.name)
        if group.member.state != pb.MEMBER_STATE_DRAINING or follower is None:
            return
        group.last_left.CopyFrom(follower.last_left)
        group.last_left_at_ms = follower.last_left_at_ms
        if not follower.is_connected:
            return
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_S):
                left = await follower.count_left()
        except (ServiceError, TimeoutError) as error:
            group.reason = f"what is left there is not known: {error or 'it does not answer'}"
        else:
            group.left.CopyFrom(left)

    async def AddBrokerGroup(self, request: pb.AddBrokerGroupRequest) -> pb.BrokerGroup:
        """Add a member, or take one back that drains."""

        def add(engine: Engine, turn: Turn) -> tuple[str, BrokerGroup]:
            # One that is a member may have a name of before there was a rule.
            if request.name not in engine.catalog.membership.groups:
                check_name(request.name)
            group = engine.broker_groups.add(request.name, request.address, turn.now_ms)
            config_log.broker_group_put(group, by=request.requested_by)
            return engine.catalog.broker_name, group

        own_name, group = await in_round(self._rounds, add)
        return self._describe(group, own_name)

    async def DrainBrokerGroup(self, request: pb.DrainBrokerGroupRequest) -> pb.BrokerGroup:
        """Let a member have no more messages."""

        def drain(engine: Engine, turn: Turn) -> tuple[str, BrokerGroup]:
            group = engine.broker_groups.drain(request.name, turn.now_ms)
            config_log.broker_group_put(group, by=request.requested_by)
            return engine.catalog.broker_name, group

        own_name, group = await in_round(self._rounds, drain)
        return self._describe(group, own_name)

    async def RemoveBrokerGroup(self, request: pb.RemoveBrokerGroupRequest) -> pb.BrokerGroup:
        """Remove a member that drains and is empty, or whose messages are given up.

        One that is forced out keeps its store as it is: added again, it brings what it has.
        """

        def find(engine: Engine, _turn: Turn) -> tuple[str, BrokerGroup]:
            group = engine.broker_groups.find_removable(request.name)
            return engine.catalog.broker_name, group

        own_name, group = await in_round(self._rounds, find)
        described = self._describe(group, own_name)
        follower = self._members.followers.get(group.name)
        if request.force:
            await self._count_left(described)
        try:
            if request.force and not described.HasField("left"):
                # It cannot be asked anything, so it is not waited for.
                reason = described.reason or "it is not connected"
                config_log.broker_group_given_up(described, reason, by=request.requested_by)
            else:
                await self._leave_or_give_up(request, described, follower)

            # It takes nothing any more. If this is not recorded, it says so when it is told next.
            def remove(engine: Engine, turn: Turn) -> Generator[None, None, None]:
                if request.name not in engine.catalog.membership.groups:
                    return  # It has said so meanwhile.
                engine.broker_groups.find_removable(request.name)
                yield from engine.broker_groups.remove(request.name, turn.now_ms)
                config_log.broker_group_removed(request.name, by=request.requested_by)

            await self._rounds.call_slices(remove)
        except ServiceError as error:
            raise refusal(error) from error
        return described

    async def _leave_or_give_up(
        self, request: pb.RemoveBrokerGroupRequest, group: pb.BrokerGroup, follower: Follower | None
    ) -> None:
        try:
            await self._leave(group.member.name, follower)
        except ServiceError as error:
            if not request.force:
                raise
            config_log.broker_group_given_up(group, error.message, by=request.requested_by)

    async def _leave(self, name: str, follower: Follower | None) -> None:
        if follower is None:
            raise Conflict(
                f"{name} is not connected: nobody knows what is left there. Start it again, or give"
                f" up what it has: `tidemill broker-group remove {name} --force`"
            )
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await follower.leave()
        except TimeoutError:
            raise Conflict(f"{name} does not answer; try again") from None
