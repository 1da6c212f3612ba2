"""BrokerAdmin's calls about topics, and the whole configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.broker.server.admin.lookup import find_topic, use_topic
from tidemill.broker.server.round.rpc import in_round, read_in_round
from tidemill.broker.server.wire import config_frames, config_log
from tidemill.message.resource_names import check_own_topic
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn


class TopicAdmin:
    """Changes and describes topics."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def PutTopic(self, request: pb.PutTopicRequest) -> pb.PutTopicReply:
        """Create or change a topic."""

        def put(engine: Engine, turn: Turn) -> pb.PutTopicReply:
            check_own_topic(request.name)
            if request.is_first_use:
                return pb.PutTopicReply(
                    topic=config_frames.topic_config(use_topic(engine, request.name, turn.now_ms))
                )
            before = engine.catalog.find_topic(request.name)
            topic = engine.administration.put_topic(
                request.name,
                type_=config_frames.topic_type(request.type),
                queues=request.queues,
                delivery_spread_ms=config_frames.delivery_spread_ms(request),
                is_forced=request.force,
                now_ms=turn.now_ms,
            )
            config_log.topic_put(before, topic, by=request.requested_by)
            return pb.PutTopicReply(
                topic=config_frames.topic_config(topic),
                before=config_frames.topic_config(before) if before else None,
            )

        return await in_round(self._rounds, put)

    async def DeleteTopic(self, request: pb.DeleteTopicRequest) -> pb.DeleteTopicReply:
        """Delete a topic with its messages; a dry run only counts them."""

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
                delayed_messages=use.timer_count,
            )

        return await in_round(self._rounds, delete)

    async def GetTopicStatus(self, request: pb.GetTopicStatusRequest) -> pb.TopicStatus:
        """Return a topic and the offsets of its queues."""

        def get(engine: Engine, _turn: Turn) -> pb.TopicStatus:
            topic = find_topic(engine, request.name)
            status = pb.TopicStatus(topic=config_frames.topic_config(topic))
            for queue in engine.inspection.queue_status(topic):
                rendered = config_frames.queue_status(queue)
                sealed = engine.retention.gate.sealed_offset(topic.id, queue.queue_id)
                if sealed is not None:
                    rendered.sealed_offset = sealed
                status.queues.append(rendered)
            return status

        return await read_in_round(self._rounds, get)

    async def GetConfig(
        self,
        request: pb.GetConfigRequest,  # noqa: ARG002  # part of the contract, without fields
    ) -> pb.ConfigUpdate:
        """Return all topics and consumer groups."""

        def get(engine: Engine, _turn: Turn) -> pb.ConfigUpdate:
            return config_frames.complete_config(engine)

        return await read_in_round(self._rounds, get)
