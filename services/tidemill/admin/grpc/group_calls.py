"""The calls about consumer groups: accumulation, time spans, offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from google.protobuf.duration_pb2 import Duration

from tidemill.admin.cluster import calls
from tidemill.admin.grpc.calls import AdminCall, millis_of, missing_note, ok, refuse_lite_topic
from tidemill.admin.http.preconditions import Preconditions
from tidemill.admin.http.request_access import READS
from tidemill.admin.json import render
from tidemill.admin.json.consumer_groups import OffsetResetRequest
from tidemill.admin.routes import group_positions
from tidemill.common.clock import SystemClock
from tidemill.common.errors import BadRequest, NotBuilt, TopicNotFound
from tidemill.message.resources import resource_name
from tidemill.stubs.apache.rocketmq.v2 import admin_pb2 as admin
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidemill.admin.cluster.brokers import BrokerAnswers, BrokerGroupClient
    from tidemill.admin.json.consumer_groups import ProgressView

TOPICS_MAX: Final = 64  # of one request
QUEUES_MAX: Final = 256  # of one answer with time spans; each reads up to four messages
_Accumulation = admin.DescribeGroupAccumulationResponse.GroupAccumulation
_TimeSpan = admin.QueryTimeSpanResponse.QueueTimeSpan


async def describe_group_accumulation(
    call: AdminCall, request: admin.DescribeGroupAccumulationRequest
) -> admin.DescribeGroupAccumulationResponse:
    """Return the backlog of a group, in total and in the topics of the request."""
    refuse_lite_topic(request)
    topics = _topics_of(request.topics)
    found = await _progress(call, topics)
    progress = render.progress_of(found)
    await _check_topics(call, topics)
    by_topic = {each.topic: _accumulation(each) for each in progress.topics}
    return admin.DescribeGroupAccumulationResponse(
        status=ok(missing_note(progress.unreachable)),
        accumulation=_accumulation(progress.total),
        topic_accumulation={topic: by_topic.get(topic, _Accumulation()) for topic in topics},
    )


async def query_time_span(
    call: AdminCall, request: admin.QueryTimeSpanRequest
) -> admin.QueryTimeSpanResponse:
    """Return the store times at the begin, at the end and at the progress of each queue."""
    topics = _topics_of(request.topics)
    found = await _progress(call, topics)
    await _check_topics(call, topics)
    queues = [
        (broker, queue)
        for broker, progress in found.answers
        for queue in progress.queues
        if not queue.is_retry and (not topics or queue.topic in topics)
    ]
    if len(queues) > QUEUES_MAX:
        raise BadRequest(f"{len(queues)} queues; at most {QUEUES_MAX} are read, so name the topics")
    now_ms = SystemClock().wall_ms()
    spans = []
    async with call.brokers.large_read():
        for broker, queue in queues:
            reader = _QueueTimes(await call.brokers.member(broker), queue)
            spans.append(_span(call, broker, queue, await reader.read(), now_ms))
    return admin.QueryTimeSpanResponse(
        status=ok(missing_note(found.unreachable)), queue_time_span_list=spans
    )


async def reset_group_offset(
    call: AdminCall, request: admin.ResetGroupOffsetRequest
) -> admin.ResetGroupOffsetResponse:
    """Move a group to the first message of a topic that was stored at or after a time."""
    if not request.HasField("reset_timestamp"):
        raise BadRequest("the request has no reset_timestamp; set it to the time of the reset")
    reset = OffsetResetRequest.model_validate(
        {"topic": call.topic, "timestampMs": millis_of(request.reset_timestamp, "reset_timestamp")}
    )
    await group_positions.reset_offset(
        call.group, reset, call.brokers, call.author.actor.text, call.author, Preconditions()
    )
    return admin.ResetGroupOffsetResponse(status=ok())


async def delete_subscription(
    call: AdminCall, _request: admin.DeleteSubscriptionRequest
) -> admin.DeleteSubscriptionResponse:
    """Refuse: no change of the log deletes the progress of a group in one topic."""
    await _progress(call, ())
    await _check_topics(call, [call.topic])
    raise NotBuilt(
        "a subscription is not deleted alone: it ends when its consumers unsubscribe or stop, and"
        " its progress with the consumer group (`tidemill group delete`)"
    )


async def _progress(call: AdminCall, topics: Iterable[str]) -> BrokerAnswers[pb.GroupProgress]:
    request = pb.GetGroupProgressRequest(name=call.group, topics=topics)
    return await call.brokers.call_all(calls.GET_GROUP_PROGRESS, request)


async def _check_topics(call: AdminCall, topics: Iterable[str]) -> None:
    """Raise TopicNotFound for a topic that does not exist; progress ignores it.

    A caller without Get on the topic does not learn whether it exists.
    """
    for topic in topics:
        if not call.access.allows_topic(READS, topic):
            continue
        request = pb.GetTopicStatusRequest(name=topic)
        await call.brokers.call_home(calls.GET_TOPIC_STATUS, request)


def _topics_of(resources: Iterable[v2.Resource]) -> list[str]:
    """Return the full names of the topics of a request, each once. Raises BadRequest."""
    topics = list(dict.fromkeys(resource_name(each).full for each in resources))
    if len(topics) > TOPICS_MAX:
        raise BadRequest(f"{len(topics)} topics; at most {TOPICS_MAX} are allowed")
    if not all(topics):
        raise TopicNotFound("a topic of the request has no name")
    return topics


def _accumulation(progress: ProgressView) -> _Accumulation:
    answer = _Accumulation(
        inflight_messages=progress.in_flight,
        ready_messages=progress.ready,
        accumulation=progress.lag,
    )
    if not progress.in_flight and progress.oldest_unacked_at_ms:
        # Without messages in flight, the oldest unacknowledged message is ready.
        delay_ms = max(SystemClock().wall_ms() - progress.oldest_unacked_at_ms, 0)
        answer.deliver_delay_time.CopyFrom(_duration(delay_ms))
    return answer


def _duration(ms: int) -> Duration:
    seconds, fraction_ms = divmod(ms, 1_000)
    return Duration(seconds=seconds, nanos=fraction_ms * 1_000_000)


class _Times(NamedTuple):
    """Store times of messages of a queue in ms; 0: there is no such message."""

    first: int
    last: int
    settled: int  # of the last message before the progress of the group
    next: int  # of the first message after it


class _QueueTimes:
    """Reads the store times of messages of one queue."""

    def __init__(self, member: BrokerGroupClient, queue: pb.QueueProgress) -> None:
        self._client = member.client
        self._queue = queue

    async def read(self) -> _Times:
        """Read up to four messages."""
        queue = self._queue
        if queue.min_offset >= queue.max_offset:
            return _Times(0, 0, 0, 0)
        at = min(max(queue.consumer_offset, queue.min_offset), queue.max_offset)
        return _Times(
            first=await self._stored_at_ms(queue.min_offset),
            last=await self._stored_at_ms(queue.max_offset - 1),
            settled=await self._stored_at_ms(at - 1) if at > queue.min_offset else 0,
            next=await self._stored_at_ms(at) if at < queue.max_offset else 0,
        )

    async def _stored_at_ms(self, offset: int) -> int:
        request = pb.ReadMessagesRequest(
            topic=self._queue.topic,
            queue_id=self._queue.queue_id,
            from_offset=offset,
            max_messages=1,
            max_bytes=1,
        )
        reply = await self._client.call(calls.READ_MESSAGES, request)
        return reply.messages[0].stored_at_ms if reply.messages else 0


def _span(
    call: AdminCall, broker: str, queue: pb.QueueProgress, times: _Times, now_ms: int
) -> _TimeSpan:
    """Return the times of a queue. Before the first settled message, its first one counts."""
    return _TimeSpan(
        message_queue=v2.MessageQueue(
            topic=call.resource(queue.topic), id=queue.queue_id, broker=v2.Broker(name=broker)
        ),
        min_timestamp=times.first,
        max_timestamp=times.last,
        consume_timestamp=times.settled or times.first,
        delay_time_ms=max(now_ms - times.next, 0) if times.next else 0,
    )
