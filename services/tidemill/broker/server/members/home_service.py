"""BrokerHome: the frames of the home, applied in rounds; each frame gets one reply."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Final, TypedDict, Unpack, final

from google.protobuf.message import DecodeError

from tidemill.broker.engine.metadata.membership import Home
from tidemill.broker.engine.queries.removal_check import RemovalBacklog, RemovalBacklogItem
from tidemill.broker.server.members.quota_stocks import QuotaStocks
from tidemill.broker.server.members.table_copy import TableCopy
from tidemill.broker.server.wire import config_frames, config_log
from tidemill.common.errors import BY_NAME, BadRequest, Conflict, ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.transport.aio.call import RpcCall


# Replaced processes of the home that are remembered. Each start of the home adds one, and frames of
# an old process are no longer in flight after this many starts.
REPLACED_LIVES_MAX: Final = 16
NAMED_MAX: Final = 8  # backlog items in an error; `broker-group show` lists all


class _FormerMember(Conflict):
    """This broker has left the cluster of the calling home."""


class _OutdatedHome(Conflict):
    """This broker has followed another process of the home, with a newer log."""

    def __init__(self, message: str, home: Home) -> None:
        super().__init__(message)
        self.heard = pb.HomeProcess(epoch=home.epoch, life=home.life)


@final
class BrokerHomeService:
    """The gRPC service through which the home sends its configuration."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._stocks = QuotaStocks()
        self._sequence = 0  # of the last frame of the life that this broker follows
        self._streams: Counter[str] = Counter()  # open streams by the life of their home process
        self._replaced: deque[str] = deque(maxlen=REPLACED_LIVES_MAX)

    async def follow(self, call: RpcCall) -> None:
        """Apply the frames of one stream until it ends."""
        life, copy = "", TableCopy()
        try:
            async for request in call:
                frame = _parse(request)
                if frame.life != life:
                    self._streams.subtract([life])
                    life = frame.life
                    self._streams[life] += 1
                reply = await self._answer(frame, copy)
                reply.sequence = frame.sequence
                await call.send(reply.SerializeToString())
        finally:
            self._streams.subtract([life])
            self._streams = +self._streams

    async def _answer(self, frame: pb.FollowFrame, copy: TableCopy) -> pb.FollowReply:
        def do(engine: Engine, turn: Turn) -> Generator[None, None, pb.FollowReply]:
            before = engine.catalog.membership.home
            is_older = self._check_order(frame, before)
            is_restored = False
            is_new = before is not None and before.life != frame.life
            if before is not None and is_new and any(each.is_complete for each in frame.configs):
                is_restored = config_log.home_restored(before, frame, engine, is_older=is_older)
            done = yield from follow(frame, engine, turn, copy, is_restored=is_restored)
            if before is not None and is_new:
                self._replaced.append(before.life)
            engine.following.restored_count += is_restored
            self._sequence = frame.sequence
            done.ended_spreads.extend(
                pb.EndedSpread(topic_id=topic_id, version=version)
                for topic_id, version in engine.key_spreads.take_ended()
            )
            if frame.count_stocks:
                stocks = yield from self._stocks.count(engine, turn.monotonic_ms)
                done.stocks.extend(self._stocks.page(stocks))
            return done

        try:
            reply = await self._rounds.call_slices(do)
            if copy.is_whole:
                await self._replace_table(frame, copy)
        except _OutdatedHome as error:
            return _rejection(error, heard=error.heard)
        except _FormerMember as error:
            return _rejection(error, has_left=True)
        except ServiceError as error:
            return _rejection(error)
        return reply

    async def _replace_table(self, frame: pb.FollowFrame, copy: TableCopy) -> None:
        """Replace the security items by those of the home, in several rounds.

        Raises Conflict if a newer frame of the home arrives meanwhile, over another stream.
        """
        copy.is_whole = False

        def check(engine: Engine) -> None:
            home = engine.catalog.membership.home
            if home is None or home.life != frame.life or self._sequence != frame.sequence:
                raise Conflict("a newer frame of the home has arrived")

        def plan(engine: Engine, _turn: Turn) -> Generator[None, None, list[list[bytes]]]:
            check(engine)
            return (yield from engine.security.plan_copy(copy.items, version=copy.version))

        for part in await self._rounds.call_slices(plan):

            def record(
                engine: Engine, turn: Turn, part: list[bytes] = part
            ) -> Generator[None, None, None]:
                check(engine)
                yield from engine.security.copy(part, turn.now_ms)

            await self._rounds.call_slices(record)

        def end(engine: Engine, turn: Turn) -> None:
            check(engine)
            engine.security.note_version(copy.version, turn.now_ms)

        await self._rounds.call(end)
        copy.items = {}

    def _check_order(self, frame: pb.FollowFrame, home: Home | None) -> bool:
        """Raise Conflict unless a frame is the newest of the home; return True if it is restored.

        Streams overlap if only one end has lost a stream, so a frame may come late. Two processes
        of the home do not alternate: while the current one has a stream, no other is accepted. The
        epoch does not decide, because the start of a copy adds one to it as a restart does. A
        replaced process stays replaced. A home that was restored from a backup has an older log
        than this broker has followed. It proves that it is the newest process by naming the life
        that it was rejected for.

        Controllers give each epoch to one master. With replicas, a higher epoch therefore decides
        at once: the former master may hang, and its stream may stay open.
        """
        if home is None or not home.life:
            return False
        if frame.life == home.life:
            if frame.sequence <= self._sequence:
                raise Conflict("the frame is older than the last frame of the home")
            return False
        if frame.is_elected and frame.epoch > home.epoch:
            return False
        if frame.life in self._replaced:
            raise Conflict(f"a newer process of {home.name} has replaced this one; stop this one")
        if self._streams[home.life]:
            raise Conflict(
                f"another process of {home.name} is connected (log epoch {home.epoch}, here"
                f" {frame.epoch}); stop the copy of its store"
            )
        if frame.epoch > home.epoch:
            return False
        if (frame.instead_of.epoch, frame.instead_of.life) != (home.epoch, home.life):
            raise _OutdatedHome(
                f"the log of {home.name} is in epoch {frame.epoch}, but this broker has followed"
                f" epoch {home.epoch}",
                home,
            )
        return True


