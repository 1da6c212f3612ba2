"""BrokerAdmin's calls about topics, and the whole configuration."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

from tidemill.broker.engine.configuration.purge import PurgedQueue
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.metadata.topic_creator import TopicCreator
from tidemill.broker.server.admin.level_readers import read_level_readers
from tidemill.broker.server.admin.lookup import (
    check_existence,
    check_expected,
    check_queue_id,
    find_topic,
    use_topic,
)
from tidemill.broker.server.round.rpc import in_round, read_in_round, slices_in_round
from tidemill.broker.server.wire import config_frames, config_log
from tidemill.broker.server.wire.audit_facts import (
    CREATE,
    UPDATE,
    audited,
    change_of,
    key_owner_facts,
    topic_facts,
)
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX, check_own_topic
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import Topic
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn


QUEUES_A_ROUND = 16  # queues of a purge: 0.1 s with a thousand consumer groups


class PutOfTopic(Protocol):
    """A function that puts a topic."""

    def __call__(self, *, is_dry: bool) -> Topic:
        """Put the topic, or only check it. Raises ServiceError."""


class TopicAdmin:
    """Changes and describes topics."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def PutTopic(self, request: pb.PutTopicRequest) -> pb.PutTopicReply:
        """Create or change a topic."""

        def put(engine: Engine, turn: Turn) -> pb.PutTopicReply:
            retention = config_frames.retention_change(request)
            before = engine.catalog.find_topic(request.name)
            check_existence(
                request.existence, request.name, is_topic=True, exists=before is not None
            )
            check_expected(request, before)
            is_dead_letters = request.name.startswith(DEAD_LETTER_TOPIC_PREFIX)
            if is_dead_letters and request.HasField("retention"):

                def put_retention(*, is_dry: bool) -> Topic:
                    return engine.administration.put_dead_letter_topic(
                        request.name, retention=retention, is_dry=is_dry, now_ms=turn.now_ms
                    )

                return reply(engine, before, audited_put(engine, before, put_retention))
            check_own_topic(request.name)
            if request.is_first_use:
                return pb.PutTopicReply(
                    topic=config_frames.topic_config(use_topic(engine, request.name, turn.now_ms))
                )

            def put_settings(*, is_dry: bool) -> Topic:
                return engine.administration.put_topic(
                    request.name,
                    type_=config_frames.topic_type(request.type),
                    queues=request.queues,
                    delivery_spread_ms=config_frames.delivery_spread_ms(request),
                    retention=retention,
                    transaction=config_frames.policy_change(request),
                    dedup=config_frames.dedup_change(request),
                    creator=TopicCreator(user=request.audit.user)
                    if request.HasField("audit")
                    else None,
                    is_forced=request.force,
                    is_dry=is_dry,
                    now_ms=turn.now_ms,
                )

            return reply(engine, before, audited_put(engine, before, put_settings))

        def audited_put(engine: Engine, before: Topic | None, put: PutOfTopic) -> Topic:
            planned = put(is_dry=True)
            if request.dry_run:
                return planned
            facts = topic_facts(before), topic_facts(planned)
            action = CREATE if before is None else UPDATE
            with audited(engine, request, before=facts[0], after=facts[1], action=action):
                return put(is_dry=False)

        def reply(engine: Engine, before: Topic | None, topic: Topic) -> pb.PutTopicReply:
            if not request.dry_run:
                config_log.topic_put(before, topic, by=request.requested_by)
            if before is not None and before.retention != topic.retention:
                engine.retention.request_look()
            return pb.PutTopicReply(
                topic=config_frames.topic_config(topic),
                before=config_frames.topic_config(before) if before else None,
                warning=engine.deduplication.share_warning(topic),
            )

        return await in_round(self._rounds, put)

    async def SpreadTopic(self, request: pb.SpreadTopicRequest) -> pb.SpreadTopicReply:
        """Make all active broker groups owners of the dedup keys of a topic."""

        def spread(engine: Engine, turn: Turn) -> pb.SpreadTopicReply:
            before = find_topic(engine, request.name)
            check_expected(request, before)
            spreads = engine.key_spreads
            topic = spreads.spread(request.name, is_dry=True, now_ms=turn.now_ms)
            if not request.dry_run and topic != before:
                facts = key_owner_facts(before), key_owner_facts(topic)
                with audited(engine, request, before=facts[0], after=facts[1], action=UPDATE):
                    topic = spreads.spread(request.name, is_dry=False, now_ms=turn.now_ms)
                config_log.keys_spread(topic, by=request.requested_by)
            return pb.SpreadTopicReply(
                topic=config_frames.topic_config(topic), before=config_frames.topic_config(before)
            )

        return await in_round(self._rounds, spread)

    async def DeleteTopic(self, request: pb.DeleteTopicRequest) -> pb.DeleteTopicReply:
        """Delete a topic with its messages; a dry run only counts them."""

        def delete(engine: Engine, turn: Turn) -> pb.DeleteTopicReply:
            find_topic(engine, request.name)
            topic = engine.administration.find_deletable(request.name)
            check_expected(request, topic)
            use = engine.inspection.use_of(topic)
            if not request.dry_run:
                facts = {**topic_facts(topic), "messages": use.message_count}
                with audited(engine, request, before=facts):
                    engine.administration.delete_topic(request.name, turn.now_ms)
                config_log.topic_deleted(topic, use, by=request.requested_by)
            return pb.DeleteTopicReply(
                topic=config_frames.topic_config(topic),
                messages=use.message_count,
                groups=use.groups,
                delayed_messages=use.timer_count,
            )

        return await in_round(self._rounds, delete)

    async def PurgeTopic(self, request: pb.PurgeTopicRequest) -> pb.PurgeTopicReply:
        """Remove messages of a topic; a dry run only counts them."""

        def begin(engine: Engine, _turn: Turn) -> list[Topic]:
            topic = find_topic(engine, request.name)
            check_expected(request, topic)
            if request.HasField("queue_id"):
                check_queue_id(topic, request.queue_id)
            engine.purge.check_level()
            return engine.purge.topics_of(topic, with_retries=request.with_retries)

        topics = await read_in_round(self._rounds, begin)
        topic = topics[0]
        queues: list[PurgedQueue] = []
        for one in topics:
            lows: list[int | None] = [None] * one.queues
            if request.HasField("before_timestamp_ms"):
                lows = [*await self._look_up_time(one, request.before_timestamp_ms)]
            # The queues of a PRIORITY topic are levels, and each level has its retry queue. A retry
            # topic of another type has one queue, with the retries from all queues.
            has_queue = one is topic or topic.type is TopicType.PRIORITY
            numbers: Iterable[int] = range(one.queues)
            if has_queue and request.HasField("queue_id"):
                numbers = [number for number in numbers if number == request.queue_id]
            queues += [PurgedQueue(one.id, QueueId(n), lows[n]) for n in numbers]
        counting = await read_in_round(
            self._rounds, lambda engine, _turn: engine.purge.count(queues)
        )
        while await read_in_round(self._rounds, lambda _engine, _turn: counting.step()):
            pass

        # The first round that removes something records the whole purge.
        removed = {"messages": counting.messages, "bytes": counting.size_bytes}
        if request.HasField("queue_id"):
            removed["queue"] = request.queue_id
        if request.HasField("before_timestamp_ms"):
            removed["beforeTimestampMs"] = request.before_timestamp_ms
        change = change_of(request, before=removed)

        def purge(
            engine: Engine, turn: Turn, part: list[PurgedQueue]
        ) -> Generator[None, None, None]:
            if part[0] is queues[0]:  # Nothing is removed yet.
                check_expected(request, find_topic(engine, request.name))
            with engine.fold.audited(change):
                yield from engine.purge.purge(part, turn.now_ms)

        # Other work of the broker goes on between the rounds.
        for first in range(0, 0 if request.dry_run else len(queues), QUEUES_A_ROUND):
            part = queues[first : first + QUEUES_A_ROUND]
            await slices_in_round(self._rounds, functools.partial(purge, part=part))

        def reply(engine: Engine, _turn: Turn) -> pb.PurgeTopicReply:
            use = engine.inspection.use_of(topic)
            if not request.dry_run:
                config_log.topic_purged(topic, counting, by=request.requested_by)
            return pb.PurgeTopicReply(
                topic=config_frames.topic_config(topic),
                messages=counting.messages,
                size_bytes=counting.size_bytes,
                delayed_messages=use.timer_count,
                groups=use.groups,
            )

        return await read_in_round(self._rounds, reply)

    async def _look_up_time(self, topic: Topic, timestamp_ms: int) -> list[int]:
        """Return the first offset of a time in each queue; each slice takes a round."""
        search = await read_in_round(
            self._rounds, lambda engine, _turn: engine.inspection.look_up_time(topic, timestamp_ms)
        )
        while await read_in_round(self._rounds, lambda _engine, _turn: search.step()):
            pass
        return search.offsets

    async def GetTopicStatus(self, request: pb.GetTopicStatusRequest) -> pb.TopicStatus:
        """Return a topic, the offsets of its queues, and the readers of a PRIORITY topic."""

        def get(engine: Engine, _turn: Turn) -> pb.TopicStatus:
            topic = find_topic(engine, request.name)
            own_ms = topic.retention.ms
            status = pb.TopicStatus(
                topic=config_frames.topic_config(topic),
                retention_ms=engine.config.retention_ms if own_ms is None else own_ms,
            )
            for queue in engine.inspection.queue_status(topic):
                rendered = config_frames.queue_status(queue)
                sealed = engine.retention.gate.sealed_offset(topic.id, queue.queue_id)
                if sealed is not None:
                    rendered.sealed_offset = sealed
                status.queues.append(rendered)
            return status

        status = await read_in_round(self._rounds, get)
        if request.with_readers and status.topic.type == pb.TOPIC_TYPE_PRIORITY:
            topic_id = TopicId(status.topic.id)
            status.readers.extend(await read_level_readers(self._rounds, topic_id))
        return status

    async def GetConfig(
        self,
        request: pb.GetConfigRequest,  # noqa: ARG002  # part of the contract, without fields
    ) -> pb.ConfigUpdate:
        """Return all topics and consumer groups."""

        def get(engine: Engine, _turn: Turn) -> pb.ConfigUpdate:
            return config_frames.complete_config(engine)

        return await read_in_round(self._rounds, get)
