"""Overview: the start page, for a look that says whether anything is wrong."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, panel, quantiles, ratio

_HEALTH = Row(
    "Health",
    (
        panel(
            "Brokers reachable",
            "Broker groups whose broker at least one proxy can reach.",
            'sum(max by (broker) (rocketmq_broker_reachable{HERE, node_type="proxy"}))',
            look=Look.NUMBER,
            alerts=("BrokerDown", "BrokersMissing"),
            good_from=1,
        ),
        panel(
            "Brokers expected",
            "Broker groups that the proxies know of.",
            'count(count by (broker) (rocketmq_broker_reachable{HERE, node_type="proxy"}))',
            look=Look.NUMBER,
            alerts=("BrokerDown",),
        ),
        panel(
            "Proxies serving",
            "Proxies that take calls of clients.",
            "sum(rocketmq_proxy_up{HERE})",
            look=Look.NUMBER,
            alerts=("ProxyDown", "ProxiesMissing"),
            good_from=1,
        ),
        panel(
            "Processes not ready",
            "Processes whose /readyz says no. A proxy is ready while it can reach a broker.",
            "count(rocketmq_ready{HERE} == 0) or vector(0)",
            look=Look.NUMBER,
            warns_at=1,
        ),
        panel(
            "Alerts firing",
            "Alerts of Tidemill that are firing now.",
            'count(ALERTS{alertstate="firing", service="tidemill"}) or vector(0)',
            look=Look.NUMBER,
            warns_at=1,
        ),
        panel(
            "Versions",
            "Different builds that run now: more than one only during an upgrade.",
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
            "Messages stored a second, by message type. Copies for retry and dead letters do not count.",
            Query(
                "sum by (message_type) (rate(rocketmq_messages_in_total{HERE, TOPIC}[RATE]))",
                "{{message_type}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Messages out",
            "Messages handed to consumers a second, by message type; repeated deliveries included.",
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
            "Bytes of messages stored and handed out a second.",
            Query("sum(rate(rocketmq_throughput_in_total{HERE, TOPIC}[RATE]))", "in"),
            Query("sum(rate(rocketmq_throughput_out_total{HERE, TOPIC, GROUP}[RATE]))", "out"),
            unit="Bps",
        ),
        panel(
            "Top 10 topics",
            "Topics with the most messages stored a second.",
            Query(
                "topk(10, sum by (topic) (rate(rocketmq_messages_in_total{HERE, TOPIC}[RATE])))",
                "{{topic}}",
            ),
            unit="cps",
            look=Look.BARS,
        ),
        panel(
            "Top 10 consumer groups",
            "Consumer groups that are handed the most messages a second.",
            Query(
                "topk(10, sum by (consumer_group) "
                "(rate(rocketmq_messages_out_total{HERE, TOPIC, GROUP}[RATE])))",
                "{{consumer_group}}",
            ),
            unit="cps",
            look=Look.BARS,
        ),
        panel(
            "Refused sends",
            "Part of the sends of clients that was not answered with OK (20000).",
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
            "Milliseconds of a client's SendMessage at the proxy; its messages are on the disk then.",
            *quantiles(
                "rocketmq_rpc_latency", 'HERE, node_type="proxy", request_code="send_message"'
            ),
            unit="ms",
        ),
        panel(
            "Receive: time parked",
            "Seconds that receives which may wait took, by how they ended; an empty one waits its full time.",
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
            "Seconds from when a message became ready to when it was handed to a consumer. It grows with a "
            "backlog.",
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
            "Milliseconds of a client's AckMessage at the proxy.",
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
            "Messages that a poll would return now, of all consumer groups.",
            "sum(rocketmq_consumer_ready_messages{HERE, TOPIC, GROUP})",
            look=Look.NUMBER,
        ),
        panel(
            "In flight",
            "Messages that consumers hold: delivered, and neither acked nor expired.",
            "sum(rocketmq_consumer_inflight_messages{HERE, TOPIC, GROUP})",
            look=Look.NUMBER,
        ),
        panel(
            "Delayed",
            "Messages that wait for their time.",
            "sum(rocketmq_timing_messages{HERE, TOPIC})",
            look=Look.NUMBER,
        ),
        panel(
            "Dead letters an hour",
            "Messages that were given up in the last hour, and wait in a dead-letter topic.",
            "sum(increase(rocketmq_send_to_dlq_messages_total{HERE, TOPIC, GROUP}[1h]))",
            look=Look.NUMBER,
            alerts=("DlqGrowing",),
            warns_at=1,
        ),
        panel(
            "Oldest lag, worst 10",
            "How long the oldest message waits that is not acked, by topic and consumer group.",
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
    "Promises kept",
    (
        panel(
            "Early deliveries",
            "Delayed messages found due too early in the last hour, and held back. More than 0 is a defect.",
            "sum(increase(rocketmq_timer_early_total{HERE}[1h]))",
            look=Look.NUMBER,
            alerts=("TimerEarly",),
            fails_at=1,
        ),
        panel(
            "Late by more than 1 s",
            "Part of the delayed messages of the last hour that was late by more than a second.",
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
            "Part of the receives that was answered empty although a broker had had a message for them.",
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
            "Delivered again",
            "Part of the deliveries of the last 15 minutes that repeated one.",
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
    description="Is anything wrong, how much goes through, and does Tidemill keep its promises?",
    rows=(_HEALTH, _TRAFFIC, _LATENCY, _BACKLOG, _PROMISES),
    has_topics=True,
    has_groups=True,
)
