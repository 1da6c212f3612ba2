"""Pipeline: progress of the jobs on Spark, and findings of the last audit."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, panel, quantiles

_JOBS = Row(
    "Jobs",
    (
        panel(
            "Rows",
            "Rows per second, by job.",
            Query("sum by (work) (rate(rocketmq_pipeline_rows_total{HERE}[RATE]))", "{{work}}"),
            unit="rowsps",
            look=Look.STACKED,
        ),
        panel(
            "Batch duration",
            "Seconds per batch.",
            *quantiles("rocketmq_pipeline_batch_seconds"),
            unit="s",
        ),
        panel(
            "Unread rows",
            "Rows that a job has not read yet, by job and topic. `*` is all topics of a job.",
            Query(
                "sum by (work, topic) (rocketmq_pipeline_lag_messages{HERE})", "{{work}} {{topic}}"
            ),
        ),
        panel(
            "Unread log",
            "Bytes of a log that a stream of events has not read yet, by job and broker group.",
            Query(
                "sum by (work, broker) (rocketmq_pipeline_lag_bytes{HERE})", "{{work}} {{broker}}"
            ),
            unit="bytes",
        ),
        panel(
            "Archive behind",
            "Seconds since the last archived message was stored, while messages wait for the archive.",
            Query("max by (work) (rocketmq_pipeline_archive_lag_seconds{HERE})", "{{work}}"),
            unit="s",
        ),
        panel(
            "Since the last success",
            "Seconds since a job, or a batch of a running job, succeeded.",
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
            "Messages that were missing, early, late, duplicated or redelivered, by topic.",
            Query("max by (topic, kind) (rocketmq_audit_findings{HERE})", "{{topic}} {{kind}}"),
            look=Look.BARS,
        ),
        panel(
            "Missing, unexpected or early",
            "These values must be 0: messages that were lost, delivered before they were due, or delivered after a recall.",
            'sum(rocketmq_audit_findings{HERE, kind=~"missing|unexpected|early"}) or vector(0)',
            look=Look.NUMBER,
            warns_at=1,
        ),
    ),
)

PAGE: Final = Page(
    name="pipeline",
    title="Tidemill / Pipeline",
    description="Progress of the jobs on Spark, and findings of the last audit.",
    rows=(_JOBS, _AUDIT),
)
