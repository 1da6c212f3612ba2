"""A cluster for the pipeline's tests: queues and events in memory, over real gRPC, with faults.

It serves `PipelineSource` and the public service's pull methods in its own threads. A test chooses
the contents and the faults. Tests that run against both a fake and a real cluster keep them alike.
"""

from __future__ import annotations

import contextlib
import fnmatch
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc

from tidemill.message.namespaces import full_name
from tidemill.message.resources import resource_name
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2_grpc

FIRST_STORED_AT_MS = 1_700_000_000_000
EVENT_BYTES = 100  # of log per event
PAGE_ROWS = 16  # messages per answer
LISTED_ROWS = 2  # rows per page of a listing
# For calls in flight at the end. A server that cancels them makes the clients print a warning.
STOP_S = 10.0
OVERTAKE_S = 0.02  # a send waits for a later one that is stored before it


@dataclass
class FakeQueue:
    """One queue with its messages; None is a hole."""

    messages: list[v2.Message | None] = field(default_factory=list)
    first: int = 0  # first offset that retention has not removed

    @property
    def end(self) -> int:
        return len(self.messages)


@dataclass
class FakeBroker:
    """One broker group."""

    log_id: str
    queues: dict[tuple[str, int], FakeQueue] = field(default_factory=dict)
    topic_ids: dict[str, int] = field(default_factory=dict)
    last_id: int = 0
    events: list[pb.Event] = field(default_factory=list)
    pending: list[pb.Pending] = field(default_factory=list)
    in_flight: list[pb.InFlight] = field(default_factory=list)
    progress: list[pb.Progress] = field(default_factory=list)
    deleted_groups: set[str] = field(default_factory=set)
    damaged_timers: int = 0  # reported in the first page of ListPending
    log_min: int = 0
    damaged: set[int] = field(default_factory=set)  # positions of unreadable events
    error: str = ""

    @property
    def groups(self) -> set[str]:
        """The consumer groups in the listings, without deleted ones."""
        named = {each.consumer_group for each in self.in_flight}
        named.update(each.consumer_group for each in self.progress)
        return named - self.deleted_groups

    @property
    def log_end(self) -> int:
        return (self.events[-1].position + EVENT_BYTES) if self.events else self.log_min


