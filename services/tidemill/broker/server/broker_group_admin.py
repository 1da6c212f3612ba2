"""BrokerAdmin's calls about the members of the cluster, served at its home."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Final

from tidemill.broker.server import config_frames, config_log
from tidemill.broker.server.admin import in_round, refusal
from tidemill.common.errors import BadRequest, Conflict, ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.membership import BrokerGroup
    from tidemill.broker.server.members import Follower, Members
    from tidemill.broker.server.rounds import Rounds, Turn

COUNT_TIMEOUT_S: Final = 2.0  # of a member that is asked what is left; the list comes without it
LEAVE_TIMEOUT_S: Final = 10.0  # whoever asks for a removal asks again
NAME_CHARS_MAX: Final = 64  # of a broker group: it stands in every handle


class BrokerGroupAdmin:
    """The gRPC face of the list of broker groups."""

    def __init__(self, rounds: Rounds, members: Members) -> None:
        self._rounds = rounds
        self._members = members

    async def GetBrokerStatus(
        self,
        request: pb.Empty,  # noqa: ARG002  # The contract has it, and it is empty.
    ) -> pb.BrokerStatus:
        """Return what this broker says of itself, home or not."""

        def read(engine: Engine, _turn: Turn) -> pb.BrokerStatus:
            return pb.BrokerStatus(name=engine.catalog.broker_name, epoch=engine.log.epoch)

        return await in_round(self._rounds, read)

    async def ListBrokerGroups(self, request: pb.ListBrokerGroupsRequest) -> pb.BrokerGroupList:
        """Return all members, and what is left at those that drain where that is asked for."""

        def read(engine: Engine, _turn: Turn) -> tuple[str, list[BrokerGroup]]:
            if engine.catalog.membership.home is not None:
                engine.broker_groups.check_home()
            return engine.catalog.broker_name, engine.catalog.membership.in_order()

        own_name, members = await in_round(self._rounds, read)
        if not members:
            alone = pb.Member(name=own_name, state=pb.ACTIVE)
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
        if group.member.state != pb.DRAINING or follower is None or not follower.is_connected:
            return
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_S):
                reply = await follower.ask(pb.FollowFrame(count_left=True))
        except (ServiceError, TimeoutError) as error:
            group.reason = f"what is left there is not known: {error or 'it does not answer'}"
        else:
            group.left.CopyFrom(reply.left)

    async def AddBrokerGroup(self, request: pb.AddBrokerGroupRequest) -> pb.BrokerGroup:
        """Add a member, or take one back that drains."""

        def add(engine: Engine, turn: Turn) -> tuple[str, BrokerGroup]:
            if not 0 < len(request.name) <= NAME_CHARS_MAX:
                raise BadRequest(f"the name of a broker group has 1 to {NAME_CHARS_MAX} characters")
            group = engine.broker_groups.add(request.name, request.address, turn.now_ms)
            config_log.broker_group_put(group, by=request.requested_by)
            return engine.catalog.broker_name, group

        own_name, group = await in_round(self._rounds, add)
        return self._describe(group, own_name)

    async def DrainBrokerGroup(self, request: pb.BrokerGroupRequest) -> pb.BrokerGroup:
        """Let a member have no more messages."""

        def drain(engine: Engine, turn: Turn) -> tuple[str, BrokerGroup]:
            group = engine.broker_groups.drain(request.name, turn.now_ms)
            config_log.broker_group_put(group, by=request.requested_by)
            return engine.catalog.broker_name, group

        own_name, group = await in_round(self._rounds, drain)
        return self._describe(group, own_name)

    async def RemoveBrokerGroup(self, request: pb.BrokerGroupRequest) -> pb.BrokerGroup:
        """Remove a member that drains and is empty."""

        def find(engine: Engine, _turn: Turn) -> tuple[str, BrokerGroup]:
            group = engine.broker_groups.find_removable(request.name)
            return engine.catalog.broker_name, group

        own_name, group = await in_round(self._rounds, find)
        described = self._describe(group, own_name)
        try:
            await self._leave(group, self._members.followers.get(group.name))

            # It takes nothing any more. If this is not recorded, the removal is asked for again.
            def remove(engine: Engine, turn: Turn) -> Generator[None, None, None]:
                engine.broker_groups.find_removable(request.name)
                yield from engine.broker_groups.remove(request.name, turn.now_ms)
                config_log.broker_group_removed(request.name, by=request.requested_by)

            await self._rounds.call_slices(remove)
        except ServiceError as error:
            raise refusal(error) from error
        return described

    async def _leave(self, group: BrokerGroup, follower: Follower | None) -> None:
        if follower is None:
            raise Conflict(f"{group.name} is not connected: nobody knows what is left there")
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await follower.leave()
        except TimeoutError:
            raise Conflict(f"{group.name} does not answer; try again") from None
