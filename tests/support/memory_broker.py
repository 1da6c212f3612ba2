"""A broker in memory: a real BrokerLink server for tests of the proxy, without a store.

It answers like the broker: appends by queue, pops that park, acks with their three results,
deliveries replaced by change-invisible, dead letters, delayed messages and their cancel, creation
by use. No time passes here: a test that wants a message back, or a delayed one delivered, says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from tidemill.message import stored_message
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc

SECRET = bytes(range(32))
NOW_MS = 1_790_000_000_123  # the time of everything that happens here


@dataclass
class Message:
    """A message and where it is."""

    topic_id: int
    queue_id: int
    queue_offset: int
    blob: bytes
    attempts: int = 0
    origin_topic: str = ""


@dataclass
class Delivery:
    """What one pop took from one queue."""

    group_id: int
    topic_id: int
    messages: list[Message]
    state: list[int] = field(default_factory=list)  # AckResult of the next ack, by index


class MemoryBroker(broker_pb2_grpc.BrokerLinkServicer):
    """The state, and its service."""

    def __init__(self, *, auto_create: bool = True) -> None:
        self.auto_create = auto_create
        self.topics: dict[str, pb.TopicConfig] = {}
        self.groups: dict[str, pb.GroupConfig] = {}
        self.log: list[Message] = []
        self.taken: set[tuple[int, int]] = set()  # (group id, position in the log)
        self.deliveries: dict[int, Delivery] = {}
        self.timers: list[Message | None] = []  # by timer id; None: delivered
        self.cancelled: set[int] = set()  # timer ids
        self.frames: list[pb.RequestFrame] = []
        self.failures: dict[str, pb.Failure] = {}  # kind of request -> what it is answered with
        self.refused_queues: set[int] = set()  # appends to them are refused with Overloaded
        self.holds: set[str] = set()  # kinds of request that are never answered
        self.is_reading = asyncio.Event()  # clear: frames stay unanswered
        self.is_reading.set()
        self.address = ""
        self._ids = 0
        self._parked: dict[int, pb.PopRequest] = {}
        self._links: list[asyncio.Queue[pb.ReplyFrame | None]] = []
        self.arrived = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[MemoryBroker]:
        server = grpc.aio.server()
        broker_pb2_grpc.add_BrokerLinkServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            self.drop_links()
            await server.stop(0)

    def put_topic(self, name: str, *, kind: int = pb.MIXED, queues: int = 8) -> pb.TopicConfig:
        self._ids += 1
        topic = pb.TopicConfig(
            id=self._ids,
            version=1,
            name=name,
            type=kind,  # type: ignore[arg-type]  # a plain number is a value too
            queues=queues,
            is_system=name.startswith("%"),
        )
        self.topics[name] = topic
        self._broadcast(pb.ReplyFrame(config=pb.ConfigUpdate(topics=[topic])))
        return topic

    def put_group(self, name: str, *, is_ordered: bool = False) -> pb.GroupConfig:
        self._ids += 1
        group = pb.GroupConfig(
            id=self._ids,
            version=1,
            name=name,
            delivery_order=pb.ORDERED if is_ordered else pb.CONCURRENT,
            max_attempts=17,
            exponential=pb.ExponentialRetry(initial_ms=10_000, max_ms=7_200_000, multiplier=2.0),
        )
        self.groups[name] = group
        self._broadcast(pb.ReplyFrame(config=pb.ConfigUpdate(groups=[group])))
        return group

    def drop_links(self) -> None:
        """Break every stream."""
        for link in self._links:
            link.put_nowait(None)

    def answer_late(self, pop: pb.PopRequest) -> None:
        """Answer a pop that was held back."""
        self._broadcast(
            pb.ReplyFrame(pops=[pb.PopReply(request_id=pop.request_id, batches=self._pop(pop))])
        )

    async def wait_for_frame(self, field_name: str) -> pb.RequestFrame:
        """Return the first frame that carries something in `field_name`."""
        async with asyncio.timeout(5), self.arrived:
            while True:
                for frame in self.frames:
                    if field_name in {descriptor.name for descriptor, _ in frame.ListFields()}:
                        return frame
                await self.arrived.wait()

    async def Exchange(  # noqa: N802 - named by the contract
        self,
        request_iterator: AsyncIterator[pb.RequestFrame],
        context: grpc.aio.ServicerContext[pb.RequestFrame, pb.ReplyFrame],
    ) -> AsyncIterator[pb.ReplyFrame]:
        link: asyncio.Queue[pb.ReplyFrame | None] = asyncio.Queue()
        self._links.append(link)
        yield pb.ReplyFrame(
            config=pb.ConfigUpdate(
                is_complete=True,
                topics=list(self.topics.values()),
                groups=list(self.groups.values()),
                handle_secret=SECRET,
                broker_name="broker-0",
                auto_create=self.auto_create,
            )
        )
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(request_iterator, link))
            while frame := await link.get():
                yield frame
            reader.cancel()
        self._links.remove(link)

    async def _read(
        self,
        frames: AsyncIterator[pb.RequestFrame],
        link: asyncio.Queue[pb.ReplyFrame | None],
    ) -> None:
        async for frame in frames:
            await self.is_reading.wait()
            link.put_nowait(self._apply(frame))
            async with self.arrived:
                self.frames.append(frame)
                self.arrived.notify_all()

    def _broadcast(self, frame: pb.ReplyFrame) -> None:
        for link in self._links:
            link.put_nowait(frame)

    def _apply(self, frame: pb.RequestFrame) -> pb.ReplyFrame:
        reply = pb.ReplyFrame(answered_sequence=frame.sequence)
        columns = frame.appends
        for request_id, topic_id, queue_id, crc, blob in zip(
            columns.request_ids,
            columns.topic_ids,
            columns.queue_ids,
            columns.crcs,
            columns.blobs,
            strict=True,
        ):
            assert zlib.crc32(blob) == crc
            if queue_id in self.refused_queues:
                reply.failures.add(request_id=request_id, error="Overloaded", message="full")
            elif not self._refused("append", request_id, reply):
                self._append(reply.appends, request_id, Message(topic_id, queue_id, 0, blob))
        acks = frame.acks
        for request_id, delivery_id, index in zip(
            acks.request_ids, acks.delivery_ids, acks.indexes, strict=True
        ):
            if not self._refused("ack", request_id, reply):
                reply.acks.request_ids.append(request_id)
                reply.acks.results.append(self._ack(delivery_id, index))  # type: ignore[arg-type]  # as above
        for ensure in frame.ensures:
            if ensure.topic and ensure.topic not in self.topics:
                self.put_topic(ensure.topic)
            if ensure.group and ensure.group not in self.groups:
                self.put_group(ensure.group)
            reply.ensures.add(request_id=ensure.request_id)
        for change in frame.changes:
            if not self._refused("change", change.request_id, reply):
                self._change(change, reply)
        for request in frame.dead_letters:
            if self._take_back(request.delivery_id, request.index):
                reply.dead_letters.add(request_id=request.request_id)
            else:
                self._gone(request.request_id, reply)
        for cancel in frame.timer_cancels:
            if not self._refused("cancel_timer", cancel.request_id, reply):
                self._cancel(cancel, reply)
        for pop in frame.pops:
            if not self._refused("pop", pop.request_id, reply):
                self._parked[pop.request_id] = pop
        for request_id in frame.cancelled_pops:
            self._parked.pop(request_id, None)
        self._serve_pops(reply)
        return reply

    def _append(self, results: pb.AppendResults, request_id: int, message: Message) -> None:
        results.request_ids.append(request_id)
        # Tests of the link alone append bytes that are no message.
        is_message = stored_message.is_well_formed(message.blob)
        due_at_ms = stored_message.decode(message.blob).due_at_ms if is_message else 0
        if due_at_ms > NOW_MS:
            results.queue_offsets.append(len(self.timers))
            self.timers.append(message)
        else:
            due_at_ms = 0
            results.queue_offsets.append(
                self.store(message.topic_id, message.queue_id, message.blob)
            )
        if due_at_ms or results.due_at_ms:
            missing = len(results.request_ids) - 1 - len(results.due_at_ms)
            results.due_at_ms.extend([0] * missing + [due_at_ms])

    def _cancel(self, cancel: pb.CancelTimerRequest, reply: pb.ReplyFrame) -> None:
        timer = self.timers[cancel.timer_id] if cancel.timer_id < len(self.timers) else None
        if timer is None or timer.topic_id != cancel.topic_id:
            reply.failures.add(
                request_id=cancel.request_id, error="MessageNotFound", message="no such timer"
            )
            return
        self.cancelled.add(cancel.timer_id)
        reply.cancelled_timers.append(cancel.request_id)

    def deliver_timer(self, timer_id: int) -> None:
        """Store a delayed message as if it were due."""
        timer = self.timers[timer_id]
        assert timer is not None, "delivered before"
        assert timer_id not in self.cancelled
        self.timers[timer_id] = None
        self.store(timer.topic_id, timer.queue_id, timer.blob)

    def store(self, topic_id: int, queue_id: int, blob: bytes, origin_topic: str = "") -> int:
        queue_offset = sum(
            (message.topic_id, message.queue_id) == (topic_id, queue_id) for message in self.log
        )
        self.log.append(Message(topic_id, queue_id, queue_offset, blob, origin_topic=origin_topic))
        return queue_offset

    def _serve_pops(self, reply: pb.ReplyFrame) -> None:
        for request_id, pop in list(self._parked.items()):
            batches = self._pop(pop)
            if batches or not pop.poll_duration_ms:
                del self._parked[request_id]
                reply.pops.add(request_id=request_id, batches=batches)

    def _pop(self, pop: pb.PopRequest) -> list[pb.Batch]:
        by_queue: dict[int, list[tuple[int, Message]]] = {}
        count = 0
        for position, message in enumerate(self.log):
            if message.topic_id == pop.topic_id and (pop.group_id, position) not in self.taken:
                by_queue.setdefault(message.queue_id, []).append((position, message))
                count += 1
                if count == pop.max_messages:
                    break
        return [self._deliver(pop, found) for found in by_queue.values()]

    def _deliver(self, pop: pb.PopRequest, found: list[tuple[int, Message]]) -> pb.Batch:
        messages = [message for _, message in found]
        for position, message in found:
            self.taken.add((pop.group_id, position))
            message.attempts += 1
        delivery_id = self._new_delivery(pop.group_id, pop.topic_id, messages)
        return pb.Batch(
            slot=delivery_id,
            delivery_id=delivery_id,
            popped_at_ms=NOW_MS,
            visible_at_ms=NOW_MS + pop.invisible_duration_ms,
            queue_id=messages[0].queue_id,
            indexes=range(len(messages)),
            queue_offsets=[message.queue_offset for message in messages],
            stored_at_ms=[NOW_MS] * len(messages),
            delivery_attempts=[message.attempts for message in messages],
            blobs=[message.blob for message in messages],
            origin_topics=[message.origin_topic for message in messages]
            if messages[0].origin_topic
            else [],
        )

    def _new_delivery(self, group_id: int, topic_id: int, messages: list[Message]) -> int:
        self._ids += 1
        self.deliveries[self._ids] = Delivery(
            group_id, topic_id, messages, [pb.APPLIED] * len(messages)
        )
        return self._ids

    def _ack(self, delivery_id: int, index: int) -> int:
        delivery = self.deliveries.get(delivery_id)
        if delivery is None:
            return pb.GONE
        result = delivery.state[index]
        if result == pb.APPLIED:
            delivery.state[index] = pb.ALREADY
        return result

    def _take_back(self, delivery_id: int, index: int) -> Message | None:
        """End a delivery otherwise than by an ack."""
        delivery = self.deliveries.get(delivery_id)
        if delivery is None or delivery.state[index] != pb.APPLIED:
            return None
        delivery.state[index] = pb.GONE
        return delivery.messages[index]

    def _change(self, change: pb.ChangeInvisibleRequest, reply: pb.ReplyFrame) -> None:
        message = self._take_back(change.delivery_id, change.index)
        if message is None:
            self._gone(change.request_id, reply)
            return
        delivery_id = self._new_delivery(change.group_id, change.topic_id, [message])
        if not change.invisible_duration_ms:
            self.taken.discard((change.group_id, self.log.index(message)))
        reply.changes.add(
            request_id=change.request_id,
            slot=delivery_id,
            delivery_id=delivery_id,
            visible_at_ms=NOW_MS + change.invisible_duration_ms,
        )

    def _refused(self, kind: str, request_id: int, reply: pb.ReplyFrame) -> bool:
        if failure := self.failures.get(kind):
            reply.failures.add(request_id=request_id, error=failure.error, message=failure.message)
        return failure is not None or kind in self.holds

    def _gone(self, request_id: int, reply: pb.ReplyFrame) -> None:
        reply.failures.add(
            request_id=request_id, error="InvalidReceiptHandle", message="no such delivery"
        )
