"""BrokerHome: what the home of this broker says, done in rounds; one reply for each frame."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from tidemill.broker.engine.following import Left
from tidemill.broker.engine.metadata.membership import Home
from tidemill.broker.server import config_frames, config_log
from tidemill.common.errors import BadRequest, Conflict, ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.rounds import Rounds, Turn
    from tidemill.transport.aio.call import RpcCall


class BrokerHomeService:
    """The gRPC face of following."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._newest = 0, 0  # epoch and sequence of the home's last word

    async def follow(self, call: RpcCall) -> None:
        """Do as the home says until it leaves."""
        async for request in call:
            frame = _parse(request)
            reply = await self._answer(frame)
            reply.sequence = frame.sequence
            await call.send(reply.SerializeToString())

    async def _answer(self, frame: pb.FollowFrame) -> pb.FollowReply:
        def do(engine: Engine, turn: Turn) -> Generator[None, None, pb.FollowReply]:
            # Streams overlap where one of them was lost at one end only.
            if (frame.epoch, frame.sequence) <= self._newest:
                raise Conflict("the home has said something newer meanwhile")
            done = yield from follow(frame, engine, turn)
            self._newest = frame.epoch, frame.sequence
            return done

        try:
            return await self._rounds.call_slices(do)
        except ServiceError as error:
            return pb.FollowReply(error=type(error).__name__, message=error.message)


def follow(
    frame: pb.FollowFrame, engine: Engine, turn: Turn
) -> Generator[None, None, pb.FollowReply]:
    """Do what one frame says. Raises Forbidden, Conflict, BadRequest."""
    following, catalog = engine.following, engine.catalog
    own_name = catalog.broker_name
    if frame.member.name != own_name:
        raise Conflict(f"this is {own_name}, and not {frame.member.name}: see its address")
    if not frame.membership.cluster_id:
        raise BadRequest("the frame names no home")
    reply = pb.FollowReply()
    if frame.leave and catalog.membership.home is None:
        return reply  # It has left already, and the home has not heard.
    is_draining = frame.member.state == pb.DRAINING
    home = Home(
        cluster_id=frame.membership.cluster_id,
        name=frame.membership.home_name,
        address=frame.membership.home_address,
        is_draining=is_draining,
    )
    before = catalog.membership.home
    is_complete = any(config.is_complete for config in frame.configs)
    following.meet(home, may_join=not is_draining, is_told_all=is_complete, now_ms=turn.now_ms)
    config_log.home_met(before, home)
    for config in frame.configs:
        gone_topics, gone_groups = config.deleted_topic_ids[:], config.deleted_group_ids[:]
        if config.is_complete:
            gone_topics, gone_groups = following.gone(
                {topic.id for topic in config.topics}, {group.id for group in config.groups}
            )
        # Read as they are needed: there may be very many, and each slice is to be short.
        yield from following.follow(
            (config_frames.read_topic(topic) for topic in config.topics if not topic.is_system),
            (config_frames.read_group(group) for group in config.groups),
            deleted_topic_ids=gone_topics,
            deleted_group_ids=gone_groups,
            now_ms=turn.now_ms,
        )
    if frame.count_left or frame.leave:
        left = Left()
        yield from following.count_left(left)
        reply.left.CopyFrom(config_frames.left_frame(left))
        if frame.leave:
            if left:
                raise Conflict(
                    f"{own_name} is not empty: {left.ready_count} messages are ready, "
                    f"{left.in_flight_count} in flight and {left.delayed_count} delayed"
                )
            yield from following.leave(frame.membership.cluster_id, turn.now_ms)
            config_log.home_met(home, None)
    return reply


def _parse(request: bytes) -> pb.FollowFrame:
    try:
        return pb.FollowFrame.FromString(request)
    except DecodeError:
        raise RpcError(RpcCode.INVALID_ARGUMENT, "this is no FollowFrame") from None
