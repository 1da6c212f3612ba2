"""Delay and timer: whether delayed messages are on time, and what is coming."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, heatmap, panel, quantiles

_PUNCTUALITY = Row(
    "Punctuality",
    (
        panel(
            "Lateness",
            "Seconds from its due time to when a delayed message was there for its consumers.",
            heatmap("rocketmq_timer_lateness_seconds", "HERE, TOPIC"),
            unit="s",
            look=Look.HEATMAP,
            alerts=("TimerLate",),
        ),
        panel(
            "Lateness, quantiles",
            "The same, as quantiles over all topics that were chosen; P100 is the worst bucket's edge.",
            *quantiles("rocketmq_timer_lateness_seconds", "HERE, TOPIC", of=(0.5, 0.99, 0.999, 1)),
            unit="s",
            alerts=("TimerLate",),
        ),
        panel(
            "Early",
            "Messages found due too early at the last check before delivery, and held back: a defect.",
            "sum(increase(rocketmq_timer_early_total{HERE}[RATE]))",
            alerts=("TimerEarly",),
        ),
        panel(
            "Requested delay",
            "Seconds of delay that producers asked for.",
            heatmap("rocketmq_delay_message_latency", "HERE, TOPIC"),
            unit="s",
            look=Look.HEATMAP,
        ),
        panel(
            "Clock",
            "Seconds of the last step of the wall clock, and 1 while deliveries are held back because of it.",
            Query("max by (node_id) (rocketmq_timer_clock_step_seconds{HERE})", "step {{node_id}}"),
            Query("max by (node_id) (rocketmq_timer_clock_hold{HERE})", "held {{node_id}}"),
        ),
        panel(
            "Clients with a wrong clock",
            "Delayed sends a second whose client's clock was off by more than two seconds.",
            "sum(rate(rocketmq_timer_client_skew_total{HERE}[RATE]))",
            unit="cps",
        ),
    ),
)

_COMING = Row(
    "What waits, and what comes",
    (
        panel(
            "Waiting",
            "Delayed messages that wait for their time, by topic.",
            Query("sum by (topic) (rocketmq_timing_messages{HERE, TOPIC})", "{{topic}}"),
            look=Look.STACKED,
        ),
        panel(
            "Due within",
            "Messages that are due between the edge below and this one, in seconds from now.",
            Query(
                "sort(sum by (timer_bound_s) (rocketmq_timer_message_snapshot{HERE}))",
                "{{timer_bound_s}} s",
            ),
            look=Look.BARS,
        ),
        panel(
            "Fullest second ahead",
            "Messages due in the fullest second of the coming minute, five minutes and hour.",
            Query(
                "sum by (window_s) (rocketmq_timer_due_peak_messages{HERE})",
                "within {{window_s}} s",
            ),
            alerts=("TimerSpikeAhead",),
        ),
        panel(
            "Scheduled and delivered",
            "Delayed messages that came in, and that were delivered, a second.",
            Query("sum(rate(rocketmq_timer_enqueue_total{HERE, TOPIC}[RATE]))", "scheduled"),
            Query("sum(rate(rocketmq_timer_dequeue_total{HERE, TOPIC}[RATE]))", "delivered"),
            unit="cps",
        ),
        panel(
            "Behind",
            "Messages that are due and not delivered, or not on the wheel yet.",
            Query("sum(rocketmq_timer_dequeue_lag{HERE})", "due, not delivered"),
            Query("sum(rocketmq_timer_enqueue_lag{HERE})", "not on the wheel"),
            alerts=("TimerStuck",),
        ),
        panel(
            "Behind, in time",
            "How long the oldest message waits that is due and not delivered, or not on the wheel yet.",
            Query("max(rocketmq_timer_dequeue_latency{HERE})", "due, not delivered"),
            Query("max(rocketmq_timer_enqueue_latency{HERE})", "not on the wheel"),
            unit="ms",
            alerts=("TimerStuck",),
        ),
    ),
)

_COMMANDS = Row(
    "Recalls, moves, refusals, losses",
    (
        panel(
            "Recalls",
            "Recalls of producers and cancellations of operators a second, by what they found.",
            Query("sum by (result) (rate(rocketmq_timer_recall_total{HERE}[RATE]))", "{{result}}"),
            unit="cps",
        ),
        panel(
            "Moves",
            "Changes of the due time a second, deliveries at once among them, by what they found.",
            Query(
                "sum by (result) (rate(rocketmq_timer_reschedule_total{HERE}[RATE]))", "{{result}}"
            ),
            unit="cps",
        ),
        panel(
            "Refused",
            "Delayed sends that were refused a second: a second that is full, a backlog, or too far ahead.",
            Query(
                "sum by (reason) (rate(rocketmq_timer_flow_control_total{HERE}[RATE]))",
                "{{reason}}",
            ),
            unit="cps",
        ),
        panel(
            "Spread",
            "Messages a second that were delivered later than asked, within what was allowed, to even out a "
            "spike.",
            "sum(rate(rocketmq_timer_shaped_total{HERE}[RATE]))",
            unit="cps",
        ),
        panel(
            "Given up",
            "Delayed messages that became dead letters in the last hour, by reason.",
            Query(
                "sum by (reason) (increase(rocketmq_timer_dropped_total{HERE}[1h]))", "{{reason}}"
            ),
        ),
        panel(
            "Evacuated, set aside, corrected",
            "Of the last hour: messages copied forward before their log was dropped, and corrections of the "
            "daily recount, which must stay 0. Now: messages set aside because their record is damaged.",
            Query("sum(increase(rocketmq_timer_evacuated_total{HERE}[1h]))", "evacuated"),
            Query("sum(rocketmq_timer_quarantined_messages{HERE})", "set aside"),
            Query("sum(increase(rocketmq_timer_audit_drift_total{HERE}[1h]))", "corrected"),
        ),
    ),
)

_FILES = Row(
    "Files",
    (
        panel(
            "Log kept for delayed messages",
            "Bytes of the log that stay only because messages in them wait for their time.",
            Query("sum by (node_id) (rocketmq_timer_pinned_bytes{HERE})", "{{node_id}}"),
            unit="bytes",
        ),
        panel(
            "Timer files",
            "Bytes of timer log, wheel and state table, and seconds of the wheel that have messages.",
            Query("sum(rocketmq_timer_index_bytes{HERE})", "bytes"),
            Query("sum(rocketmq_timer_wheel_slots_used{HERE})", "seconds in use"),
        ),
        panel(
            "Checkpoint age",
            "Age of the newest checkpoint of the timers: how much log a start reads again.",
            Query("max by (node_id) (rocketmq_timer_checkpoint_age_seconds{HERE})", "{{node_id}}"),
            unit="s",
        ),
        panel(
            "Last recovery",
            "Seconds that the last start took.",
            Query("max by (node_id) (rocketmq_timer_recover_seconds{HERE})", "{{node_id}}"),
            unit="s",
        ),
    ),
)

PAGE: Final = Page(
    name="delay-and-timer",
    title="Tidemill / Delay and timer",
    description="Are delayed messages on time, what waits, and what is coming?",
    rows=(_PUNCTUALITY, _COMING, _COMMANDS, _FILES),
    has_topics=True,
)
