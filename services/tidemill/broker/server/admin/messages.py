"""BrokerAdmin's calls about messages: send, read and find."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from zlib import crc32

from google.protobuf.message import DecodeError

from tidemill.broker.engine.dedup.deduplication import RepeatedSend
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.queries.queue_reader import committed_end, describe
from tidemill.broker.server.admin.lookup import (
    check_existence,
    check_queue_id,
    find_topic,
    use_topic,
)
from tidemill.broker.server.link.commands import repeated_key
from tidemill.broker.server.round.rpc import in_round, rpc_error
from tidemill.broker.server.wire import config_frames
from tidemill.broker.server.wire.audit_facts import CREATE, audited
from tidemill.common.errors import (
    BadRequest,
    DedupKeyNotFound,
    IllegalOffset,
    MessageCorrupted,
    NotMaster,
    ServiceError,
)
from tidemill.common.slices import run_slices
from tidemill.message import stored_message
from tidemill.message.queue_choice import RoundRobin, level_of, queue_of_message_group
from tidemill.message.rules import check_type
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Generator

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import Topic
    from tidemill.broker.metrics.traffic import Traffic
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

READ_MAX: Final = 256  # messages of one read, even if a request wants more
READ_BYTES_MAX: Final = 4 << 20  # of one read; one larger message is still returned
_TYPES_WITH_PRIORITY: Final = frozenset({v2.PRIORITY, v2.DELAY})
FOUND_MESSAGES_MAX: Final = 256  # messages of one search, even if a request wants more


class MessageAdmin:
    """Stores messages by the rules of the proxies, and reads queues."""

    def __init__(self, rounds: Rounds, traffic: Traffic) -> None:
        self._rounds = rounds
        self._traffic = traffic
        self._queues = RoundRobin()
        self._one_by_one = asyncio.Lock()

    async def StoreMessage(self, request: pb.StoreMessageRequest) -> pb.StoreMessageReply:
        """Store a message; schedule it if its type is DELAY."""

        def store(engine: Engine, turn: Turn) -> pb.StoreMessageReply:
            fields = _decode(request.blob)
            message_group = _message_group_of(request.blob, fields)
            kind = v2.MessageType.ValueType(fields.message_type)
            priority = _priority_of(request.blob, fields)
            required = kind if priority is None else v2.PRIORITY
            exists = engine.catalog.find_topic(request.topic) is not None
            check_existence(request.existence, request.topic, is_topic=True, exists=exists)
            has_delay = request.HasField("delay_ms")
            if has_delay and kind != v2.DELAY:
                raise BadRequest("a delay needs a message of type DELAY")
            if not exists:
                # A rejected message must not create its topic.
                check_type(required, request.topic, pb.TOPIC_TYPE_MIXED, exists=False)
                engine.commands.check_first(
                    request.blob,
                    crc32(request.blob),
                    firing_ms=turn.firing_ms,
                    delay_ms=request.delay_ms if has_delay else None,
                )
            with audited(engine, request, after={"createdByUse": True}, action=CREATE):
                topic = use_topic(engine, request.topic, turn.now_ms)
            if request.HasField("lookup"):
                _look_up(engine, topic, request, turn.now_ms)
            type_number = pb.TopicType.ValueType(topic.type)
            check_type(required, topic.name, type_number, exists=True)
            if topic.type is TopicType.PRIORITY:
                queue_id = level_of(priority or 0, queues=topic.queues)
            else:
                queue_id = self._choose_queue(request, message_group, topic)
            facts = {"messageId": stored_message.message_id_of(request.blob), "queue": queue_id}
            with audited(engine, request, after={**facts, "bytes": len(request.blob)}):
                try:
                    queue_offset, due_at_ms = engine.commands.send(
                        topic.id,
                        QueueId(queue_id),
                        request.blob,
                        crc32(request.blob),
                        now_ms=turn.now_ms,
                        firing_ms=turn.firing_ms,
                        delay_ms=request.delay_ms if has_delay else None,
                        key_version=request.key_version,
                    )
                except RepeatedSend as repeat:
                    return pb.StoreMessageReply(
                        queue_id=repeat.first.queue_id,
                        queue_offset=repeat.first.queue_offset,
                        due_at_ms=repeat.first.due_at_ms,
                        repeat=repeated_key(repeat),
                    )
            self._traffic.appended(topic.id, request.blob)
            return pb.StoreMessageReply(
                queue_id=queue_id, queue_offset=queue_offset, due_at_ms=due_at_ms
            )

        return await in_round(self._rounds, store)

    async def ReadMessages(self, request: pb.ReadMessagesRequest) -> pb.ReadMessagesReply:
        """Return committed messages of one queue in order."""
        reply = pb.ReadMessagesReply()
        await self._between_rounds(self._read(request, reply))
        return reply

    def _read(
        self, request: pb.ReadMessagesRequest, reply: pb.ReadMessagesReply
    ) -> Generator[None, None, None]:
        engine = self._rounds.engine
        topic = find_topic(engine, request.topic)
        check_queue_id(topic, request.queue_id)
        if request.from_offset < 0:
            raise IllegalOffset(f"from_offset {request.from_offset} is negative; use 0 or more")
        queue = engine.catalog.queues_of(topic)[request.queue_id]
        end_offset = committed_end(engine.store, queue)
        reader = engine.inspection.read(
            queue,
            min(max(request.from_offset, queue.min_offset), end_offset),
            max_messages=min(request.max_messages or READ_MAX, READ_MAX),
            max_bytes=min(request.max_bytes or READ_BYTES_MAX, READ_BYTES_MAX),
        )
        has_more = True
        while has_more:
            has_more = reader.step()
            # Taken step by step, so that no message is kept twice.
            found = (describe(engine.catalog, one) for one in reader.take())
            reply.messages.extend(config_frames.found_message(one) for one in found if one)
            yield
        reply.next_offset = reader.next_offset
        reply.min_offset, reply.max_offset = reader.min_offset, reader.end_offset()

    async def FindMessages(self, request: pb.FindMessagesRequest) -> pb.FindMessagesReply:
        """Find committed messages by id or by key."""
        reply = pb.FindMessagesReply()
        await self._between_rounds(self._find(request, reply))
        return reply

    def _find(
        self, request: pb.FindMessagesRequest, reply: pb.FindMessagesReply
    ) -> Generator[None, None, None]:
        engine = self._rounds.engine
        search = engine.inspection.search(
            find_topic(engine, request.topic),
            message_id=request.message_id,
            key=request.key,
            max_messages=min(request.max_messages or FOUND_MESSAGES_MAX, FOUND_MESSAGES_MAX),
        )
        has_more = True
        while has_more:
            has_more = search.step()
            # Taken step by step, so that no message is kept twice.
            reply.messages.extend(map(config_frames.found_message, search.take()))
            yield

    async def _between_rounds(self, slices: Generator[None, None, None]) -> None:
        """Run a read of committed messages, one slice per turn of the event loop."""
        try:
            if not self._rounds.is_master:
                raise NotMaster("this replica of the broker group is not its master")
            await run_slices(slices, one_by_one=self._one_by_one)
        except ServiceError as error:
            raise rpc_error(error) from error

    def _choose_queue(
        self, request: pb.StoreMessageRequest, message_group: str, topic: Topic
    ) -> int:
        if request.HasField("queue_id"):
            return request.queue_id
        if message_group:
            return queue_of_message_group(message_group, queues=topic.queues)
        return self._queues.choose_queue(topic.queues)


def _look_up(engine: Engine, topic: Topic, request: pb.StoreMessageRequest, now_ms: int) -> None:
    """Raise DedupKeyNotFound if the key of a message is unknown at its old owner.

    Raises KeyOwnerChanged if the sender has an old list.
    """
    placement = config_frames.read_key_placement(request.lookup)
    topic = engine.key_spreads.fence(topic, placement, now_ms)
    if not engine.deduplication.look_up_message(topic, request.blob, version=placement.version):
        raise DedupKeyNotFound(
            f"the old owner {engine.catalog.broker_name} does not know the dedup key"
        )


def _message_group_of(blob: bytes, fields: stored_message.StoredMessage) -> str:
    group_at = fields.system_at + fields.group_at
    try:
        return blob[group_at : group_at + fields.group_size].decode()
    except UnicodeDecodeError:
        raise MessageCorrupted("the message group is not UTF-8") from None


def _priority_of(blob: bytes, fields: stored_message.StoredMessage) -> int | None:
    """Return the priority of a message; None if it has none."""
    if fields.message_type not in _TYPES_WITH_PRIORITY:
        return None
    try:
        properties = v2.SystemProperties.FromString(blob[fields.system_at : fields.user_at])
    except DecodeError:
        raise MessageCorrupted("the system properties are not valid") from None
    if properties.priority < 0:
        raise BadRequest(f"priority is {properties.priority}; it must be 0 or higher")
    return properties.priority if properties.HasField("priority") else None


def _decode(blob: bytes) -> stored_message.StoredMessage:
    try:
        return stored_message.decode(blob)
    except ValueError as error:
        raise MessageCorrupted(str(error)) from None
