"""What the broker exports: hot paths add to lists, names and labels come with a scrape.

Counts are kept by id and shown by name, so a topic that is deleted takes its series with it, and
one that is created shows zeros from the next scrape on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.pop.state import DELIVERY_BUCKETS_MS
from tidemill.common.histogram import Histogram
from tidemill.common.metrics import Labels, Registry, full_parts, histogram_family, histogram_parts
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX
from tidemill.message.stored_message import MESSAGE_TYPE_AT

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup, Topic
    from tidemill.broker.engine.queries.inspection import QueueProgress
    from tidemill.broker.engine.timer.firing_clock import FiringClock

KIB = 1024
SIZE_BUCKETS = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 512 * KIB, 1 << 20, 2 << 20, 4 << 20)  # bytes
_MESSAGE_TYPES = ("normal", "normal", "fifo", "delay", "transaction", "lite", "priority")
_KINDS = range(len(_MESSAGE_TYPES))
_KIND_MAX = len(_MESSAGE_TYPES) - 1  # others are counted as those without a type
_TYPES_OF_MIXED = (1, 2, 3, 4)  # what clients send to any topic; others appear when they come
_MIXED = 7
PERMISSION_READ = 4
PERMISSION_READ_WRITE = 6
LAG_AGE_MS_MAX = 1_000  # lag is computed for a scrape unless it is younger than this

# What RocketMQ puts on all metrics of its store.
STORAGE_LABELS = ("storage_type", "storage_medium")
STORAGE = ("local", "disk")

RPC_LABELS = ("protocol_type", "request_code", "response_code", "is_long_polling", "result")
OUT_LABELS = ("topic", "consumer_group", "is_retry", "is_system")
IN_LABELS = ("topic", "message_type", "is_system")
PAIR_LABELS = ("topic", "consumer_group")
WAIT_LABELS = (*PAIR_LABELS, "message_type")
MS_PER_S = 1_000


class Traffic:
    """Messages and bytes, counted where they pass."""

    def __init__(self) -> None:
        # Sizes in bytes, by topic id and message type.
        self.received: Histogram[tuple[TopicId, int]] = Histogram(SIZE_BUCKETS)
        # By topic id and group id: messages and bytes; then those of repeated deliveries.
        self.sent: dict[tuple[TopicId, GroupId], list[int]] = {}
        # By topic id and group id: one count an AckResult.
        self.acks: dict[tuple[TopicId, GroupId], list[int]] = {}
        # Milliseconds that messages were ready before they were handed to a consumer, by topic id,
        # group id and message type.
        self.waits: Histogram[tuple[TopicId, GroupId, int]] = Histogram(DELIVERY_BUCKETS_MS)
        # From a frame's arrival to its answer, by RPC_LABELS.
        self.latencies: Histogram[Labels] = Histogram()

    def appended(self, topic_id: TopicId, blob: bytes) -> None:
        """Count a message that was stored."""
        kind = blob[MESSAGE_TYPE_AT]
        self.received.observe((topic_id, kind if kind <= _KIND_MAX else 0), len(blob))

    def polled(self, topic_id: TopicId, group_id: GroupId) -> None:
        """Know that a group consumes a topic, so that its series start at zero."""
        if (topic_id, group_id) not in self.sent:
            self.sent[topic_id, group_id] = [0, 0, 0, 0]
            self.acks[topic_id, group_id] = [0, 0, 0, 0]

    def forget(self, topic_id: TopicId, group_id: GroupId) -> None:
        """Drop the counts of a topic or group that was deleted."""
        self.sent.pop((topic_id, group_id), None)
        self.acks.pop((topic_id, group_id), None)

    def delivered(
        self, topic_id: TopicId, group_id: GroupId, attempts: Sequence[int], size: int
    ) -> None:
        """Count one batch that was handed out."""
        self.polled(topic_id, group_id)
        counts = self.sent[topic_id, group_id]
        # One queue is either a retry queue or not, so the batch is of one kind.
        at = 2 if attempts and attempts[0] > 1 else 0
        counts[at] += len(attempts)
        counts[at + 1] += size

    def handed_over(
        self, topic_id: TopicId, group_id: GroupId, waits_ms: Sequence[int], blobs: Sequence[bytes]
    ) -> None:
        """Count how long the messages of a batch were ready, which is of one queue."""
        kind = blobs[0][MESSAGE_TYPE_AT]
        label = topic_id, group_id, kind if kind <= _KIND_MAX else 0
        # The oldest is the first: where it and the last fall into one bucket all do. A topic has
        # one type, but for mixed ones, of which the first message speaks for its batch.
        first, last = waits_ms[0], waits_ms[-1]
        observe = self.waits.observe
        if first == last or bisect_left(DELIVERY_BUCKETS_MS, first) == bisect_left(
            DELIVERY_BUCKETS_MS, last
        ):
            observe(label, sum(waits_ms) / len(waits_ms), len(waits_ms))
            return
        for wait_ms in waits_ms:
            observe(label, wait_ms)

    def acked(self, topic_id: TopicId, group_id: GroupId, result: int) -> None:
        """Count an ack."""
        counts = self.acks.get((topic_id, group_id))
        if counts is not None:
            counts[result] += 1


class TopicLag:
    """How far a group is in all queues of a topic, or of its retry topic."""

    __slots__ = (
        "in_flight_count",
        "oldest_popped_at_ms",
        "oldest_ready_at_ms",
        "oldest_unacked_at_ms",
        "ready_count",
    )

    def __init__(self) -> None:
        self.ready_count = self.in_flight_count = 0
        # 0: nothing is
        self.oldest_unacked_at_ms = self.oldest_ready_at_ms = self.oldest_popped_at_ms = 0

    def add(self, queue: QueueProgress) -> None:
        """Add one queue."""
        self.ready_count += queue.ready_count
        self.in_flight_count += queue.in_flight_count
        self.oldest_unacked_at_ms = _earlier(self.oldest_unacked_at_ms, queue.oldest_unacked_at_ms)
        self.oldest_ready_at_ms = _earlier(self.oldest_ready_at_ms, queue.oldest_ready_at_ms)
        self.oldest_popped_at_ms = _earlier(self.oldest_popped_at_ms, queue.oldest_popped_at_ms)


def _earlier(one_ms: int, other_ms: int) -> int:
    """Return the earlier of two instants, of which 0 is none."""
    return min(one_ms, other_ms) if one_ms and other_ms else one_ms or other_ms


class Lag:
    """Consumer progress of all groups, as of the last time somebody asked."""

    def __init__(self) -> None:
        # By group, the topic that it names, and whether it is about that one's retry topic.
        self.of_topics: dict[tuple[GroupId, TopicId, bool], TopicLag] = {}
        self.in_flight_count = 0  # of all of them
        self.now_ms = 0


class MeteredRounds(Protocol):
    """What the metrics read of the rounds."""

    @property
    def engine(self) -> Engine:
        """The engine."""
        ...

    @property
    def now_ms(self) -> int:
        """When the last round began."""
        ...

    @property
    def pending_count(self) -> int:
        """What waits for the next round."""
        ...

    @property
    def firing_clock(self) -> FiringClock:
        """The clock by which delayed messages are due."""
        ...

    @property
    def disk_full_in_s(self) -> float:
        """Seconds until the disk is full; infinite: never."""
        ...

    @property
    def append_times_us(self) -> Histogram[tuple[()]]:
        """How long rounds took to write what they appended."""
        ...

    @property
    def sync_times_us(self) -> Histogram[tuple[()]]:
        """How long syncs of the log took."""
        ...

    @property
    def revive_latencies(self) -> Histogram[tuple[()]]:
        """How long rounds took to revive what was due."""
        ...


class BrokerMetrics:
    """Turns the counts into metrics."""

    def __init__(
        self, registry: Registry, traffic: Traffic, lag: Lag, rounds: MeteredRounds
    ) -> None:
        self._traffic = traffic
        self._lag = lag
        self._rounds = rounds
        self._in_sets = registry.label_sets("rocketmq_messages_in_total", IN_LABELS)
        self._out_sets = registry.label_sets("rocketmq_messages_out_total", OUT_LABELS)
        self._wait_sets = registry.label_sets("rocketmq_e2e_delivery_seconds", WAIT_LABELS)
        self._ack_sets = registry.label_sets("rocketmq_ack_seconds", PAIR_LABELS)
        self._lag_sets = registry.label_sets("rocketmq_consumer_lag_messages", OUT_LABELS)
        self._dead_letter_sets = registry.label_sets("rocketmq_dlq_messages", ("consumer_group",))
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        engine = self._rounds.engine
        topics, groups = engine.catalog.topics, engine.catalog.groups
        yield from self._collect_load(topics, groups)
        yield from self._collect_received(topics)
        yield from self._collect_sent(topics, groups)
        yield from self._collect_engine(topics, groups)
        yield from self._collect_lag(topics, groups)
        yield from self._collect_pop()
        yield from self._collect_dead_letters(groups)

    def _collect_dead_letters(self, groups: dict[GroupId, ConsumerGroup]) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "rocketmq_dlq_messages",
            "Messages in a group's dead-letter topic.",
            labels=("consumer_group",),
        )
        catalog = self._rounds.engine.catalog
        for group in list(groups.values()):
            topic = catalog.find_topic(f"{DEAD_LETTER_TOPIC_PREFIX}{group.name}")
            queues = catalog.queues_of(topic) if topic is not None else []
            (name,) = self._dead_letter_sets.admit((group.name,))
            gauge.add_metric((name,), sum(each.max_offset - each.min_offset for each in queues))
            yield from full_parts(gauge)
        yield gauge

    def _collect_pop(self) -> Iterator[Metric]:
        """Yield the state of the delivery table, which is what the reference's buffer became."""
        engine = self._rounds.engine
        yield histogram_family(
            "rocketmq_pop_buffer_scan_time_consume",
            "Ms a round took to revive what was due.",
            (),
            self._rounds.revive_latencies,
            lambda labels: labels,
        )
        yield GaugeMetricFamily(
            "rocketmq_pop_checkpoint_buffer_size",
            "Pop checkpoints that are not settled.",
            value=engine.state.table.used_count,
        )
        yield GaugeMetricFamily(
            "rocketmq_pop_offset_buffer_size",
            "Messages in flight.",
            value=self._lag.in_flight_count,
        )
        lag = GaugeMetricFamily(
            "rocketmq_pop_revive_lag", "Checkpoints due and not revived.", labels=("queue_id",)
        )
        behind = GaugeMetricFamily(
            "rocketmq_pop_revive_latency", "Ms the oldest of them is late.", labels=("queue_id",)
        )
        lags = engine.consumption.reviver.lag(self._rounds.now_ms)
        for queue_id, (count, late_ms) in enumerate(lags):
            lag.add_metric((str(queue_id),), count)
            behind.add_metric((str(queue_id),), late_ms)
        yield from (lag, behind)

    def _collect_load(
        self, topics: dict[TopicId, Topic], groups: dict[GroupId, ConsumerGroup]
    ) -> Iterator[Metric]:
        watermark = GaugeMetricFamily(
            "rocketmq_processor_watermark",
            "Frames and calls that wait for the next round.",
            labels=("processor",),
        )
        watermark.add_metric(("send",), self._rounds.pending_count)
        yield watermark
        permission = PERMISSION_READ if self._rounds.engine.room.is_full else PERMISSION_READ_WRITE
        yield GaugeMetricFamily(
            "rocketmq_broker_permission", "2 write, 4 read, 6 both.", value=permission
        )
        yield histogram_family(
            "rocketmq_rpc_latency",
            "Ms from a request's arrival to its answer.",
            RPC_LABELS,
            self._traffic.latencies,
            lambda labels: labels,
        )
        yield GaugeMetricFamily("rocketmq_topic_number", "Topics.", value=len(topics))
        yield GaugeMetricFamily("rocketmq_consumer_group_number", "Groups.", value=len(groups))

    def _collect_received(self, topics: dict[TopicId, Topic]) -> Iterator[Metric]:
        messages = CounterMetricFamily(
            "rocketmq_messages_in_total", "Messages stored.", labels=IN_LABELS
        )
        size = CounterMetricFamily("rocketmq_throughput_in_total", "Bytes.", labels=IN_LABELS)
        received = self._traffic.received
        for topic in list(topics.values()):
            if topic.is_system:
                continue  # As in RocketMQ, copies for retry are no messages in.
            shown = _TYPES_OF_MIXED if topic.type == _MIXED else (int(topic.type),)
            # Looked up one by one: to sort the counts by topic would be a slice of all of them.
            for kind in _KINDS:
                is_known = (topic.id, kind) in received
                if not is_known and kind not in shown:
                    continue
                counts, total_bytes = received.buckets((topic.id, kind)) if is_known else ([], 0)
                labels = self._in_sets.admit((topic.name, _type_name(kind), "false"))
                messages.add_metric(labels, sum(counts))
                size.add_metric(labels, total_bytes)
            yield from full_parts(messages, size)
        yield from (messages, size)

        def labels_of(key: tuple[TopicId, int]) -> Labels | None:
            topic = topics.get(key[0])
            if topic is None:
                received.drop(key)
            if topic is None or topic.is_system:
                return None
            return self._in_sets.admit((topic.name, _type_name(key[1]), "false"))

        yield from histogram_parts(
            "rocketmq_message_size",
            "Size of stored messages in bytes.",
            IN_LABELS,
            received,
            labels_of,
        )

    def _collect_sent(
        self, topics: dict[TopicId, Topic], groups: dict[GroupId, ConsumerGroup]
    ) -> Iterator[Metric]:
        messages = CounterMetricFamily(
            "rocketmq_messages_out_total", "Messages handed to a consumer.", labels=OUT_LABELS
        )
        size = CounterMetricFamily("rocketmq_throughput_out_total", "Bytes.", labels=OUT_LABELS)
        acks = CounterMetricFamily(
            "rocketmq_ack_total",
            "How acks were matched.",
            labels=("topic", "consumer_group", "path", "result"),
        )
        for (topic_id, group_id), counts in list(self._traffic.sent.items()):
            topic, group = topics.get(topic_id), groups.get(group_id)
            if topic is None or group is None:
                self._traffic.forget(topic_id, group_id)
                continue
            for at, is_retry in ((0, "false"), (2, "true")):
                labels = self._out_sets.admit(
                    (topic.name, group.name, is_retry, flag(topic.is_system))
                )
                messages.add_metric(labels, counts[at])
                size.add_metric(labels, counts[at + 1])
            results = self._traffic.acks[topic_id, group_id]
            for result, name in enumerate(("applied", "already", "gone"), 1):
                acks.add_metric((topic.name, group.name, "store", name), results[result])
            yield from full_parts(messages, size, acks)
        yield from (messages, size, acks)

        def labels_of_wait(key: tuple[TopicId, GroupId, int]) -> Labels | None:
            topic, group = topics.get(key[0]), groups.get(key[1])
            if topic is None or group is None:
                self._traffic.waits.drop(key)
                return None
            return self._wait_sets.admit((topic.name, group.name, _type_name(key[2])))

        yield from histogram_parts(
            "rocketmq_e2e_delivery_seconds",
            "Seconds from when a message became ready to when it was handed to a consumer.",
            WAIT_LABELS,
            self._traffic.waits,
            labels_of_wait,
            divisor=MS_PER_S,
        )

        def labels_of_ack(key: tuple[GroupId, TopicId]) -> Labels | None:
            topic, group = topics.get(key[1]), groups.get(key[0])
            if topic is None or group is None:
                return None
            return self._ack_sets.admit((topic.name, group.name))

        yield from histogram_parts(
            "rocketmq_ack_seconds",
            "Seconds from when a message was handed to a consumer to its ack.",
            PAIR_LABELS,
            self._rounds.engine.state.ack_times_ms,
            labels_of_ack,
            divisor=MS_PER_S,
        )

    def _collect_engine(
        self, topics: dict[TopicId, Topic], groups: dict[GroupId, ConsumerGroup]
    ) -> Iterator[Metric]:
        """Yield what the engine does by itself when nobody asks."""
        dead = CounterMetricFamily(
            "rocketmq_send_to_dlq_messages_total",
            "Messages moved to a dead-letter topic.",
            labels=("topic", "consumer_group", "is_system"),
        )
        revived = CounterMetricFamily(
            "rocketmq_pop_revive_retry_messages_total",
            "Messages put on a retry topic by revive.",
            labels=("topic", "consumer_group", "put_status"),
        )
        expired = CounterMetricFamily(
            "rocketmq_pop_expired_before_revive_total",
            "Messages that retention removed before they were revived.",
            labels=("topic", "consumer_group"),
        )
        written = CounterMetricFamily(
            "rocketmq_pop_revive_in_message_total",
            "CK and ACK entries written.",
            labels=("topic", "consumer_group", "revive_message_type", "put_status"),
        )
        again = CounterMetricFamily(
            "rocketmq_redelivery_total",
            "Messages that are delivered once more: not acked in time, or given back.",
            labels=("topic", "consumer_group", "reason"),
        )
        locked = CounterMetricFamily(
            "rocketmq_pop_lock_conflict_total",
            "Pops that got nothing, and met an ordered queue that a delivery locks.",
            labels=("topic", "consumer_group"),
        )
        filtered = CounterMetricFamily(
            "rocketmq_pop_filtered_retry_total",
            "Redeliveries that were passed over: the filter does not take them any more.",
            labels=("topic", "consumer_group"),
        )
        damaged = CounterMetricFamily(
            "rocketmq_damaged_messages_total",
            "Messages that were damaged in the log, and dead-lettered without their body.",
            labels=("topic", "consumer_group"),
        )
        extended = CounterMetricFamily(
            "rocketmq_pop_extended_deliveries_total",
            "Deliveries extended because their client lives.",
            labels=("topic", "consumer_group"),
        )
        given_back = CounterMetricFamily(
            "rocketmq_pop_given_back_messages_total",
            "Messages made visible again because the client that held them ended, fell silent, or"
            " has not told that it had them, or because an operator released them.",
            labels=("topic", "consumer_group", "reason"),
        )
        families = (
            written,
            dead,
            revived,
            expired,
            again,
            locked,
            filtered,
            damaged,
            extended,
            given_back,
        )
        counts = self._rounds.engine.state.counts
        for topic_id, group_id in list(self._traffic.sent):
            topic, group = topics.get(topic_id), groups.get(group_id)
            if topic is None or group is None:
                continue
            pair = topic.name, group.name
            written.add_metric((*pair, "CK", "put_ok"), counts["ck", group_id, topic_id])
            written.add_metric((*pair, "ACK", "put_ok"), counts["ack", group_id, topic_id])
            dead.add_metric((*pair, "false"), counts["dead_lettered", group_id, topic_id])
            revived.add_metric((*pair, "put_ok"), counts["revived", group_id, topic_id])
            expired.add_metric(pair, counts["expired_before_revive", group_id, topic_id])
            for reason in ("expired", "nack"):
                count = counts[f"again_{reason}", group_id, topic_id]
                again.add_metric((*pair, reason), count)
            locked.add_metric(pair, counts["lock_conflict", group_id, topic_id])
            filtered.add_metric(pair, counts["filtered_retry", group_id, topic_id])
            damaged.add_metric(pair, counts["damaged", group_id, topic_id])
            extended.add_metric(pair, counts["extended", group_id, topic_id])
            for reason in ("ended", "silent", "unread", "released"):
                count = counts[f"given_back_{reason}", group_id, topic_id]
                given_back.add_metric((*pair, reason), count)
            yield from full_parts(*families)
        yield from families

    def _collect_lag(
        self, topics: dict[TopicId, Topic], groups: dict[GroupId, ConsumerGroup]
    ) -> Iterator[Metric]:
        gauges = {
            name: GaugeMetricFamily(f"rocketmq_consumer_{name}", help_, labels=OUT_LABELS)
            for name, help_ in (
                ("lag_messages", "Messages stored but not acknowledged."),
                ("lag_latency", "Ms since the oldest unacknowledged message became ready."),
                ("ready_messages", "Messages that a poll would return now."),
                ("inflight_messages", "Delivered, inside their invisible time."),
                ("queueing_latency", "Ms since the oldest ready message became ready."),
            )
        }
        held = GaugeMetricFamily(
            "rocketmq_pop_inflight_oldest_seconds",
            "How long the oldest message has been with a consumer; not those of retry topics.",
            labels=PAIR_LABELS,
        )
        for (group_id, topic_id, is_retry), found in self._lag.of_topics.items():
            topic, group = topics.get(topic_id), groups.get(group_id)
            if topic is None or group is None:
                continue
            labels = self._lag_sets.admit((topic.name, group.name, flag(is_retry), "false"))
            gauges["ready_messages"].add_metric(labels, found.ready_count)
            gauges["inflight_messages"].add_metric(labels, found.in_flight_count)
            gauges["lag_messages"].add_metric(labels, found.ready_count + found.in_flight_count)
            gauges["lag_latency"].add_metric(labels, self._age_ms(found.oldest_unacked_at_ms))
            gauges["queueing_latency"].add_metric(labels, self._age_ms(found.oldest_ready_at_ms))
            if not is_retry:
                held_ms = self._age_ms(found.oldest_popped_at_ms)
                held.add_metric(labels[:2], held_ms / MS_PER_S)
            yield from full_parts(held, *gauges.values())
        yield from (held, *gauges.values())

    def _age_ms(self, at_ms: int) -> int:
        return max(0, self._lag.now_ms - at_ms) if at_ms else 0


def _type_name(kind: int) -> str:
    return _MESSAGE_TYPES[kind]


def flag(value: bool) -> str:
    """Return a label's value of what is or is not."""
    return "true" if value else "false"
