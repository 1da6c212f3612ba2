"""The log lines and the metric of the access log of a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import structlog
from prometheus_client.core import CounterMetricFamily

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.security.access_log import AccessLog

log = structlog.get_logger()

TICK_PERIOD_S: Final = 1.0


def write_line(fields: dict[str, Any]) -> None:
    """Write a record to the log of the process."""
    log.info("audit", **fields)


def access_log_metrics(access_log: AccessLog) -> Iterator[Metric]:
    """Yield the number of refusals and accesses, those without a line of their own included."""
    records = CounterMetricFamily(
        "rocketmq_audit_log_records", "Records of the audit log.", labels=("kind",)
    )
    for kind, count in access_log.counts.items():
        records.add_metric((kind,), count)
    yield records