class FakeCluster:
    """The contents of the cluster, its faults, and a record of the calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.brokers: dict[str, FakeBroker] = {}
        self.sent: list[v2.Message] = []
        self.sends = threading.Condition(self.lock)
        self.arrived_sends = 0
        self.stored_sends: set[int] = set()  # by order of arrival
        self.pulls: list[tuple[str, int, int]] = []  # broker, queue, offset
        self.due_ranges: set[tuple[int, int]] = set()  # requested from ListPending
        self.asked_topics: set[str] = set()  # requested from ListPending
        self.calls: list[str] = []
        self.pull_offsets: dict[tuple[str, str, int], int] = {}  # by group, broker and queue
        self.headers: list[dict[str, str]] = []
        # Faults: `passing` calls of a method succeed, then `failing` calls fail. The next stream
        # breaks after `breaks_after` answers.
        self.failing: dict[str, int] = {}
        self.passing: dict[str, int] = {}
        self.breaks_after: int | None = None
        # Broker groups with the number of looks that they do not answer.
        self.away: dict[str, int] = {}
        # Topics that list their queues but reject pulls and pull offsets.
        self.refused: set[str] = set()
        self.missing_groups: set[str] = set()
        # Calls of ReadMessages that a quota holds until their deadline.
        self.held_calls = 0
        self.quota_groups: set[str] = set()  # of calls of ReadMessages
        # Called before each read of messages.
        self.on_pull: Callable[[pb.ReadMessagesRequest], None] = lambda _request: None
        # Called before each read of events.
        self.on_events: Callable[[], None] = lambda: None
        # Called before each look at queues.
        self.on_look: Callable[[], None] = lambda: None
        self.endpoint = ""

    # ------------------------------------------------------------ changes by a test

    def add(
        self,
        topic: str,
        broker: str = "broker-a",
        queue_id: int = 0,
        count: int = 1,
        *,
        body_size: int = 10,
        tag: str = "",
        stored_at_ms: int = FIRST_STORED_AT_MS,
        step_ms: int = 1,
    ) -> None:
        """Store messages. Their bodies and ids name their positions."""
        with self.lock:
            queue = self._queue(topic, broker, queue_id)
            for _ in range(count):
                at = queue.end
                message = v2.Message(
                    topic=v2.Resource(name=topic),
                    body=f"{topic}/{broker}/{queue_id}/{at}".encode().ljust(body_size, b"."),
                )
                system = message.system_properties
                system.message_id = f"{topic}-{broker}-{queue_id}-{at}"
                system.message_type = v2.NORMAL
                if tag:
                    system.tag = tag
                system.born_timestamp.FromMilliseconds(stored_at_ms + at * step_ms - 5)
                system.store_timestamp.FromMilliseconds(stored_at_ms + at * step_ms)
                self._put(queue, queue_id, message)

    def create(self, *topics: str) -> None:
        """Create topics without messages, unless they exist."""
        for topic in topics:
            self.add(topic, count=0)

    def put(self, message: v2.Message, broker: str = "broker-a", queue_id: int = 0) -> None:
        """Store a message unchanged."""
        with self.lock:
            self._put(self._queue(message.topic.name, broker, queue_id), queue_id, message)

    def add_events(self, broker: str, *events: pb.Event) -> None:
        """Write events, each as its own record."""
        with self.lock:
            of = self._broker(broker)
            for event in events:
                written = pb.Event()
                written.CopyFrom(event)
                written.position = max(of.log_end, of.log_min)
                of.events.append(written)

    def damage_events(self, broker: str, *indexes: int) -> None:
        """Make events unreadable."""
        with self.lock:
            of = self.brokers[broker]
            of.damaged |= {of.events[index].position for index in indexes}

    def expire(self, topic: str, broker: str, queue_id: int, first: int) -> None:
        """Remove the messages before offset `first`, as retention does."""
        with self.lock:
            self.brokers[broker].queues[topic, queue_id].first = first

    def restore(self, topic: str, broker: str, queue_id: int, end: int) -> None:
        """Restore an older copy of a broker group's store: the same queue with an earlier end."""
        with self.lock:
            del self.brokers[broker].queues[topic, queue_id].messages[end:]

    def restore_log(self, broker: str, count: int) -> None:
        """Cut a broker group's log to `count` events, as an older copy would have."""
        with self.lock:
            del self.brokers[broker].events[count:]

    def delete(self, topic: str) -> None:
        """Delete a topic. A new topic of the same name gets another id."""
        with self.lock:
            for broker in self.brokers.values():
                broker.topic_ids.pop(topic, None)
                for key in [key for key in broker.queues if key[0] == topic]:
                    del broker.queues[key]

    def remove(self, broker: str) -> None:
        """Remove a broker group with its contents."""
        with self.lock:
            del self.brokers[broker]

    def recreate_store(self, broker: str) -> None:
        """Replace a broker group's store with an empty one, which assigns the same ids again."""
        with self.lock:
            log_id = f"another-{self.brokers[broker].log_id}"
            self.brokers[broker] = FakeBroker(log_id=log_id)

    def is_away(self, broker: str) -> bool:
        """Return whether a broker group leaves this look unanswered."""
        left = self.away.get(broker, 0)
        self.away[broker] = max(0, left - 1)
        return left > 0

    def _broker(self, name: str) -> FakeBroker:
        return self.brokers.setdefault(name, FakeBroker(log_id=f"log-of-{name}"))

    def _queue(self, topic: str, broker: str, queue_id: int) -> FakeQueue:
        of = self._broker(broker)
        if topic not in of.topic_ids:
            of.last_id += 1
            of.topic_ids[topic] = of.last_id
        return of.queues.setdefault((topic, queue_id), FakeQueue())

    def _put(self, queue: FakeQueue, queue_id: int, message: v2.Message) -> None:
        message.system_properties.queue_id = queue_id
        message.system_properties.queue_offset = queue.end
        queue.messages.append(message)

    # ------------------------------------------------------------ services

    def note(self, method: str, context: Any) -> None:
        """Record a call, and fail it if a fault is set."""
        with self.lock:
            self.calls.append(method)
            self.headers.append(dict(context.invocation_metadata()))
            if self.passing.get(method, 0) > 0:
                self.passing[method] -= 1
            elif self.failing.get(method, 0) > 0:
                self.failing[method] -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "rejected by the test")

    def store(self, messages: Sequence[v2.Message]) -> None:
        """Store the messages of a send. Sends that are in flight together are stored newest first.

        Their order is open, so a test that relies on it fails at once.
        """
        with self.sends:
            number = self.arrived_sends
            self.arrived_sends += 1
            self.sends.notify_all()
            if self.sends.wait_for(lambda: self.arrived_sends > number + 1, OVERTAKE_S):
                self.sends.wait_for(lambda: number + 1 in self.stored_sends, STOP_S)
            self.sent.extend(messages)
            self.stored_sends.add(number)
            self.sends.notify_all()

    @contextlib.contextmanager
    def serving(self) -> Iterator[FakeCluster]:
        """Serve during the block."""
        server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=16), options=[("grpc.so_reuseport", 0)]
        )
        service_pb2_grpc.add_MessagingServiceServicer_to_server(_public(self), server)
        pipeline_pb2_grpc.add_PipelineSourceServicer_to_server(_Source(self), server)
        self.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield self
        finally:
            server.stop(STOP_S).wait()


