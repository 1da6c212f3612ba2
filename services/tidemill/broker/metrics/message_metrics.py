"""Metrics of load, messages in and out, acks, and the progress of consumer groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tidemill.broker.metrics.metered_rounds import MS_PER_S, PAIR_LABELS, flag
from tidemill.broker.metrics.traffic import MESSAGE_TYPES
from tidemill.common.metrics import full_parts, histogram_family, histogram_parts

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import GroupId, TopicId
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup, Topic
    from tidemill.broker.metrics.lag import Lag
    from tidemill.broker.metrics.metered_rounds import MeteredRounds
    from tidemill.broker.metrics.traffic import Traffic
    from tidemill.common.metrics import Labels, Registry

_KINDS = range(len(MESSAGE_TYPES))
_TYPES_OF_MIXED = (1, 2, 3, 4)  # that clients send to any topic; others appear with a message
_MIXED = 7
PERMISSION_READ = 4
PERMISSION_READ_WRITE = 6

RPC_LABELS = ("protocol_type", "request_code", "response_code", "is_long_polling", "result")
OUT_LABELS = ("topic", "consumer_group", "is_retry", "is_system")
IN_LABELS = ("topic", "message_type", "is_system")
WAIT_LABELS = (*PAIR_LABELS, "message_type")


@final
class MessageMetrics:
    """Metrics of load, messages in and out, acks, and consumer progress."""

    def __init__(
        self, registry: Registry, traffic: Traffic, lag: Lag, rounds: MeteredRounds
    ) -> None:
        self._traffic = traffic
        self._lag = lag
        self._rounds = rounds
        self._idle = registry.idle_pairs  # topic id and group id
        self._in_sets = registry.label_sets("rocketmq_messages_in_total", IN_LABELS)
        self._out_sets = registry.label_sets("rocketmq_messages_out_total", OUT_LABELS)
        self._wait_sets = registry.label_sets("rocketmq_e2e_delivery_seconds", WAIT_LABELS)
        self._ack_sets = registry.label_sets("rocketmq_ack_seconds", PAIR_LABELS)
        self._lag_sets = registry.label_sets("rocketmq_consumer_lag_messages", OUT_LABELS)
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        engine = self._rounds.engine
        topics, groups = engine.catalog.topics, engine.catalog.groups
        yield from self._collect_load(topics, groups)
        yield from self._collect_received(topics)
        self._idle.forget_unless(lambda pair: pair[0] in topics and pair[1] in groups)
        # A pair with messages is not idle, so the lag comes first.
        yield from self._collect_lag(topics, groups)
        yield from self._collect_sent(topics, groups)

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
                continue  # As in RocketMQ, copies for retry are not counted as messages in.
            shown = _TYPES_OF_MIXED if topic.type == _MIXED else (int(topic.type),)
            # Looked up one by one: sorting all counts by topic would take too long a slice.
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
            results = self._traffic.acks[topic_id, group_id]
            if self._idle.note((topic_id, group_id), "sent", (*counts, *results)):
                continue
            for at, is_retry in ((0, "false"), (2, "true")):
                labels = self._out_sets.admit(
                    (topic.name, group.name, is_retry, flag(topic.is_system))
                )
                messages.add_metric(labels, counts[at])
                size.add_metric(labels, counts[at + 1])
            for result, name in enumerate(("applied", "already", "gone"), 1):
                acks.add_metric((topic.name, group.name, "store", name), results[result])
            yield from full_parts(messages, size, acks)
        yield from (messages, size, acks)

        def labels_of_wait(key: tuple[TopicId, GroupId, int]) -> Labels | None:
            topic, group = topics.get(key[0]), groups.get(key[1])
            if topic is None or group is None:
                self._traffic.waits.drop(key)
                return None
            if key[:2] in self._idle:
                return None
            return self._wait_sets.admit((topic.name, group.name, _type_name(key[2])))

        yield from histogram_parts(
            "rocketmq_e2e_delivery_seconds",
            "Seconds from ready to handed to a consumer.",
            WAIT_LABELS,
            self._traffic.waits,
            labels_of_wait,
            divisor=MS_PER_S,
        )

        def labels_of_ack(key: tuple[GroupId, TopicId]) -> Labels | None:
            topic, group = topics.get(key[1]), groups.get(key[0])
            if topic is None or group is None or (key[1], key[0]) in self._idle:
                return None
            return self._ack_sets.admit((topic.name, group.name))

        yield from histogram_parts(
            "rocketmq_ack_seconds",
            "Seconds from handed to a consumer to acked.",
            PAIR_LABELS,
            self._rounds.engine.state.ack_times_ms,
            labels_of_ack,
            divisor=MS_PER_S,
        )

    def _collect_lag(
        self, topics: dict[TopicId, Topic], groups: dict[GroupId, ConsumerGroup]
    ) -> Iterator[Metric]:
        gauges = {
            name: GaugeMetricFamily(f"rocketmq_consumer_{name}", help_, labels=OUT_LABELS)
            for name, help_ in (
                ("lag_messages", "Messages that the group will be given, or that are in flight."),
                ("lag_latency", "Ms since the oldest unacknowledged message became ready."),
                ("ready_messages", "Messages that a poll would return now."),
                ("inflight_messages", "Messages in flight: delivered, and still invisible."),
                ("queueing_latency", "Ms since the oldest ready message became ready."),
            )
        }
        held = GaugeMetricFamily(
            "rocketmq_pop_inflight_oldest_seconds",
            "Seconds that the oldest message has been in flight, except messages of retry topics.",
            labels=PAIR_LABELS,
        )
        for (group_id, topic_id, is_retry), found in self._lag.of_topics.items():
            topic, group = topics.get(topic_id), groups.get(group_id)
            if topic is None or group is None:
                continue
            count = found.ready_count + found.in_flight_count
            if self._idle.note_messages((topic_id, group_id), count):
                continue
            labels = self._lag_sets.admit((topic.name, group.name, flag(is_retry), "false"))
            gauges["ready_messages"].add_metric(labels, found.ready_count)
            gauges["inflight_messages"].add_metric(labels, found.in_flight_count)
            gauges["lag_messages"].add_metric(labels, count)
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
    return MESSAGE_TYPES[kind]