class _RejectionFields(TypedDict, total=False):
    """The fields of a rejection, besides its error."""

    heard: pb.HomeProcess
    has_left: bool


def _rejection(error: ServiceError, **fields: Unpack[_RejectionFields]) -> pb.FollowReply:
    name = type(error).__name__ if type(error).__name__ in BY_NAME else Conflict.__name__
    return pb.FollowReply(error=name, message=error.message, **fields)


def follow(
    frame: pb.FollowFrame, engine: Engine, turn: Turn, copy: TableCopy, *, is_restored: bool = False
) -> Generator[None, None, pb.FollowReply]:
    """Apply one frame of a home, which may be restored. Raises Forbidden, Conflict, BadRequest."""
    following, catalog = engine.following, engine.catalog
    own_name = catalog.broker_name
    if frame.member.name != own_name:
        raise Conflict(
            f"this is {own_name}, not {frame.member.name}; correct the address of the broker group"
        )
    if not frame.membership.cluster_id:
        raise BadRequest("the frame does not name a cluster")
    reply = pb.FollowReply(feature_level=catalog.feature_level)
    if catalog.membership.home is None and frame.leave:
        return reply  # This broker has left before, and the reply was lost.
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
        raise _FormerMember(f"{own_name} has left the cluster")
    before = catalog.membership.home
    is_complete = any(config.is_complete for config in frame.configs)
    following.accept_home(
        home, may_join=not is_draining, is_complete=is_complete, now_ms=turn.now_ms
    )
    config_log.home_changed(before, home)
    for config in frame.configs:
        deleted_topics, deleted_groups = config.deleted_topic_ids[:], config.deleted_group_ids[:]
        if config.is_complete:
            deleted_topics, deleted_groups = following.find_deleted(
                {topic.id for topic in config.topics}, {group.id for group in config.groups}
            )
        # Generators: there may be very many topics and groups, and each slice must be short.
        yield from following.follow(
            (config_frames.read_topic(topic) for topic in config.topics if not topic.is_system),
            (config_frames.read_group(group) for group in config.groups),
            deleted_topic_ids=deleted_topics,
            deleted_group_ids=deleted_groups,
            is_restored=is_restored,
            now_ms=turn.now_ms,
        )
        yield from copy.apply(config, engine, turn)
    if frame.count_backlog or frame.leave:
        backlog = RemovalBacklog()
        yield from following.count_backlog(backlog, config_frames.read_readers(frame.readers))
        reply.backlog.CopyFrom(config_frames.backlog_frame(backlog))
        if frame.leave:
            if backlog:
                raise Conflict(_not_empty(own_name, backlog))
            yield from following.leave(frame.membership.cluster_id, turn.now_ms)
            config_log.home_changed(home, None)
            return reply
    reply.begun.extend(
        config_frames.begun_frame(group) for group in following.take_unreported_beginnings()
    )
    return reply


def _not_empty(name: str, backlog: RemovalBacklog) -> str:
    text = (
        f"{name} is not empty: {backlog.ready_count} messages are ready,"
        f" {backlog.in_flight_count} in flight and {backlog.delayed_count} delayed"
    )
    if backlog.half_count:
        text += f", and {backlog.half_count} half messages are open (tidemill transaction list)"
    if backlog.key_count:
        text += f", and {backlog.key_count} dedup keys are known: wait for the end of their windows"
    named = [_named(item) for item in backlog.items[:NAMED_MAX]]
    more = backlog.unnamed_count + len(backlog.items) - len(named)
    return "; ".join(
        [text, *named, *([f"and {more} more: `tidemill broker-group show {name}`"] * bool(more))]
    )


def _named(item: RemovalBacklogItem) -> str:
    count = f"{item.topic}: {item.ready_count + item.in_flight_count}"
    if item.pulled_queue_id is not None:
        return (
            f"{item.topic}, queue {item.pulled_queue_id}: {item.ready_count} for {item.group},"
            " which has not pulled them yet"
        )
    if not item.group:
        return f"{count} that no group has read"
    return f"{count} for {item.group}" + (", which has not read it there yet" * item.is_unread)


def _parse(request: bytes) -> pb.FollowFrame:
    try:
        return pb.FollowFrame.FromString(request)
    except DecodeError:
        raise RpcError(RpcCode.INVALID_ARGUMENT, "the message is not a FollowFrame") from None
