"""BrokerAdmin: changes and questions of the admin process, through the same rounds as messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.server.round.rpc import in_round
from tidemill.broker.server.scrape.lag import PROGRESS_A_ROUND
from tidemill.broker.server.wire import config_frames, config_log
from tidemill.common.errors import BadRequest, Conflict, GroupNotFound, TopicNotFound
from tidemill.message.resource_names import HIDDEN_TOPIC_PREFIX, check_group, check_own_topic
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup, Topic
    from tidemill.broker.engine.pop.progress_index import ProgressKey
    from tidemill.broker.engine.queries.inspection import MessageSearch
    from tidemill.broker.engine.time_search import TimeSearch
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

T = TypeVar("T")

FOUND_MAX = 256  # messages of one search, whatever is asked for


class BrokerAdminService:
    """The gRPC face of the engine's configuration and inspection."""

    def __init__(self, rounds: Rounds, *, auto_create: bool) -> None:
        self._rounds = rounds
        self._auto_create = auto_create

    async def PutTopic(self, request: pb.PutTopicRequest) -> pb.PutTopicReply:
        """Create or change a topic."""

        def put(engine: Engine, turn: Turn) -> pb.PutTopicReply:
            check_own_topic(request.name)
            before = engine.catalog.find_topic(request.name)
            topic = engine.administration.put_topic(
                request.name,
                type_=config_frames.topic_type(request.type),
                queues=request.queues,
                delivery_spread_ms=config_frames.delivery_spread_ms(request),
                is_forced=request.force,
                now_ms=turn.now_ms,
            )
            config_log.topic_put(before, topic, auto_create=False, by=request.requested_by)
            return pb.PutTopicReply(
                topic=config_frames.topic_config(topic),
                before=config_frames.topic_config(before) if before else None,
            )

        return await self._call(put)

    async def DeleteTopic(self, request: pb.DeleteTopicRequest) -> pb.DeleteTopicReply:
        """Delete a topic with its messages, or say what that would take."""

        def delete(engine: Engine, turn: Turn) -> pb.DeleteTopicReply:
            find_topic(engine, request.name)
            topic = engine.administration.find_deletable(request.name)
            use = engine.inspection.use_of(topic)
            if not request.dry_run:
                engine.administration.delete_topic(request.name, turn.now_ms)
                config_log.topic_deleted(topic, use, by=request.requested_by)
            return pb.DeleteTopicReply(
                topic=config_frames.topic_config(topic),
                messages=use.message_count,
                groups=use.groups,
            )

        return await self._call(delete)

    async def PutGroup(self, request: pb.PutGroupRequest) -> pb.PutGroupReply:
        """Create or change a consumer group."""

        def put(engine: Engine, turn: Turn) -> pb.PutGroupReply:
            check_group(request.name)
            before = engine.catalog.find_group(request.name)
            group = engine.administration.put_group(
                request.name, **config_frames.group_fields(request), now_ms=turn.now_ms
            )
            config_log.group_put(before, group, auto_create=False, by=request.requested_by)
            return pb.PutGroupReply(
                group=config_frames.group_config(group),
                before=config_frames.group_config(before) if before else None,
            )

        return await self._call(put)

    async def DeleteGroup(self, request: pb.DeleteGroupRequest) -> pb.DeleteGroupReply:
        """Delete a consumer group with its progress, or say what that would take."""
        progress = await self.GetGroupProgress(pb.GetGroupProgressRequest(name=request.name))
        topics = sorted({queue.topic for queue in progress.queues})
        lag = sum(queue.ready_count + queue.in_flight_count for queue in progress.queues)

        def delete(engine: Engine, turn: Turn) -> pb.DeleteGroupReply:
            group = find_group(engine, request.name)
            if not request.dry_run:
                engine.administration.delete_group(request.name, turn.now_ms)
                config_log.group_deleted(group, topics, lag, by=request.requested_by)
            return pb.DeleteGroupReply(
                group=config_frames.group_config(group), topics=topics, lag=lag
            )

        return await self._call(delete)

    async def GetConfig(
        self,
        request: pb.GetConfigRequest,  # noqa: ARG002  # The contract has it, and it is empty.
    ) -> pb.ConfigUpdate:
        """Return all topics and groups."""

        def get(engine: Engine, _turn: Turn) -> pb.ConfigUpdate:
            return config_frames.complete_config(engine, auto_create=self._auto_create)

        return await self._call(get)

    async def GetTopicStatus(self, request: pb.GetTopicStatusRequest) -> pb.TopicStatus:
        """Return a topic and what its queues hold."""

        def get(engine: Engine, _turn: Turn) -> pb.TopicStatus:
            topic = find_topic(engine, request.name)
            status = pb.TopicStatus(topic=config_frames.topic_config(topic))
            for queue in engine.inspection.queue_status(topic):
                told = config_frames.queue_status(queue)
                sealed = engine.retention.gate.sealed_offset(topic.id, queue.queue_id)
                if sealed is not None:
                    told.sealed_offset = sealed
                status.queues.append(told)
            return status

        return await self._call(get)

    async def GetGroupProgress(self, request: pb.GetGroupProgressRequest) -> pb.GroupProgress:
        """Return a group and how far it is, by queue."""

        def begin(engine: Engine, _turn: Turn) -> tuple[pb.GroupProgress, list[ProgressKey]]:
            group = find_group(engine, request.name)
            pulled = engine.inspection.pulled_by(group)
            found = pb.GroupProgress(
                group=config_frames.group_config(group),
                pulled=[pb.PulledQueue(**each._asdict()) for each in pulled],
            )
            return found, engine.inspection.queues_read(group)

        found, keys = await self._call(begin)
        for first in range(0, len(keys), PROGRESS_A_ROUND):
            part = keys[first : first + PROGRESS_A_ROUND]

            def read(
                engine: Engine, _turn: Turn, part: list[ProgressKey] = part
            ) -> list[pb.QueueProgress]:
                look = engine.inspection
                return [
                    config_frames.queue_progress(progress, look.find_lock(key))
                    for key in part
                    if (progress := look.find_progress(key)) is not None
                ]

            found.queues.extend(await self._call(read))
        return found

    async def ReleaseLock(self, request: pb.ReleaseLockRequest) -> pb.QueueLock:
        """Let the next consumer have what locks a queue of an ordered group."""

        def release(engine: Engine, turn: Turn) -> pb.QueueLock:
            group, topic = find_group(engine, request.group), find_topic(engine, request.topic)
            if not group.is_ordered:
                raise Conflict(f"group {group.name!r} is not FIFO: nothing in it is locked")
            if request.queue_id >= topic.queues:
                raise BadRequest(
                    f"topic {topic.name!r} has the queues 0 to {topic.queues - 1}, "
                    f"not {request.queue_id}"
                )
            key = group.id, topic.id, QueueId(request.queue_id)
            lock = engine.inspection.find_lock(key)
            engine.administration.release_lock(key, turn.now_ms)
            assert lock is not None, "what is not locked cannot be released"
            config_log.lock_released(
                group.name, topic.name, request.queue_id, lock, by=request.asked_by
            )
            return config_frames.queue_lock(lock)

        return await self._call(release)

    async def ResetOffset(self, request: pb.ResetOffsetRequest) -> pb.ResetOffsetReply:
        """Let a group go on from another place of a topic."""
        offsets = None
        if request.WhichOneof("target") == "timestamp_ms":
            offsets = await self._look_up_time(request)

        def reset(engine: Engine, turn: Turn) -> pb.ResetOffsetReply:
            if offsets is None:
                target = config_frames.reset_target(request)
            else:
                target = ResetTarget(offsets=offsets)
            find_topic(engine, request.topic)
            group, topic, statuses = engine.administration.plan_reset(
                request.group, request.topic, target
            )
            before = engine.inspection.consumer_offsets(group, topic)
            if not request.dry_run:
                engine.administration.reset_offset(
                    request.group, request.topic, target, turn.now_ms
                )
                after = [status.max_offset for status in statuses]
                config_log.offsets_reset(
                    request.group,
                    request.topic,
                    from_offsets=before,
                    to_offsets=after,
                    by=request.requested_by,
                )
            return pb.ResetOffsetReply(
                queues=[config_frames.queue_status(q) for q in statuses], from_offsets=before
            )

        return await self._call(reset)

    async def ForgetPullOffsets(
        self, request: pb.ForgetPullOffsetsRequest
    ) -> pb.ForgetPullOffsetsReply:
        """Forget how far a group has pulled a topic."""

        def forget(engine: Engine, turn: Turn) -> pb.ForgetPullOffsetsReply:
            group, topic = find_group(engine, request.group), find_topic(engine, request.topic)
            found = [
                each for each in engine.inspection.pulled_by(group) if each.topic == topic.name
            ]
            if found and not request.dry_run:
                engine.administration.forget_pull_offsets(group.id, topic.id, turn.now_ms)
                config_log.pull_offsets_forgotten(
                    group.name, topic.name, [each.offset for each in found], by=request.requested_by
                )
            return pb.ForgetPullOffsetsReply(
                queues=[pb.PulledQueue(**each._asdict()) for each in found]
            )

        return await self._call(forget)

    async def _look_up_time(self, request: pb.ResetOffsetRequest) -> list[int]:
        """Return by queue where a time begins; that takes a round a slice."""

        def begin(engine: Engine, _turn: Turn) -> TimeSearch:
            find_group(engine, request.group)
            topic = find_topic(engine, request.topic)
            return engine.inspection.look_up_time(topic, request.timestamp_ms)

        search = await self._call(begin)
        while await self._call(lambda _engine, _turn: search.step()):
            pass
        return search.offsets

    async def FindMessages(self, request: pb.FindMessagesRequest) -> pb.FindMessagesReply:
        """Find messages by id or by key.

        The search takes a round a slice, so that nobody waits for it.
        """

        def begin(engine: Engine, _turn: Turn) -> MessageSearch:
            return engine.inspection.search(
                find_topic(engine, request.topic),
                message_id=request.message_id,
                key=request.key,
                max_messages=min(request.max_messages or FOUND_MAX, FOUND_MAX),
            )

        search, reply, has_more = await self._call(begin), pb.FindMessagesReply(), True
        while has_more:
            has_more = await self._call(lambda _engine, _turn: search.step())
            # What is in the reply need not be kept a second time.
            reply.messages.extend(map(config_frames.found_message, search.take()))
        return reply

    async def _call(self, function: Callable[[Engine, Turn], T]) -> T:
        return await in_round(self._rounds, function)


def find_topic(engine: Engine, name: str) -> Topic:
    """Return the topic of that name; raise TopicNotFound."""
    topic = engine.catalog.find_topic(name)
    if topic is None or name.startswith(HIDDEN_TOPIC_PREFIX):
        raise TopicNotFound(f"there is no topic {name!r}")
    return topic


def find_group(engine: Engine, name: str) -> ConsumerGroup:
    """Return the group of that name; raise GroupNotFound."""
    group = engine.catalog.find_group(name)
    if group is None:
        raise GroupNotFound(f"there is no consumer group {name!r}")
    return group
