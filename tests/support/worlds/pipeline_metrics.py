"""The `/metrics` page of a pipeline job with each metric once, without a job."""

from __future__ import annotations

import prometheus_client

from tidemill_pipeline.metrics import PipelineMetrics


def exercised() -> str:
    """Return the text of a scrape."""
    metrics = PipelineMetrics("archive", stored_to_ms=0, succeeded_at_ms=1)
    metrics.rows["orders"] = 1
    metrics.waiting["orders"] = 0
    metrics.waiting_bytes["broker-0"] = 0
    metrics.batches_ms.observe("archive", 1)
    metrics.findings = {("orders", "missing"): 0}
    return prometheus_client.generate_latest(metrics.registry()).decode()
