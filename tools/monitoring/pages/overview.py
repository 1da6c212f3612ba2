"""Overview: the start page, with health, traffic, latency and backlog."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, panel, quantiles, ratio

_HEALTH = Row(
    "Health",
    (
        panel(
            "Brokers reachable",
            "Broker groups that at least one proxy can reach.",
            'sum(max by (broker) (rocketmq_broker_reachable{HERE, node_type="proxy"}))',
            look=Look.NUMBER,
            alerts=("BrokerDown", "BrokersMissing"),
            good_from=1,
        ),
        panel(
            "Brokers expected",
            "Broker groups that the proxies know.",
            'count(count by (broker) (rocketmq_broker_reachable{HERE, node_type="proxy"}))',
            look=Look.NUMBER,
            alerts=("BrokerDown",),
        ),
        panel(
            "Proxies serving",
            "Proxies that accept calls from clients.",
            "sum(rocketmq_proxy_up{HERE})",
            look=Look.NUMBER,
            alerts=("ProxyDown", "ProxiesMissing"),
            good_from=1,
        ),
        panel(
            "Processes not ready",
            "Processes that fail /readyz. A proxy is ready while it can reach a broker.",
            "count(rocketmq_ready{HERE} == 0) or vector(0)",
            look=Look.NUMBER,
            warns_at=1,
        ),
        panel(
            "Alerts firing",
            "Firing alerts of Tidemill.",
            'count(ALERTS{alertstate="firing", service="tidemill"}) or vector(0)',
            look=Look.NUMBER,
            warns_at=1,
        ),
        panel(
            "Versions",
            "Running builds. More than one is normal only during an upgrade.",
            "count(count by (version, commit) (rocketmq_build_info{HERE}))",
            look=Look.NUMBER,
            warns_at=2,
        ),
    ),
)

_TRAFFIC = Row(
    "Traffic",
    (
        panel(
            "Messages in",
            "Stored messages per second, by message type. Copies for retries and dead letters do not count.",
            Query(
                "sum by (message_type) (rate(rocketmq_messages_in_total{HERE, TOPIC}[RATE]))",
                "{{message_type}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Messages out",
            "Delivered messages per second, by message type, repeated deliveries included.",
            Query(
                "sum by (message_type) "
                "(rate(rocketmq_e2e_delivery_seconds_count{HERE, TOPIC, GROUP}[RATE]))",
                "{{message_type}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Bytes",
            "Bytes of stored and delivered messages per second.",
            Query("sum(rate(rocketmq_throughput_in_total{HERE, TOPIC}[RATE]))", "in"),
            Query("sum(rate(rocketmq_throughput_out_total{HERE, TOPIC, GROUP}[RATE]))", "out"),
            unit="Bps",
        ),
        panel(
            "Top 10 topics",
            "Topics with the most stored messages per second.",
            Query(
                "topk(10, sum by (topic) (rate(rocketmq_messages_in_total{HERE, TOPIC}[RATE])))",
                "{{topic}}",
            ),
            unit="cps",
            look=Look.BARS,
        ),
        panel(
            "Top 10 consumer groups",
            "Consumer groups with the most delivered messages per second.",
            Query(
                "topk(10, sum by (consumer_group) "
                "(rate(rocketmq_messages_out_total{HERE, TOPIC, GROUP}[RATE])))",
                "{{consumer_group}}",
            ),
            unit="cps",
            look=Look.BARS,
        ),
        panel(
            "Rejected sends",
            "Share of sends without the status OK (20000).",
            ratio(
                'sum(rate(rocketmq_rpc_latency_count{HERE, node_type="proxy", '
                'request_code="send_message", response_code!="20000"}[RATE])) or vector(0)',
                'sum(rate(rocketmq_rpc_latency_count{HERE, node_type="proxy", '
                'request_code="send_message"}[RATE]))',
            ),
            unit="percentunit",
            alerts=("SendErrors",),
        ),
    ),
)

_LATENCY = Row(
    "Latency",
    (
        panel(
            "Send",
            "Milliseconds of SendMessage at the proxy. The reply follows the sync to the disk.",
            *quantiles(
                "rocketmq_rpc_latency", 'HERE, node_type="proxy", request_code="send_message"'
            ),
            unit="ms",
        ),
        panel(
            "Receive: time parked",
            "Seconds that a receive with a wait took, by result. An empty receive takes its full wait.",
            *quantiles(
                "rocketmq_proxy_long_polling_wait_seconds",
                by="outcome",
                legend="{{outcome}}",
                of=(0.99,),
            ),
            unit="s",
        ),
        panel(
            "End-to-end delivery P99",
            "Seconds from the time when a message became ready to its delivery. A backlog increases this time.",
            *quantiles(
                "rocketmq_e2e_delivery_seconds",
                "HERE, TOPIC, GROUP",
                by="message_type",
                legend="{{message_type}}",
                of=(0.99,),
            ),
            unit="s",
        ),
        panel(
            "Ack",
            "Milliseconds of AckMessage at the proxy.",
            *quantiles(
                "rocketmq_rpc_latency", 'HERE, node_type="proxy", request_code="ack_message"'
            ),
            unit="ms",
        ),
    ),
)

_BACKLOG = Row(
    "Backlog",
    (
        panel(
            "Ready",
            "Messages that a poll would return now, over all consumer groups.",
            "sum(rocketmq_consumer_ready_messages{HERE, TOPIC, GROUP})",
            look=Look.NUMBER,
        ),
        panel(
            "In flight",
            "Messages that are delivered but neither acked nor expired.",
            "sum(rocketmq_consumer_inflight_messages{HERE, TOPIC, GROUP})",
            look=Look.NUMBER,
        ),
        panel(
            "Delayed",
            "Messages that wait for their due time.",
            "sum(rocketmq_timing_messages{HERE, TOPIC})",
            look=Look.NUMBER,
        ),
        panel(
            "Dead letters per hour",
            "Messages that moved to a dead-letter topic in the last hour.",
            "sum(increase(rocketmq_send_to_dlq_messages_total{HERE, TOPIC, GROUP}[1h]))",
            look=Look.NUMBER,
            alerts=("DlqGrowing",),
            warns_at=1,
        ),
        panel(
            "Oldest lag, worst 10",
            "Age of the oldest unacked message, by topic and consumer group.",
            Query(
                "topk(10, max by (topic, consumer_group) "
                "(rocketmq_consumer_lag_latency{HERE, TOPIC, GROUP}))",
                "{{consumer_group}} at {{topic}}",
            ),
            unit="ms",
            look=Look.BARS,
            alerts=("LagGrowing",),
        ),
    ),
)

_PROMISES = Row(
    "Promises",
    (
        panel(
            "Early deliveries",
            "Delayed messages of the last hour that the broker found too early and held back. Each one is a defect.",
            "sum(increase(rocketmq_timer_early_total{HERE}[1h]))",
            look=Look.NUMBER,
            alerts=("TimerEarly",),
            fails_at=1,
        ),
        panel(
            "Late by more than 1 s",
            "Share of the delayed messages of the last hour that were late by more than one second.",
            "1 - "
            + ratio(
                'sum(rate(rocketmq_timer_lateness_seconds_bucket{HERE, TOPIC, le=~"1|1\\\\.0"}[1h]))',
                "sum(rate(rocketmq_timer_lateness_seconds_count{HERE, TOPIC}[1h]))",
            )
            + " unless sum(rate(rocketmq_timer_lateness_seconds_count{HERE, TOPIC}[1h])) == 0"
            + " or vector(0)",
            unit="percentunit",
            look=Look.NUMBER,
            alerts=("TimerLate",),
            warns_at=0.001,
            fails_at=0.01,
        ),
        panel(
            "False empties",
            "Share of receives that were empty although a broker had a message.",
            ratio(
                "sum(rate(rocketmq_proxy_false_empty_total{HERE, TOPIC, GROUP}[1h]))",
                "sum(rate(rocketmq_proxy_receive_total{HERE, TOPIC, GROUP}[1h]))",
            ),
            unit="percentunit",
            look=Look.NUMBER,
            alerts=("FalseEmpty",),
            warns_at=0.000001,
        ),
        panel(
            "Redeliveries",
            "Share of repeated deliveries of the last 15 minutes.",
            ratio(
                "sum(rate(rocketmq_redelivery_total{HERE, TOPIC, GROUP}[15m]))",
                "sum(rate(rocketmq_messages_out_total{HERE, TOPIC, GROUP}[15m]))",
            ),
            unit="percentunit",
            look=Look.NUMBER,
            warns_at=0.05,
            fails_at=0.25,
        ),
    ),
)

PAGE: Final = Page(
    name="overview",
    title="Tidemill / Overview",
    description="Health, traffic, latency, backlog and promises of Tidemill.",
    rows=(_HEALTH, _TRAFFIC, _LATENCY, _BACKLOG, _PROMISES),
    has_topics=True,
    has_groups=True,
)
