"""What one round has for one link, until it may be sent.

Results are kept as plain values while the round runs. Protobuf is built after the sync, and only
then are the messages of a pop read: what is not durable leaves the process in no form.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.pop.consumption import AckResult, Batch, Delivery
from tidemill.broker.metrics import Traffic
from tidemill.broker.server.long_polling import Pop
from tidemill.common.errors import ServiceError, codes_of
from tidemill.common.latencies import Latencies
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

_OK = "20000"  # as clients will see it, so that dashboards join the two histograms


class Replies:
    """The results of one round for one link."""

    __slots__ = (
        "ack_ids",
        "ack_results",
        "answered_sequence",
        "append_dues",
        "append_ids",
        "append_offsets",
        "arrived_s",
        "cancelled",
        "changed",
        "configs",
        "done",
        "ensured",
        "failures",
        "pop_bytes",
        "pops",
    )

    def __init__(self) -> None:
        self.answered_sequence = 0
        self.arrived_s = math.inf  # time.monotonic() of the oldest frame that is answered
        self.configs: list[pb.ConfigUpdate] = []
        self.append_ids: list[int] = []
        self.append_offsets: list[int] = []
        self.append_dues: dict[int, int] = {}  # place in append_ids -> when it will be delivered
        self.ack_ids: list[int] = []
        self.ack_results: list[AckResult] = []
        self.pops: list[tuple[Pop, list[Batch]]] = []
        self.pop_bytes = 0
        self.changed: list[tuple[int, Delivery]] = []
        self.done: list[int] = []  # request ids of dead letters
        self.ensured: list[int] = []
        self.cancelled: list[int] = []  # request ids of timer cancels
        self.failures: list[tuple[int, ServiceError]] = []

    def frames(self, engine: Engine, traffic: Traffic, size_max: int) -> Iterator[pb.ReplyFrame]:
        """Build the frames; a new one begins where one reaches `size_max` bytes."""
        self._observe(traffic.latencies)
        frame = pb.ReplyFrame()
        for config in self.configs:
            frame.config.CopyFrom(config)
            if len(self.configs) > 1:
                yield frame
                frame = pb.ReplyFrame()
        if self.append_ids:
            frame.appends.request_ids.extend(self.append_ids)
            frame.appends.queue_offsets.extend(self.append_offsets)
            if dues := self.append_dues:
                frame.appends.due_at_ms.extend(dues.get(n, 0) for n in range(len(self.append_ids)))
        if self.ack_ids:
            frame.acks.request_ids.extend(self.ack_ids)
            # Any enum value is a number of broker.proto.
            frame.acks.results.extend(pb.AckResult.ValueType(result) for result in self.ack_results)
        for request_id, delivery in self.changed:
            frame.changes.add(
                request_id=request_id,
                slot=delivery.slot,
                delivery_id=delivery.delivery_id,
                visible_at_ms=delivery.visible_at_ms,
            )
        for request_id in self.done:
            frame.dead_letters.add(request_id=request_id)
        for request_id in self.ensured:
            frame.ensures.add(request_id=request_id)
        frame.cancelled_timers.extend(self.cancelled)
        for request_id, error in self.failures:
            frame.failures.add(
                request_id=request_id, error=type(error).__name__, message=error.message
            )
        size = 0
        for pop, batches in self.pops:
            reply = frame.pops.add(request_id=pop.request_id)
            for batch in batches:
                size += _add_batch(reply, pop, batch, engine, traffic)
            if size > size_max:
                yield frame
                frame, size = pb.ReplyFrame(), 0
        frame.answered_sequence = self.answered_sequence
        yield frame

    def _observe(self, latencies: Latencies) -> None:
        """Count what the requests of the round took, from their arrival to here."""
        now_s = time.monotonic()
        elapsed_ms = (now_s - self.arrived_s) * 1000
        for code, count in (
            ("append", len(self.append_ids)),
            ("ack", len(self.ack_ids)),
            ("change_invisible", len(self.changed)),
            ("dead_letter", len(self.done)),
            ("ensure", len(self.ensured)),
            ("cancel_timer", len(self.cancelled)),
        ):
            if count:
                latencies.observe(("grpc", code, _OK, "false", "success"), elapsed_ms, count)
        for pop, _ in self.pops:
            is_long_polling = "true" if pop.is_parked else "false"
            labels = ("grpc", "pop", _OK, is_long_polling, "success")
            latencies.observe(labels, (now_s - pop.arrived_s) * 1000)
        for _, error in self.failures:
            code = str(codes_of(error).rocketmq)
            labels = ("grpc", "any", code, "false", "process_request_failed")
            latencies.observe(labels, max(0.0, elapsed_ms) if self.arrived_s < now_s else 0.0)


def _add_batch(reply: pb.PopReply, pop: Pop, batch: Batch, engine: Engine, traffic: Traffic) -> int:
    """Add one batch with its messages; return their size in bytes."""
    records = engine.read_batch(batch)
    # One constructor call copies the messages; fields one by one cost a call each.
    blobs = [bytes(record.blob) for record in records]
    target = reply.batches.add(
        slot=batch.slot,
        delivery_id=batch.delivery_id,
        popped_at_ms=batch.popped_at_ms,
        visible_at_ms=batch.visible_at_ms,
        queue_id=batch.queue_id,
        indexes=batch.indexes,
        queue_offsets=batch.queue_offsets,
        stored_at_ms=[record.stored_at_ms for record in records],
        delivery_attempts=batch.delivery_attempts,
        blobs=blobs,
    )
    origins = [record.origin_topic for record in records]
    if any(origins):
        target.origin_topics.extend(origins)
    size = sum(map(len, blobs))
    traffic.delivered(pop.topic_id, pop.group_id, batch.delivery_attempts, size)
    return size
