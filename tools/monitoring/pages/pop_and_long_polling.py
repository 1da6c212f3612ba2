"""Pop and long polling: how receives wait, what they cost, and what becomes of deliveries."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, heatmap, panel, quantiles, ratio

_PARKED = 'sum(rate(rocketmq_proxy_receive_total{HERE, TOPIC, GROUP, outcome=~"notified|timeout_empty"}[RATE]))'
_RECEIVES = "sum(rate(rocketmq_proxy_receive_total{HERE, TOPIC, GROUP}[RATE]))"

_RECEIVING = Row(
    "Receives",
    (
        panel(
            "Receives by how they ended",
            "first_pop: the first pop found something. notified: a broker had something later. timeout_empty: "
            "nothing came.",
            Query(
                "sum by (outcome) (rate(rocketmq_proxy_receive_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{outcome}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Short-poll hit ratio",
            "Part of the receives whose very first pop found something: near 1 with a backlog, near 0 when "
            "consumers wait for messages.",
            ratio(
                "sum(rate(rocketmq_proxy_short_polling_hit_total{HERE, TOPIC, GROUP}[RATE]))",
                _RECEIVES,
            ),
            unit="percentunit",
        ),
        panel(
            "Long polls started",
            "Receives a second that may wait, by how they do it.",
            Query(
                "sum by (polling_mode) "
                "(rate(rocketmq_proxy_long_polling_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{polling_mode}}",
            ),
            unit="cps",
        ),
        panel(
            "Parked receives",
            "Receives that wait now, by how they do it.",
            Query(
                "sum by (polling_mode) (rocketmq_proxy_long_polling_inflight{HERE})",
                "{{polling_mode}}",
            ),
        ),
        panel(
            "Time parked",
            "Seconds from a receive that may wait to its end.",
            heatmap("rocketmq_proxy_long_polling_wait_seconds"),
            unit="s",
            look=Look.HEATMAP,
        ),
        panel(
            "False empties",
            "Receives a second answered empty while a hint of a broker had waited for over 200 ms. It must "
            "stay 0.",
            "sum(rate(rocketmq_proxy_false_empty_total{HERE, TOPIC, GROUP}[RATE]))",
            unit="cps",
            alerts=("FalseEmpty",),
        ),
    ),
)

_NOTIFYING = Row(
    "Pop with notify",
    (
        panel(
            "Notify rounds",
            "Brokers asked a second whether they have something, as brokers count them, and how many said yes.",
            Query(
                "sum(rate(rocketmq_rpc_latency_count{HERE, "
                'node_type="broker", request_code="notification"}[RATE]))',
                "asked",
            ),
            Query(
                "sum(rate(rocketmq_proxy_notification_total{HERE, TOPIC, GROUP, "
                'has_message="true"}[RATE]))',
                "has a message",
            ),
            unit="cps",
        ),
        panel(
            "Notifications per parked receive",
            "What a waiting consumer costs: about one a broker group and poll.",
            ratio(
                "sum(rate(rocketmq_proxy_notification_total{HERE, TOPIC, GROUP}[RATE]))", _PARKED
            ),
        ),
        panel(
            "Notify miss ratio",
            "Part of the pops after a hint that found nothing, since somebody else was faster.",
            ratio(
                'sum(rate(rocketmq_proxy_notified_pop_total{HERE, TOPIC, GROUP, outcome="miss"}[RATE]))',
                "sum(rate(rocketmq_proxy_notified_pop_total{HERE, TOPIC, GROUP}[RATE]))",
            ),
            unit="percentunit",
        ),
        panel(
            "Failed and shared hints",
            "Hints a second that a broker refused, or whose link was lost; polls that joined one under way.",
            Query(
                "sum(rate(rocketmq_proxy_notification_failed_total{HERE, TOPIC, GROUP}[RATE]))",
                "failed",
            ),
            Query(
                "sum(rate(rocketmq_proxy_notification_coalesced_total{HERE, TOPIC, GROUP}[RATE]))",
                "shared",
            ),
            unit="cps",
        ),
        panel(
            "Adaptive mode",
            "Pairs of topic and consumer group whose polls wait in each way.",
            Query("sum by (mode) (rocketmq_proxy_polling_mode{HERE})", "{{mode}}"),
            look=Look.STATES,
        ),
        panel(
            "Rate that the mode follows",
            "Receives a second of those that the switch decides on, and its switches.",
            Query("sum(rocketmq_proxy_pop_request_rate{HERE})", "receives a second"),
            Query(
                "sum by (to) (rate(rocketmq_proxy_polling_mode_switch_total{HERE}[RATE]))",
                "switches to {{to}}",
            ),
            unit="cps",
        ),
    ),
)

_DELIVERIES = Row(
    "Deliveries",
    (
        panel(
            "Locked queues met",
            "Pops a second that found an ordered queue locked by a delivery under way.",
            "sum(rate(rocketmq_pop_lock_conflict_total{HERE, TOPIC, GROUP}[RATE]))",
            unit="cps",
        ),
        panel(
            "Delivery table",
            "Deliveries that are not settled, and messages in flight in them.",
            Query("sum(rocketmq_pop_checkpoint_buffer_size{HERE})", "deliveries"),
            Query("sum(rocketmq_pop_offset_buffer_size{HERE})", "messages"),
        ),
        panel(
            "Revive: time a round",
            "Milliseconds that a round took to make deliverable again what was not acked in time.",
            *quantiles("rocketmq_pop_buffer_scan_time_consume", of=(0.99,)),
            unit="ms",
        ),
        panel(
            "Revive: behind",
            "Deliveries that are due and not revived, by revive queue.",
            Query("sum by (queue_id) (rocketmq_pop_revive_lag{HERE})", "{{queue_id}}"),
            look=Look.STACKED,
            alerts=("ReviveLag",),
        ),
        panel(
            "Revive: late",
            "How late the oldest of them is, by revive queue.",
            Query("max by (queue_id) (rocketmq_pop_revive_latency{HERE})", "{{queue_id}}"),
            unit="ms",
            alerts=("ReviveLag",),
        ),
        panel(
            "Records of deliveries and acks",
            "CK and ACK entries written a second.",
            Query(
                "sum by (revive_message_type) "
                "(rate(rocketmq_pop_revive_in_message_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{revive_message_type}}",
            ),
            unit="cps",
        ),
        panel(
            "Acks by result",
            "Acks a second: applied, already (acked before), gone (its invisible duration had ended).",
            Query(
                "sum by (result) (rate(rocketmq_ack_total{HERE, TOPIC, GROUP}[RATE]))", "{{result}}"
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Put on retry topics",
            "Messages a second that were not acked in time, and wait for another delivery.",
            "sum(rate(rocketmq_pop_revive_retry_messages_total{HERE, TOPIC, GROUP}[RATE]))",
            unit="cps",
        ),
        panel(
            "Oldest in flight, worst 10",
            "How long the oldest message has been with a consumer, by topic and consumer group.",
            Query(
                "topk(10, max by (topic, consumer_group) "
                "(rocketmq_pop_inflight_oldest_seconds{HERE, TOPIC, GROUP}))",
                "{{consumer_group}} at {{topic}}",
            ),
            unit="s",
            look=Look.BARS,
        ),
        panel(
            "Extended and given back",
            "Deliveries a second extended because their client lives, and messages given back because it "
            "ended or fell silent.",
            Query(
                "sum(rate(rocketmq_pop_extended_deliveries_total{HERE, TOPIC, GROUP}[RATE]))",
                "extended",
            ),
            Query(
                "sum by (reason) "
                "(rate(rocketmq_pop_given_back_messages_total{HERE, TOPIC, GROUP}[RATE]))",
                "given back: {{reason}}",
            ),
            unit="cps",
        ),
    ),
)

PAGE: Final = Page(
    name="pop-and-long-polling",
    title="Tidemill / Pop and long polling",
    description="How receives wait, what that costs, and what becomes of deliveries.",
    rows=(_RECEIVING, _NOTIFYING, _DELIVERIES),
    has_topics=True,
    has_groups=True,
)