def _public(cluster: FakeCluster) -> Any:
    # The base class answers the other methods with UNIMPLEMENTED.
    served: Any = _Public
    return served(cluster)


class _Public(service_pb2_grpc.MessagingServiceServicer):
    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def QueryOffset(
        self, request: service.QueryOffsetRequest, context: Any
    ) -> service.QueryOffsetResponse:
        self.cluster.note("QueryOffset", context)
        asked = request.message_queue
        topic = resource_name(asked.topic).full
        queue = self.cluster.brokers[asked.broker.name].queues[topic, asked.id]
        at_ms = request.timestamp.ToMilliseconds()
        offset = next(
            (
                i
                for i in range(queue.first, queue.end)
                if (message := queue.messages[i]) is not None
                and message.system_properties.store_timestamp.ToMilliseconds() >= at_ms
            ),
            queue.end,
        )
        return service.QueryOffsetResponse(status=v2.Status(code=v2.OK), offset=offset)

    def UpdateOffset(
        self, request: service.UpdateOffsetRequest, context: Any
    ) -> service.UpdateOffsetResponse:
        self.cluster.note("UpdateOffset", context)
        asked = request.message_queue
        topic, group = resource_name(asked.topic).full, resource_name(request.group).full
        broker = self.cluster.brokers[asked.broker.name]
        end = broker.queues[topic, asked.id].end
        if topic in self.cluster.refused:
            status = v2.Status(code=v2.FORBIDDEN, message="rejected by the test")
            return service.UpdateOffsetResponse(status=status)
        if group in self.cluster.missing_groups:
            status = v2.Status(
                code=v2.CONSUMER_GROUP_NOT_FOUND, message=f"there is no group {group}"
            )
            return service.UpdateOffsetResponse(status=status)
        if request.offset > end:
            status = v2.Status(code=v2.ILLEGAL_OFFSET, message=f"the queue ends at {end}")
            return service.UpdateOffsetResponse(status=status)
        key = (group, asked.broker.name, asked.id)
        self.cluster.pull_offsets[key] = request.offset
        item = pb.Progress(
            consumer_group=group,
            topic=topic,
            queue_id=asked.id,
            max_offset=end,
            commit_offset=-1,
            pop_offset=-1,
            pull_offset=request.offset,
        )
        same = (item.consumer_group, item.topic, item.queue_id)
        broker.progress = [
            each
            for each in broker.progress
            if (each.consumer_group, each.topic, each.queue_id) != same
        ] + [item]
        return service.UpdateOffsetResponse(status=v2.Status(code=v2.OK))

    def SendMessage(
        self, request: service.SendMessageRequest, context: Any
    ) -> service.SendMessageResponse:
        self.cluster.note("SendMessage", context)
        answer = service.SendMessageResponse(status=v2.Status(code=v2.OK))
        if any(each.body == b"spoil the call" for each in request.messages):
            # A proxy rejects the whole call if one message breaks a rule. It stores none of them.
            status = v2.Status(code=v2.ILLEGAL_MESSAGE_TAG, message="a tag has no |")
            entries = [service.SendResultEntry(status=status) for _ in request.messages]
            return service.SendMessageResponse(status=status, entries=entries)
        self.cluster.store(request.messages)
        for message in request.messages:
            refused = message.body == b"refuse me"
            answer.entries.append(
                service.SendResultEntry(
                    status=v2.Status(
                        code=v2.MESSAGE_BODY_TOO_LARGE if refused else v2.OK,
                        message="too large" if refused else "",
                    ),
                    message_id=message.system_properties.message_id,
                )
            )
        return answer


