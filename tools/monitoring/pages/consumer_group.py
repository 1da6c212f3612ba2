"""Consumer group: whether it keeps up, and what it fails at."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, panel, quantiles

_PROGRESS = Row(
    "Progress",
    (
        panel(
            "Lag",
            "Messages that are ready, with a consumer (in flight), and both together (lag).",
            Query("sum(rocketmq_consumer_ready_messages{HERE, TOPIC, GROUP})", "ready"),
            Query("sum(rocketmq_consumer_inflight_messages{HERE, TOPIC, GROUP})", "in flight"),
            Query("sum(rocketmq_consumer_lag_messages{HERE, TOPIC, GROUP})", "lag"),
            alerts=("LagGrowing",),
        ),
        panel(
            "Lag, in time",
            "How long the oldest message waits that is not acked (lag), and that nobody has (queueing).",
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
            "Messages stored in the chosen topics, and acked by the chosen groups, a second.",
            Query("sum(rate(rocketmq_messages_in_total{HERE, TOPIC}[RATE]))", "stored"),
            Query(
                'sum(rate(rocketmq_ack_total{HERE, TOPIC, GROUP, result="applied"}[RATE]))', "acked"
            ),
            unit="cps",
        ),
        panel(
            "Time to drain",
            "Until what is ready has been handed out, at the rate of the last five minutes: ready divided by "
            "what goes out more than what comes in. Very long: never.",
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
            "Messages that are not acked, by broker group: even, unless consumers do not reach one of them.",
            Query(
                "sum by (node_id) (rocketmq_consumer_lag_messages{HERE, TOPIC, GROUP})",
                "{{node_id}}",
            ),
            look=Look.STACKED,
        ),
        panel(
            "Handed out by broker group",
            "Messages handed out a second, by broker group.",
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
    "At the consumer",
    (
        panel(
            "Ready to handed over",
            "Seconds from when a message became ready to when it was handed to a consumer.",
            *quantiles("rocketmq_e2e_delivery_seconds", "HERE, TOPIC, GROUP"),
            unit="s",
        ),
        panel(
            "Handed over to acked",
            "Seconds that consumers take for a message they ack.",
            *quantiles("rocketmq_ack_seconds", "HERE, TOPIC, GROUP"),
            unit="s",
        ),
        panel(
            "Time in listeners P99",
            "Milliseconds that the listeners of push consumers take, as clients measure it; 0 where none does.",
            Query(
                "histogram_quantile(0.99, sum by (le) "
                "(rate(rocketmq_process_time_bucket{HERE, TOPIC, GROUP}[RATE]))) or vector(0)",
                "P99",
            ),
            unit="ms",
        ),
        panel(
            "Cached at consumers",
            "Messages that wait in push consumers, as clients measure it; 0 where none does.",
            Query(
                "sum by (consumer_group) (rocketmq_consumer_cached_messages{HERE, TOPIC, GROUP}) "
                "or vector(0)",
                "{{consumer_group}}",
            ),
        ),
        panel(
            "Clients",
            "Consumers that are connected, by language and version of their client.",
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
    "Deliveries that failed",
    (
        panel(
            "Delivered again",
            "Repeated deliveries a second: expired (not acked in time), or nack (the consumer gave it back).",
            Query(
                "sum by (reason) (rate(rocketmq_redelivery_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{reason}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Dead letters",
            "Messages given up a second.",
            Query(
                "sum by (consumer_group) "
                "(rate(rocketmq_send_to_dlq_messages_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{consumer_group}}",
            ),
            unit="cps",
            alerts=("DlqGrowing",),
        ),
        panel(
            "Dead-letter topic",
            "Messages that are in the dead-letter topic of the group.",
            Query(
                "sum by (consumer_group) (rocketmq_dlq_messages{HERE, GROUP})", "{{consumer_group}}"
            ),
            alerts=("DlqGrowing",),
        ),
        panel(
            "Lost to retention or damage",
            "Messages in the last hour that retention removed before the group had them again, and whose "
            "record was damaged.",
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
    description="Does a consumer group keep up, how long does it take, and what does it fail at?",
    rows=(_PROGRESS, _WORK, _FAILURES),
    has_topics=True,
    has_groups=True,
)
