"""Metrics of a job, on a port or in a file.

A long-running job serves `/metrics`. A short job ends before a scrape, so it writes a file in
Prometheus' text format for the textfile collector of the node exporter.
"""

from __future__ import annotations

import signal
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.common.clock import SystemClock
from tidemill.common.histogram import Histogram
from tidemill.common.metrics import histogram_family
from tidemill_pipeline.errors import BadOption

if TYPE_CHECKING:
    from prometheus_client.core import Metric

MS_PER_S: Final = 1_000


@final
@dataclass(slots=True, eq=False)
class PipelineMetrics:
    """Metrics of one job. Topics are those that it reads."""

    work: str  # name of the job; Prometheus uses the label `job` itself
    cluster: str = ""
    rows: Counter[str] = field(default_factory=Counter)  # by topic
    batches_ms: Histogram[str] = field(default_factory=Histogram)  # by work
    waiting: dict[str, int] = field(default_factory=dict)  # unread rows by topic
    waiting_bytes: dict[str, int] = field(default_factory=dict)  # of logs, by broker group
    stored_to_ms: int | None = None  # store time of the last archived message; 0: none
    succeeded_at_ms: int = 0
    findings: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by topic and kind

    def archived_to(self, stored_to_ms: int, *, waiting: int) -> None:
        """Record the store time of the last archived message and the number of unread ones."""
        self.stored_to_ms = stored_to_ms
        self.waiting["*"] = waiting

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with the labels that all processes share."""
        for metric in self._families():
            metric.samples = [
                sample._replace(labels={**self._common, **sample.labels})
                for sample in metric.samples
            ]
            yield metric

    @property
    def _common(self) -> dict[str, str]:
        return {"cluster": self.cluster, "node_type": "pipeline", "node_id": socket.gethostname()}

    def _families(self) -> Iterator[Metric]:
        rows = CounterMetricFamily(
            "rocketmq_pipeline_rows_total",
            "Rows that a job has read or sent.",
            labels=("work", "topic"),
        )
        for topic, count in self.rows.items():
            rows.add_metric((self.work, topic), count)
        yield rows
        yield histogram_family(
            "rocketmq_pipeline_batch_seconds",
            "Seconds of a batch.",
            ("work",),
            self.batches_ms,
            lambda work: (work,),
            divisor=MS_PER_S,
        )
        waiting = GaugeMetricFamily(
            "rocketmq_pipeline_lag_messages",
            "Rows that are there and not read yet.",
            labels=("work", "topic"),
        )
        for topic, count in self.waiting.items():
            waiting.add_metric((self.work, topic), count)
        yield waiting
        waiting_bytes = GaugeMetricFamily(
            "rocketmq_pipeline_lag_bytes",
            "Bytes of a broker group's log that a stream of events has not read yet.",
            labels=("work", "broker"),
        )
        for broker, count in self.waiting_bytes.items():
            waiting_bytes.add_metric((self.work, broker), count)
        yield waiting_bytes
        behind = GaugeMetricFamily(
            "rocketmq_pipeline_archive_lag_seconds",
            "Seconds from the last archived message to now, while some wait; 0 when none do.",
            labels=("work",),
        )
        if self.stored_to_ms is not None:
            is_behind = self.stored_to_ms and any(self.waiting.values())
            behind_ms = max(0, SystemClock().wall_ms() - self.stored_to_ms) if is_behind else 0
            behind.add_metric((self.work,), behind_ms / MS_PER_S)
        yield behind
        succeeded = GaugeMetricFamily(
            "rocketmq_pipeline_success_timestamp_seconds",
            "When a job ended well last, or a batch of one that goes on; seconds since 1970.",
            labels=("work",),
        )
        if self.succeeded_at_ms:
            succeeded.add_metric((self.work,), self.succeeded_at_ms / MS_PER_S)
        yield succeeded
        findings = GaugeMetricFamily(
            "rocketmq_audit_findings",
            "Messages that the last audit found, by kind.",
            labels=("topic", "kind"),
        )
        for (topic, kind), count in self.findings.items():
            findings.add_metric((topic, kind), count)
        yield findings

    def registry(self) -> prometheus_client.CollectorRegistry:
        """Return a registry with these metrics."""
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def write(self, path: str) -> None:
        """Write the metrics to a file atomically."""
        draft = Path(f"{path}.draft")
        draft.write_bytes(prometheus_client.generate_latest(self.registry()))
        draft.replace(path)


def serve(metrics: PipelineMetrics, port: int) -> None:
    """Serve `/metrics` until the process ends; port 0: do not serve. Raises BadOption."""
    if port:
        # The server's threads must not receive signals that the main thread blocks at times.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            prometheus_client.start_http_server(port, registry=metrics.registry())
        except OSError as error:
            raise BadOption(f"metrics cannot be served on port {port}: {error.strerror}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