class _Source(pipeline_pb2_grpc.PipelineSourceServicer):
    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def GetQueues(self, request: pb.GetQueuesRequest, context: Any) -> Iterator[pb.GetQueuesReply]:
        self.cluster.note("GetQueues", context)
        self.cluster.on_look()
        with self.cluster.lock:
            yield pb.GetQueuesReply(
                groups=[
                    pb.BrokerGroupQueues(broker=name, error=broker.error or "it is away")
                    if broker.error or self.cluster.is_away(name)
                    else pb.BrokerGroupQueues(
                        broker=name,
                        log_min=broker.log_min,
                        log_end=broker.log_end,
                        log_id=broker.log_id,
                        queues=list(_queues(request, broker)),
                        groups=sorted(broker.groups) if request.with_groups else [],
                    )
                    for name, broker in sorted(self.cluster.brokers.items())
                ]
            )

    def ReadMessages(
        self, request: pb.ReadMessagesRequest, context: Any
    ) -> Iterator[pb.ReadMessagesReply]:
        self.cluster.note("ReadMessages", context)
        request.topic = full_name(request.namespace, request.topic)
        if request.topic in self.cluster.refused:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "it is not allowed")
        self.cluster.on_pull(request)
        with self.cluster.lock:
            self.cluster.pulls.append((request.broker, request.queue_id, request.from_offset))
            _check_incarnation(self.cluster.brokers[request.broker], request, context)
            queue = self.cluster.brokers[request.broker].queues[request.topic, request.queue_id]
            messages, first, end = list(queue.messages), queue.first, queue.end
            breaks_after, self.cluster.breaks_after = self.cluster.breaks_after, None
        self.cluster.quota_groups.add(request.quota_group)
        if self.cluster.held_calls:
            self.cluster.held_calls -= 1
            yield pb.ReadMessagesReply(next_offset=request.from_offset, is_held=True)
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the time is over")
        at = max(request.from_offset, first)
        is_gone = at > request.from_offset
        until = min(end, request.until_offset or end)
        tags = {tag.strip() for tag in request.filter.split("||")}
        pages = 0
        while at < until or is_gone:
            last = min(until, at + PAGE_ROWS)
            if breaks_after is not None and pages >= breaks_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "broken off")
            yield pb.ReadMessagesReply(
                messages=[
                    message
                    for message in messages[at:last]
                    if message is not None
                    and (tags & {"*", ""} or message.system_properties.tag in tags)
                ],
                next_offset=max(at, last),
                min_offset=first,
                end_offset=end,
                gone_from=request.from_offset if is_gone else 0,
                is_gone=is_gone,
            )
            at, is_gone, pages = max(at, last), False, pages + 1

    def ReadEvents(
        self, request: pb.ReadEventsRequest, context: Any
    ) -> Iterator[pb.ReadEventsReply]:
        self.cluster.note("ReadEvents", context)
        self.cluster.on_events()
        with self.cluster.lock:
            broker = self.cluster.brokers[request.broker]
            _check_position(broker, request, context)
            events, end = list(broker.events), broker.log_end
        begin = max(request.from_position, broker.log_min)
        until = min(end, request.until_position or end)
        last = min(until, begin + (request.log_bytes_max or 64 << 20))
        at = begin
        chunk: list[pb.Event] = []
        damaged = 0
        for event in events:
            if event.position < begin or event.position >= last:
                continue
            at = event.position + EVENT_BYTES
            if event.position in broker.damaged:
                damaged += EVENT_BYTES
                continue
            if request.kinds and event.kind not in request.kinds:
                continue
            if request.topics and (event.origin_topic or event.topic) not in request.topics:
                continue
            chunk.append(event)
            if len(chunk) == 100:
                yield self._events(broker, chunk, at, begin, request, damaged)
                chunk, damaged = [], 0
        yield self._events(broker, chunk, max(at, min(until, at)), begin, request, damaged)

    def _events(
        self,
        broker: FakeBroker,
        events: list[pb.Event],
        at: int,
        begin: int,
        request: pb.ReadEventsRequest,
        damaged: int,
    ) -> pb.ReadEventsReply:
        gone = request.from_position if 0 < request.from_position < begin else 0
        return pb.ReadEventsReply(
            events=events,
            next_position=at,
            log_id=broker.log_id,
            log_min=broker.log_min,
            log_end=broker.log_end,
            gone_from=gone,
            damaged_bytes=damaged,
        )

    def ListPending(
        self, request: pb.ListPendingRequest, context: Any
    ) -> Iterator[pb.ListPendingReply]:
        self.cluster.note("ListPending", context)
        broker = self.cluster.brokers[request.broker]
        topics = set(request.topics)
        missing = [name for name in request.topics if name not in broker.topic_ids]
        if missing and not request.skips_missing:
            _refuse(context, "TopicNotFound")
        self.cluster.asked_topics |= topics
        items = [
            each
            for each in broker.pending
            if (not topics or each.topic in topics)
            and request.due_from_ms <= each.due_at_ms
            and (not request.due_until_ms or each.due_at_ms < request.due_until_ms)
        ]
        self.cluster.due_ranges.add((request.due_from_ms, request.due_until_ms))
        with self.cluster.lock:
            breaks_after, self.cluster.breaks_after = self.cluster.breaks_after, None
        # All pages in one stream, as a proxy sends them.
        for page, at in enumerate(range(int(request.cursor or 0), len(items) or 1, LISTED_ROWS)):
            if breaks_after is not None and page >= breaks_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "broken off")
            end = at + LISTED_ROWS
            yield pb.ListPendingReply(
                items=items[at:end],
                cursor=str(end) if end < len(items) else "",
                missing=[] if at else missing,
                damaged_count=0 if at else broker.damaged_timers,
            )

    def ListInFlight(
        self, request: pb.ListInFlightRequest, context: Any
    ) -> Iterator[pb.ListInFlightReply]:
        self.cluster.note("ListInFlight", context)
        broker = self.cluster.brokers[request.broker]
        yield pb.ListInFlightReply(
            items=_of_groups(broker, request.groups, broker.in_flight),
            missing=_missing(broker, request),
        )

    def ListProgress(
        self, request: pb.ListProgressRequest, context: Any
    ) -> Iterator[pb.ListProgressReply]:
        self.cluster.note("ListProgress", context)
        broker = self.cluster.brokers[request.broker]
        yield pb.ListProgressReply(
            items=_of_groups(broker, request.groups, broker.progress),
            missing=_missing(broker, request),
        )


