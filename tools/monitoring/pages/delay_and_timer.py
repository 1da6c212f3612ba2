"""Delay and timer: punctuality of delayed messages, and the messages that become due next."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, heatmap, panel, quantiles

_PUNCTUALITY = Row(
    "Punctuality",
    (
        panel(
            "Lateness",
            "Seconds from the due time of a delayed message to the time when consumers could receive it.",
            heatmap("rocketmq_timer_lateness_seconds", "HERE, TOPIC"),
            unit="s",
            look=Look.HEATMAP,
            alerts=("TimerLate",),
        ),
        panel(
            "Lateness, quantiles",
            "Quantiles of the lateness over all selected topics. P100 is the upper edge of the highest bucket.",
            *quantiles("rocketmq_timer_lateness_seconds", "HERE, TOPIC", of=(0.5, 0.99, 0.999, 1)),
            unit="s",
            alerts=("TimerLate",),
        ),
        panel(
            "Early",
            "Messages that the last check before delivery found too early and held back. Each one is a defect.",
            "sum(increase(rocketmq_timer_early_total{HERE}[RATE]))",
            alerts=("TimerEarly",),
        ),
        panel(
            "Requested delay",
            "Delay in seconds that producers asked for.",
            heatmap("rocketmq_delay_message_latency", "HERE, TOPIC"),
            unit="s",
            look=Look.HEATMAP,
        ),
        panel(
            "Clock",
            "Size in seconds of the last step of the wall clock, and 1 while the broker holds back deliveries because of it.",
            Query("max by (node_id) (rocketmq_timer_clock_step_seconds{HERE})", "step {{node_id}}"),
            Query("max by (node_id) (rocketmq_timer_clock_hold{HERE})", "held {{node_id}}"),
        ),
        panel(
            "Clients with a wrong clock",
            "Delayed sends per second from clients whose clock differs by more than two seconds.",
            "sum(rate(rocketmq_timer_client_skew_total{HERE}[RATE]))",
            unit="cps",
        ),
    ),
)

_COMING = Row(
    "Pending messages",
    (
        panel(
            "Waiting",
            "Pending delayed messages, by topic.",
            Query("sum by (topic) (rocketmq_timing_messages{HERE, TOPIC})", "{{topic}}"),
            look=Look.STACKED,
        ),
        panel(
            "Due within",
            "Messages that become due between the previous edge and this edge, in seconds from now.",
            Query(
                "sort(sum by (timer_bound_s) (rocketmq_timer_message_snapshot{HERE}))",
                "{{timer_bound_s}} s",
            ),
            look=Look.BARS,
        ),
        panel(
            "Fullest second ahead",
            "Messages in the fullest second of the next minute, five minutes and hour.",
            Query(
                "sum by (window_s) (rocketmq_timer_due_peak_messages{HERE})",
                "within {{window_s}} s",
            ),
            alerts=("TimerSpikeAhead",),
        ),
        panel(
            "Scheduled and delivered",
            "Delayed messages that were stored and that were delivered, per second.",
            Query("sum(rate(rocketmq_timer_enqueue_total{HERE, TOPIC}[RATE]))", "scheduled"),
            Query("sum(rate(rocketmq_timer_dequeue_total{HERE, TOPIC}[RATE]))", "delivered"),
            unit="cps",
        ),
        panel(
            "Behind",
            "Messages that are due but not delivered, or not on the timer wheel yet.",
            Query("sum(rocketmq_timer_dequeue_lag{HERE})", "due, not delivered"),
            Query("sum(rocketmq_timer_enqueue_lag{HERE})", "not on the wheel"),
            alerts=("TimerStuck",),
        ),
        panel(
            "Behind, in time",
            "Age of the oldest message that is due but not delivered, or not on the timer wheel yet.",
            Query("max(rocketmq_timer_dequeue_latency{HERE})", "due, not delivered"),
            Query("max(rocketmq_timer_enqueue_latency{HERE})", "not on the wheel"),
            unit="ms",
            alerts=("TimerStuck",),
        ),
    ),
)

_COMMANDS = Row(
    "Recalls, new due times, rejections, losses",
    (
        panel(
            "Recalls",
            "Recalls by producers and cancellations by operators per second, by result.",
            Query("sum by (result) (rate(rocketmq_timer_recall_total{HERE}[RATE]))", "{{result}}"),
            unit="cps",
        ),
        panel(
            "Rescheduled",
            "Changes of the due time per second, immediate deliveries included, by result.",
            Query(
                "sum by (result) (rate(rocketmq_timer_reschedule_total{HERE}[RATE]))", "{{result}}"
            ),
            unit="cps",
        ),
        panel(
            "Rejected",
            "Rejected delayed sends per second. Reasons: the second is full, a backlog, or a due time that is too far ahead.",
            Query(
                "sum by (reason) (rate(rocketmq_timer_flow_control_total{HERE}[RATE]))",
                "{{reason}}",
            ),
            unit="cps",
        ),
        panel(
            "Spread",
            "Messages per second that were delivered later than requested, within the allowed spread, to flatten a peak.",
            "sum(rate(rocketmq_timer_shaped_total{HERE}[RATE]))",
            unit="cps",
        ),
        panel(
            "Dead letters",
            "Delayed messages that became dead letters in the last hour, by reason.",
            Query(
                "sum by (reason) (increase(rocketmq_timer_dropped_total{HERE}[1h]))", "{{reason}}"
            ),
        ),
        panel(
            "Evacuated, quarantined, corrected",
            "Last hour: messages that were copied forward before their segment was removed, and corrections of the daily recount, which must stay 0. Now: messages that are quarantined because their record is damaged.",
            Query("sum(increase(rocketmq_timer_evacuated_total{HERE}[1h]))", "evacuated"),
            Query("sum(rocketmq_timer_quarantined_messages{HERE})", "quarantined"),
            Query("sum(increase(rocketmq_timer_audit_drift_total{HERE}[1h]))", "corrected"),
        ),
    ),
)

_FILES = Row(
    "Files",
    (
        panel(
            "Log kept for delayed messages",
            "Bytes of the log that are kept only for pending delayed messages.",
            Query("sum by (node_id) (rocketmq_timer_pinned_bytes{HERE})", "{{node_id}}"),
            unit="bytes",
        ),
        panel(
            "Timer files",
            "Bytes of timer log, timer wheel and state table, and the number of slots that have messages.",
            Query("sum(rocketmq_timer_index_bytes{HERE})", "bytes"),
            Query("sum(rocketmq_timer_wheel_slots_used{HERE})", "slots in use"),
        ),
        panel(
            "Checkpoint age",
            "Age of the newest timer checkpoint. A start reads the log from this checkpoint on.",
            Query("max by (node_id) (rocketmq_timer_checkpoint_age_seconds{HERE})", "{{node_id}}"),
            unit="s",
        ),
        panel(
            "Last recovery",
            "Duration of the last start in seconds.",
            Query("max by (node_id) (rocketmq_timer_recover_seconds{HERE})", "{{node_id}}"),
            unit="s",
        ),
    ),
)

_TRANSACTIONS = Row(
    "Transactions",
    (
        panel(
            "Half messages",
            "Half messages that are neither committed nor rolled back, by topic.",
            Query("sum by (topic) (rocketmq_half_messages{HERE, TOPIC})", "{{topic}}"),
            look=Look.STACKED,
        ),
        panel(
            "Oldest half message",
            "Age of the oldest half message without a decision, by topic.",
            Query(
                "max by (topic) (rocketmq_transaction_oldest_open_seconds{HERE, TOPIC})",
                "{{topic}}",
            ),
            unit="s",
        ),
        panel(
            "Without a producer",
            "Half messages with a due check and without a connected producer of their topic.",
            Query(
                "sum by (topic) (rocketmq_transaction_waiting_messages{HERE, TOPIC})", "{{topic}}"
            ),
            alerts=("TransactionsWithoutProducer",),
        ),
        panel(
            "Decisions",
            "Commits and rollbacks per second, and half messages that expired without a decision or were recovered by an operator.",
            Query("sum(rate(rocketmq_commit_messages_total{HERE, TOPIC}[RATE]))", "committed"),
            Query("sum(rate(rocketmq_rollback_messages_total{HERE, TOPIC}[RATE]))", "rolled back"),
            Query("sum(rate(rocketmq_transaction_expired_total{HERE, TOPIC}[RATE]))", "expired"),
            Query(
                "sum(rate(rocketmq_transaction_recovered_total{HERE, TOPIC}[RATE]))", "recovered"
            ),
            unit="cps",
        ),
        panel(
            "Time to the decision",
            "Quantiles of the seconds from a half message to its commit, rollback or expiry.",
            *quantiles("rocketmq_finish_message_latency", "HERE, TOPIC", of=(0.5, 0.99)),
            unit="s",
        ),
        panel(
            "Checks",
            "Checks per second by result. Only written checks count as attempts. Results that were forgotten before their time make repeated decisions fail.",
            Query(
                "sum by (result) (rate(rocketmq_transaction_checks_total{HERE, TOPIC}[RATE]))",
                "{{result}}",
            ),
            Query(
                "sum(rate(rocketmq_transaction_forgotten_outcomes_total{HERE}[RATE]))",
                "forgotten results",
            ),
            unit="cps",
        ),
    ),
)

PAGE: Final = Page(
    name="delay-and-timer",
    title="Tidemill / Delay and timer",
    description="Punctuality of delayed messages, pending messages, the load ahead, and transactions.",
    rows=(_PUNCTUALITY, _COMING, _COMMANDS, _FILES, _TRANSACTIONS),
    has_topics=True,
)
