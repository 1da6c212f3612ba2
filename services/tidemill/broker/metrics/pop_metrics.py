"""Metrics of deliveries: the delivery table, revives, dead letters and given back messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tidemill.broker.metrics.metered_rounds import PAIR_LABELS
from tidemill.common.metrics import full_parts, histogram_family

if TYPE_CHECKING:
    from tidemill.broker.metrics.lag import Lag
    from tidemill.broker.metrics.metered_rounds import MeteredRounds
    from tidemill.broker.metrics.traffic import Traffic
    from tidemill.common.metrics import Registry


class _PairCounter(NamedTuple):
    """A counter with a series for each topic and consumer group, from counts of the engine."""

    name: str
    documentation: str
    counts: dict[tuple[str, ...], str]  # name of the count by the values of the extra labels
    labels: tuple[str, ...] = ()  # besides topic and consumer group


_COUNTERS: Final = (
    _PairCounter(
        "rocketmq_pop_revive_in_message_total",
        "CK and ACK entries written.",
        {("CK", "put_ok"): "ck", ("ACK", "put_ok"): "ack"},
        ("revive_message_type", "put_status"),
    ),
    _PairCounter(
        "rocketmq_send_to_dlq_messages_total",
        "Messages moved to a dead-letter topic.",
        {("false",): "dead_lettered"},
        ("is_system",),
    ),
    _PairCounter(
        "rocketmq_pop_revive_retry_messages_total",
        "Messages put on a retry topic by revive.",
        {("put_ok",): "revived"},
        ("put_status",),
    ),
    _PairCounter(
        "rocketmq_pop_expired_before_revive_total",
        "Messages that retention deleted before they were revived.",
        {(): "expired_before_revive"},
    ),
    _PairCounter(
        "rocketmq_redelivery_total",
        "Messages delivered again, because they were not acked in time or were given back.",
        {("expired",): "again_expired", ("nack",): "again_nack"},
        ("reason",),
    ),
    _PairCounter(
        "rocketmq_pop_rejected_total",
        "Pops rejected because of `deliveries_max`: the group has its share in flight.",
        {(): "rejected"},
    ),
    _PairCounter(
        "rocketmq_pop_lock_conflict_total",
        "Empty pops that met a FIFO queue locked by a delivery.",
        {(): "lock_conflict"},
    ),
    _PairCounter(
        "rocketmq_pop_filtered_retry_total",
        "Redeliveries that were skipped because the filter of the group no longer matches.",
        {(): "filtered_retry"},
    ),
    _PairCounter(
        "rocketmq_filter_scanned_total",
        "Messages that pops have compared with a filter.",
        {("tag",): "scanned_tag", ("sql",): "scanned_sql"},
        ("type",),
    ),
    _PairCounter(
        "rocketmq_filter_matched_total",
        "Messages that matched the filter of a pop.",
        {("tag",): "matched_tag", ("sql",): "matched_sql"},
        ("type",),
    ),
    _PairCounter(
        "rocketmq_filter_unknown_total",
        "Messages whose SQL filter was UNKNOWN: a property is missing, or cannot be compared.",
        {(): "filter_unknown"},
    ),
    _PairCounter(
        "rocketmq_damaged_messages_total",
        "Messages that were damaged in the log, and dead-lettered without their body.",
        {(): "damaged"},
    ),
    _PairCounter(
        "rocketmq_dead_letters_kept_total",
        "Messages of a dead-letter topic without an attempt left, which stay in that topic.",
        {(): "dead_letter_kept"},
    ),
    _PairCounter(
        "rocketmq_pop_extended_deliveries_total",
        "Deliveries extended because their client is alive.",
        {(): "extended"},
    ),
    _PairCounter(
        "rocketmq_pop_given_back_messages_total",
        "Messages made visible again because their client ended, fell silent or did not confirm"
        " their receipt, or because an operator released them.",
        {(reason,): f"given_back_{reason}" for reason in ("ended", "silent", "unread", "released")},
        ("reason",),
    ),
)


@final
class PopMetrics:
    """Metrics of deliveries."""

    def __init__(
        self, registry: Registry, traffic: Traffic, lag: Lag, rounds: MeteredRounds
    ) -> None:
        self._traffic = traffic
        self._idle = registry.idle_pairs  # noted by `MessageMetrics`
        self._lag = lag
        self._rounds = rounds
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        yield from self._collect_counts()
        yield from self._collect_pop()

    def _collect_counts(self) -> Iterator[Metric]:
        families = [
            CounterMetricFamily(
                counter.name, counter.documentation, labels=(*PAIR_LABELS, *counter.labels)
            )
            for counter in _COUNTERS
        ]
        engine = self._rounds.engine
        topics, groups, counts = engine.catalog.topics, engine.catalog.groups, engine.state.counts
        for topic_id, group_id in list(self._traffic.sent):
            topic, group = topics.get(topic_id), groups.get(group_id)
            if topic is None or group is None or (topic_id, group_id) in self._idle:
                continue
            for family, counter in zip(families, _COUNTERS, strict=True):
                for values, count in counter.counts.items():
                    labels = (topic.name, group.name, *values)
                    family.add_metric(labels, counts[count, group_id, topic_id])
            yield from full_parts(*families)
        yield from families

    def _collect_pop(self) -> Iterator[Metric]:
        """Yield the state of the delivery table, the successor of the reference's buffer."""
        engine = self._rounds.engine
        yield histogram_family(
            "rocketmq_pop_buffer_scan_time_consume",
            "Ms that a round took for its revives.",
            (),
            self._rounds.revive_latencies,
            lambda labels: labels,
        )
        yield GaugeMetricFamily(
            "rocketmq_pop_checkpoint_buffer_size",
            "Pop checkpoints that are not settled.",
            value=engine.state.live_count,
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
            "rocketmq_pop_revive_latency", "Ms since the oldest was due.", labels=("queue_id",)
        )
        lags = engine.consumption.reviver.lag(self._rounds.now_ms)
        for queue_id, (count, late_ms) in enumerate(lags):
            lag.add_metric((str(queue_id),), count)
            behind.add_metric((str(queue_id),), late_ms)
        yield from (lag, behind)
