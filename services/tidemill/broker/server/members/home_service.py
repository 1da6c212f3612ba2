"""BrokerHome: what the home of this broker says, done in rounds; one reply for each frame."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Final, TypedDict, Unpack, final

from google.protobuf.message import DecodeError

from tidemill.broker.engine.metadata.membership import Home
from tidemill.broker.engine.queries.removal_check import Left, LeftItem
from tidemill.broker.server.wire import config_frames, config_log
from tidemill.common.errors import BY_NAME, BadRequest, Conflict, ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.transport.aio.call import RpcCall


# Processes of the home that another has taken the place of: each start adds one, and what is on its
# way from one is gone long before there are so many.
GONE_LIVES_MAX: Final = 16
NAMED_MAX: Final = 8  # of what is left, in a refusal; `broker-group status` has the rest


class _HasLeft(Conflict):
    """This broker has left the cluster whose home speaks."""


class _Newer(Conflict):
    """Another process of the home was heard, whose log was ahead."""

    def __init__(self, message: str, home: Home) -> None:
        super().__init__(message)
        self.heard = pb.Heard(epoch=home.epoch, life=home.life)


@final
class BrokerHomeService:
    """The gRPC face of following."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._sequence = 0  # of the last frame of the life that is listened to
        self._streams: Counter[str] = Counter()  # that are open, by the life that speaks
        self._gone: deque[str] = deque(maxlen=GONE_LIVES_MAX)

    async def follow(self, call: RpcCall) -> None:
        """Do as the home says until it leaves."""
        life = ""
        try:
            async for request in call:
                frame = _parse(request)
                if frame.life != life:
                    self._streams.subtract([life])
                    life = frame.life
                    self._streams[life] += 1
                reply = await self._answer(frame)
                reply.sequence = frame.sequence
                await call.send(reply.SerializeToString())
        finally:
            self._streams.subtract([life])
            self._streams = +self._streams

    async def _answer(self, frame: pb.FollowFrame) -> pb.FollowReply:
        def do(engine: Engine, turn: Turn) -> Generator[None, None, pb.FollowReply]:
            before = engine.catalog.membership.home
            is_older = self._check_order(frame, before)
            is_restored = False
            is_new = before is not None and before.life != frame.life
            if before is not None and is_new and any(each.is_complete for each in frame.configs):
                is_restored = config_log.home_restored(before, frame, engine, is_older=is_older)
            done = yield from follow(frame, engine, turn)
            if before is not None and is_new:
                self._gone.append(before.life)
            engine.following.restored_count += is_restored
            self._sequence = frame.sequence
            return done

        try:
            return await self._rounds.call_slices(do)
        except _Newer as error:
            return _refusal(error, heard=error.heard)
        except _HasLeft as error:
            return _refusal(error, has_left=True)
        except ServiceError as error:
            return _refusal(error)

    def _check_order(self, frame: pb.FollowFrame, home: Home | None) -> bool:
        """Raise Conflict unless a frame is the home's newest word; True: its store is an older one.

        Streams overlap where one of them was lost at one end only, so what comes may be late. Two
        that live side by side do not take turns: while the one before has a stream no other is
        listened to, whatever its epoch, since a copy's start adds one to it as a restart does; and
        who was replaced stays so. A home that was restored from a backup has an older log than was
        heard of: it proves that it is alive by naming what it was refused for.
        """
        if home is None or not home.life:
            return False
        if frame.life == home.life:
            if frame.sequence <= self._sequence:
                raise Conflict("the home has said something newer meanwhile")
            return False
        if frame.life in self._gone:
            raise Conflict(f"another process of {home.name} has taken the place of this one")
        if self._streams[home.life]:
            raise Conflict(
                f"another {home.name} is connected, in epoch {home.epoch} of its log; this is"
                f" {frame.epoch}, a copy of its store that may not live beside it"
            )
        if frame.epoch > home.epoch:
            return False
        if (frame.instead_of.epoch, frame.instead_of.life) != (home.epoch, home.life):
            raise _Newer(
                f"{home.name} was heard in epoch {home.epoch} of its log; this is {frame.epoch}",
                home,
            )
        return True


class _Refusal(TypedDict, total=False):
    """What a refusal says beside why."""

    heard: pb.Heard
    has_left: bool


def _refusal(error: ServiceError, **fields: Unpack[_Refusal]) -> pb.FollowReply:
    name = type(error).__name__ if type(error).__name__ in BY_NAME else Conflict.__name__
    return pb.FollowReply(error=name, message=error.message, **fields)


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
    if catalog.membership.home is None and frame.leave:
        return reply  # It has left already, and the home has not heard.
    is_draining = frame.member.state == pb.MEMBER_STATE_DRAINING
    home = Home(
        cluster_id=frame.membership.cluster_id,
        name=frame.membership.home_name,
        address=frame.membership.home_address,
        is_draining=is_draining,
        epoch=frame.epoch,
        life=frame.life,
    )
    has_left = catalog.membership.left_cluster_id == home.cluster_id
    if catalog.membership.home is None and is_draining and has_left:
        raise _HasLeft(f"{own_name} has left the cluster")
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
    if is_complete:
        yield from following.note_earlier(turn.now_ms)
    if frame.count_left or frame.leave:
        left = Left()
        yield from following.count_left(left, config_frames.read_readers(frame.readers))
        reply.left.CopyFrom(config_frames.left_frame(left))
        if frame.leave:
            if left:
                raise Conflict(_not_empty(own_name, left))
            yield from following.leave(frame.membership.cluster_id, turn.now_ms)
            config_log.home_met(home, None)
            return reply
    reply.begun.extend(config_frames.begun_frame(group) for group in following.take_begun())
    return reply


def _not_empty(name: str, left: Left) -> str:
    text = (
        f"{name} is not empty: {left.ready_count} messages are ready, "
        f"{left.in_flight_count} in flight and {left.delayed_count} delayed"
    )
    named = [_named(item) for item in left.items[:NAMED_MAX]]
    more = left.unnamed_count + len(left.items) - len(named)
    return "; ".join(
        [text, *named, *([f"and {more} more: `tidemill broker-group status {name}`"] * bool(more))]
    )


def _named(item: LeftItem) -> str:
    count = f"{item.topic}: {item.ready_count + item.in_flight_count}"
    if item.pulled_queue_id is not None:
        return (
            f"{item.topic}, queue {item.pulled_queue_id}: {item.ready_count} for {item.group},"
            " which has not pulled them yet"
        )
    if not item.group:
        return f"{count} that nobody has read"
    return f"{count} for {item.group}" + (", which has not read it there yet" * item.is_unread)


def _parse(request: bytes) -> pb.FollowFrame:
    try:
        return pb.FollowFrame.FromString(request)
    except DecodeError:
        raise RpcError(RpcCode.INVALID_ARGUMENT, "this is no FollowFrame") from None
