"""Pop and long polling: waiting receives, their cost, and the results of deliveries."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, heatmap, panel, quantiles, ratio

_PARKED = 'sum(rate(rocketmq_proxy_receive_total{HERE, TOPIC, GROUP, outcome=~"notified|timeout_empty"}[RATE]))'
_RECEIVES = "sum(rate(rocketmq_proxy_receive_total{HERE, TOPIC, GROUP}[RATE]))"

_RECEIVING = Row(
    "Receives",
    (
        panel(
            "Receives by result",
            "first_pop: the first pop found a message. notified: a broker had a message later. timeout_empty: no message arrived.",
            Query(
                "sum by (outcome) (rate(rocketmq_proxy_receive_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{outcome}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Short-poll hit ratio",
            "Share of receives whose first pop found a message. Near 1: a backlog. Near 0: consumers wait for messages.",
            ratio(
                "sum(rate(rocketmq_proxy_short_polling_hit_total{HERE, TOPIC, GROUP}[RATE]))",
                _RECEIVES,
            ),
            unit="percentunit",
        ),
        panel(
            "Long polls started",
            "Receives per second that may wait, by mode.",
            Query(
                "sum by (polling_mode) "
                "(rate(rocketmq_proxy_long_polling_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{polling_mode}}",
            ),
            unit="cps",
        ),
        panel(
            "Parked receives",
            "Receives that wait now, by mode.",
            Query(
                "sum by (polling_mode) (rocketmq_proxy_long_polling_inflight{HERE})",
                "{{polling_mode}}",
            ),
        ),
        panel(
            "Time parked",
            "Seconds from the start of a receive that may wait to its end.",
            heatmap("rocketmq_proxy_long_polling_wait_seconds"),
            unit="s",
            look=Look.HEATMAP,
        ),
        panel(
            "False empties",
            "Empty receives per second although a hint from a broker had waited for more than 200 ms. It must stay 0.",
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
            "Notification requests to brokers per second, as brokers count them, and the number of positive replies.",
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
            "Cost of a waiting consumer: about one notification per broker group and poll.",
            ratio(
                "sum(rate(rocketmq_proxy_notification_total{HERE, TOPIC, GROUP}[RATE]))", _PARKED
            ),
        ),
        panel(
            "Notify miss ratio",
            "Share of pops after a hint that found no message because another consumer was faster.",
            ratio(
                'sum(rate(rocketmq_proxy_notified_pop_total{HERE, TOPIC, GROUP, outcome="miss"}[RATE]))',
                "sum(rate(rocketmq_proxy_notified_pop_total{HERE, TOPIC, GROUP}[RATE]))",
            ),
            unit="percentunit",
        ),
        panel(
            "Failed and shared hints",
            "Hints per second that a broker rejected or whose link was lost, and polls that joined a notification in progress.",
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
            "Pairs of topic and consumer group, by mode of their polls.",
            Query("sum by (mode) (rocketmq_proxy_polling_mode{HERE})", "{{mode}}"),
            look=Look.STATES,
        ),
        panel(
            "Rate that the mode follows",
            "Receives per second that decide the mode, and the switches of the mode.",
            Query("sum(rocketmq_proxy_pop_request_rate{HERE})", "receives per second"),
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
            "Pops per second that met an ordered queue with a locked batch.",
            "sum(rate(rocketmq_pop_lock_conflict_total{HERE, TOPIC, GROUP}[RATE]))",
            unit="cps",
        ),
        panel(
            "Delivery table",
            "Deliveries that are not settled, and their messages in flight.",
            Query("sum(rocketmq_pop_checkpoint_buffer_size{HERE})", "deliveries"),
            Query("sum(rocketmq_pop_offset_buffer_size{HERE})", "messages"),
        ),
        panel(
            "Revive: time per round",
            "Milliseconds of a round that makes expired messages available again.",
            *quantiles("rocketmq_pop_buffer_scan_time_consume", of=(0.99,)),
            unit="ms",
        ),
        panel(
            "Revive: behind",
            "Deliveries that are due but not revived, by revive queue.",
            Query("sum by (queue_id) (rocketmq_pop_revive_lag{HERE})", "{{queue_id}}"),
            look=Look.STACKED,
            alerts=("ReviveLag",),
        ),
        panel(
            "Revive: late",
            "Lateness of the oldest due delivery, by revive queue.",
            Query("max by (queue_id) (rocketmq_pop_revive_latency{HERE})", "{{queue_id}}"),
            unit="ms",
            alerts=("ReviveLag",),
        ),
        panel(
            "Records of deliveries and acks",
            "CK and ACK entries written per second.",
            Query(
                "sum by (revive_message_type) "
                "(rate(rocketmq_pop_revive_in_message_total{HERE, TOPIC, GROUP}[RATE]))",
                "{{revive_message_type}}",
            ),
            unit="cps",
        ),
        panel(
            "Acks by result",
            "Acks per second. applied: settled by this ack. already: settled by an earlier ack. gone: the invisible duration had ended.",
            Query(
                "sum by (result) (rate(rocketmq_ack_total{HERE, TOPIC, GROUP}[RATE]))", "{{result}}"
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Moved to retry topics",
            "Messages per second that were not acked in time and wait for another delivery.",
            "sum(rate(rocketmq_pop_revive_retry_messages_total{HERE, TOPIC, GROUP}[RATE]))",
            unit="cps",
        ),
        panel(
            "Oldest in flight, worst 10",
            "Age of the oldest delivery in flight, by topic and consumer group.",
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
            "Deliveries per second that were extended because their client is alive, and messages that were given back because it ended or became silent.",
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
    description="Waiting receives, their cost, and the results of deliveries.",
    rows=(_RECEIVING, _NOTIFYING, _DELIVERIES),
    has_topics=True,
    has_groups=True,
)