def _of_groups(broker: FakeBroker, groups: Sequence[str], items: list[Any]) -> list[Any]:
    wanted = broker.groups & set(groups) if groups else broker.groups
    return [each for each in items if each.consumer_group in wanted]


def _missing(broker: FakeBroker, request: Any) -> list[str]:
    missing = [name for name in request.groups if name not in broker.groups]
    # Only requests with `skips_missing` get the list: other tests name unknown groups.
    return missing if request.skips_missing else []


def _queues(request: pb.GetQueuesRequest, broker: FakeBroker) -> Iterator[pb.Queue]:
    for (topic, queue_id), queue in sorted(broker.queues.items()):
        is_wanted = topic in request.topics or (
            request.topic_pattern and fnmatch.fnmatchcase(topic, request.topic_pattern)
        )
        if is_wanted:
            yield pb.Queue(
                topic=topic,
                topic_id=broker.topic_ids[topic],
                queue_id=queue_id,
                min_offset=queue.first,
                max_offset=queue.end,
                bytes=sum(
                    len(each.body) + 200
                    for each in queue.messages[queue.first :]
                    if each is not None
                ),
            )


def _check_incarnation(broker: FakeBroker, request: pb.ReadMessagesRequest, context: Any) -> None:
    name = ""
    if request.log_id not in {"", broker.log_id}:
        name = "LogChanged"
    elif request.topic_id not in {0, broker.topic_ids.get(request.topic)}:
        name = "TopicNotFound"
    if name:
        _refuse(context, name)


def _check_position(broker: FakeBroker, request: pb.ReadEventsRequest, context: Any) -> None:
    if request.log_id not in {"", broker.log_id} or request.from_position > broker.log_end:
        _refuse(context, "LogChanged")


def _refuse(context: Any, name: str) -> None:
    context.set_trailing_metadata((("tidemill-error", name),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the log of the broker was replaced")
