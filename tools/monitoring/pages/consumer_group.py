"""Consumer group: progress, time at the consumer, and failed deliveries."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, panel, quantiles

_PROGRESS = Row(
    "Progress",
    (
        panel(
            "Lag",
            "Messages that are ready, in flight at a consumer, and the sum of both (lag).",
            Query("sum(rocketmq_consumer_ready_messages{HERE, TOPIC, GROUP})", "ready"),
            Query("sum(rocketmq_consumer_inflight_messages{HERE, TOPIC, GROUP})", "in flight"),
            Query("sum(rocketmq_consumer_lag_messages{HERE, TOPIC, GROUP})", "lag"),
            alerts=("LagGrowing",),
        ),
        panel(
            "Lag, in time",
            "Age of the oldest message that is not acked (lag), and of the oldest message that is not in flight (queueing).",
            Query(
                "max by (topic, consumer_group) (rocketmq_consumer_lag_latency{HERE, TOPIC, GROUP})",
                "lag {{consumer_group}} at {{topic}}",
            ),
            Query(
                "max by (topic, consumer_group) "
                "(rocketmq_consumer_queueing_latency{HERE, TOPIC, GROUP})",
                "queueing {{consumer_group}} at {{topic}}",
            ),
            unit="ms",
            alerts=("LagGrowing",),
        ),
        panel(
            "Produced and consumed",
            "Messages per second that were stored in the selected topics and acked by the selected consumer groups.",
            Query("sum(rate(rocketmq_messages_in_total{HERE, TOPIC}[RATE]))", "stored"),
            Query(
                'sum(rate(rocketmq_ack_total{HERE, TOPIC, GROUP, result="applied"}[RATE]))', "acked"
            ),
            unit="cps",
        ),
        panel(
            "Time to drain",
            "Seconds until all ready messages are delivered, at the rates of the last five minutes: ready messages divided by the difference between deliveries and new messages. A very large value means never.",
            Query(
                "sum by (topic, consumer_group) (rocketmq_consumer_ready_messages{HERE, TOPIC, GROUP}) / "
                "clamp_min(sum by (topic, consumer_group) "
                "(rate(rocketmq_messages_out_total{HERE, TOPIC, GROUP}[5m])) - on (topic) group_left "
                "sum by (topic) (rate(rocketmq_messages_in_total{HERE, TOPIC}[5m])), 0.001)",
                "{{consumer_group}} at {{topic}}",
            ),
            unit="s",
            alerts=("LagGrowing",),
        ),
        panel(
            "Lag by broker group",
            "Unacked messages by broker group. The values are even unless consumers do not reach one broker group.",
            Query(
                "sum by (node_id) (rocketmq_consumer_lag_messages{HERE, TOPIC, GROUP})",
                "{{node_id}}",
            ),
            look=Look.STACKED,
        ),
        panel(
            "Delivered by broker group",
            "Delivered messages per second, by broker group.",
            Query(
                "sum by (node_id) (rate(rocketmq_messages_out_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{node_id}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
    ),
)

_WORK = Row(
    "Time at the consumer",
    (
        panel(
            "Ready to delivered",
            "Seconds from the time when a message became ready to its delivery.",
            *quantiles("rocketmq_e2e_delivery_seconds", "HERE, TOPIC, GROUP"),
            unit="s",
        ),
        panel(
            "Delivered to acked",
            "Seconds from the delivery of a message to its ack.",
            *quantiles("rocketmq_ack_seconds", "HERE, TOPIC, GROUP"),
            unit="s",
        ),
        panel(
            "Time in listeners P99",
            "Milliseconds that the listener of a push consumer takes, measured by the client. 0 if no client reports it.",
            Query(
                "histogram_quantile(0.99, sum by (le) "
                "(rate(rocketmq_process_time_bucket{HERE, TOPIC, GROUP}[RATE]))) or vector(0)",
                "P99",
            ),
            unit="ms",
        ),
        panel(
            "Cached at consumers",
            "Messages that wait inside push consumers, measured by the client. 0 if no client reports it.",
            Query(
                "sum by (consumer_group) (rocketmq_consumer_cached_messages{HERE, TOPIC, GROUP}) "
                "or vector(0)",
                "{{consumer_group}}",
            ),
        ),
        panel(
            "Clients",
            "Connected consumers, by language and version of the client.",
            Query(
                "sum by (consumer_group, language, version) "
                "(rocketmq_consumer_connections{HERE, GROUP}) or vector(0)",
                "{{consumer_group}}: {{language}} {{version}}",
            ),
            look=Look.BARS,
        ),
    ),
)

_FAILURES = Row(
    "Failed deliveries",
    (
        panel(
            "Redeliveries",
            "Repeated deliveries per second. expired: the message was not acked in time. nack: the consumer gave it back.",
            Query(
                "sum by (reason) (rate(rocketmq_redelivery_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{reason}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Dead letters",
            "Messages that became dead letters, per second.",
            Query(
                "sum by (consumer_group) "
                "(rate(rocketmq_send_to_dlq_messages_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{consumer_group}}",
            ),
            unit="cps",
            alerts=("DlqGrowing",),
        ),
        panel(
            "Open dead letters",
            "Dead letters of the consumer group that are neither replayed nor discarded.",
            Query(
                'sum by (consumer_group) (rocketmq_dlq_messages{HERE, GROUP, state="open"})',
                "{{consumer_group}}",
            ),
            alerts=("DlqGrowing",),
        ),
        panel(
            "Settled dead letters",
            "Dead letters that operators replay and discard, per second. A replay with another result changes nothing.",
            Query(
                "sum by (result) (rate(rocketmq_dlq_replayed_total{HERE, GROUP}[RATE]))",
                "replay: {{result}}",
            ),
            Query("sum(rate(rocketmq_dlq_discarded_total{HERE, GROUP}[RATE]))", "discarded"),
            unit="cps",
        ),
        panel(
            "Age by priority",
            "Age of the oldest message of each level of PRIORITY topics that waits for a consumer.",
            Query(
                "max by (topic, level) "
                "(rocketmq_priority_oldest_ready_seconds{HERE, TOPIC, GROUP})",
                "{{topic}} {{level}}",
            ),
            unit="s",
            alerts=("PriorityStarves",),
        ),
        panel(
            "Messages by priority",
            "Deliveries of each level of PRIORITY topics per second, in strict and in fair slots.",
            Query(
                "sum by (level, slot) "
                "(rate(rocketmq_priority_delivered_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{level}} {{slot}}",
            ),
            unit="cps",
        ),
        panel(
            "Lost to retention or damage",
            "Messages of the last hour that retention removed before the next delivery to the consumer group, and messages with a damaged record.",
            Query(
                "sum(increase(rocketmq_pop_expired_before_revive_total{HERE, TOPIC, GROUP}[1h]))",
                "removed",
            ),
            Query(
                "sum(increase(rocketmq_damaged_messages_total{HERE, TOPIC, GROUP}[1h]))", "damaged"
            ),
            alerts=("Corruption",),
        ),
    ),
)

PAGE: Final = Page(
    name="consumer-group",
    title="Tidemill / Consumer group",
    description="Progress of a consumer group, its time per message, and its failed deliveries.",
    rows=(_PROGRESS, _WORK, _FAILURES),
    has_topics=True,
    has_groups=True,
)
