"""Pipeline: whether the jobs on Spark run, how much they read, and what an audit found."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, panel, quantiles

_JOBS = Row(
    "Jobs",
    (
        panel(
            "Rows",
            "Rows a second, by job.",
            Query("sum by (work) (rate(rocketmq_pipeline_rows_total{HERE}[RATE]))", "{{work}}"),
            unit="rowsps",
            look=Look.STACKED,
        ),
        panel(
            "Batch duration",
            "Seconds of a batch.",
            *quantiles("rocketmq_pipeline_batch_seconds"),
            unit="s",
        ),
        panel(
            "Rows that wait",
            "Rows that are there and not read yet, by job and topic; `*` is all topics of a job.",
            Query(
                "sum by (work, topic) (rocketmq_pipeline_lag_messages{HERE})", "{{work}} {{topic}}"
            ),
        ),
        panel(
            "Logs that wait",
            "Bytes of a log that a stream of events has not read yet, by job and broker group.",
            Query(
                "sum by (work, broker) (rocketmq_pipeline_lag_bytes{HERE})", "{{work}} {{broker}}"
            ),
            unit="bytes",
        ),
        panel(
            "Archive behind",
            "Seconds from the last archived message to now, while some wait.",
            Query("max by (work) (rocketmq_pipeline_archive_lag_seconds{HERE})", "{{work}}"),
            unit="s",
        ),
        panel(
            "Since the last success",
            "Seconds since a job ended well, or a batch of one that goes on.",
            Query(
                "time() - max by (work) (rocketmq_pipeline_success_timestamp_seconds{HERE})",
                "{{work}}",
            ),
            unit="s",
        ),
    ),
)

_AUDIT = Row(
    "Audit",
    (
        panel(
            "Findings of the last audit",
            "Messages that were missing, early, late, delivered twice or again, by topic.",
            Query("max by (topic, kind) (rocketmq_audit_findings{HERE})", "{{topic}} {{kind}}"),
            look=Look.BARS,
        ),
        panel(
            "Missing, unexpected or early",
            "What must be 0: messages that were lost, or came before they were due or when recalled.",
            'sum(rocketmq_audit_findings{HERE, kind=~"missing|unexpected|early"}) or vector(0)',
            look=Look.NUMBER,
            warns_at=1,
        ),
    ),
)

PAGE: Final = Page(
    name="pipeline",
    title="Tidemill / Pipeline",
    description="Whether the jobs on Spark run, how much they read, and what an audit found.",
    rows=(_JOBS, _AUDIT),
)
