"""Metrics of a replica: role, epoch, confirm offset and lags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from tidemill.broker.engine.replica.replica_engine import ReplicaEngine
    from tidemill.broker.server.replicas.replica_shell import ReplicaShell
    from tidemill.common.metrics import Registry

LABELS = ("broker_group",)
MS_PER_S = 1_000


@final
class ReplicaMetrics:
    """Metrics of a replica and its broker group."""

    def __init__(
        self,
        registry: Registry,
        broker_group: str,
        replica_engine: ReplicaEngine,
        replicas: ReplicaShell,
    ) -> None:
        self._labels = (broker_group,)
        self._replica_engine = replica_engine
        self._replicas = replicas
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        log, replicas = self._replica_engine, self._replicas
        view = replicas.view
        for name, help_, value in (
            ("role", "1 master, 0 replica.", int(replicas.is_master)),
            ("epoch", "The highest epoch that this replica knows.", log.epoch_seen),
            (
                "confirm_offset",
                "Log offset up to which the sync state set has the log, as known here.",
                log.confirm_offset,
            ),
            ("max_offset", "End of the log here.", log.log_end),
            (
                "in_sync_replicas",
                "Members of the sync state set, as known here; 0: unknown.",
                0 if view is None else len(view.sss),
            ),
        ):
            gauge = GaugeMetricFamily(f"rocketmq_ha_{name}", help_, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        yield from self._collect_lag()
        sent = CounterMetricFamily(
            "rocketmq_ha_sent_bytes_total", "Bytes of the log sent to replicas.", labels=LABELS
        )
        sent.add_metric(self._labels, replicas.sent_bytes)
        yield sent
        received = CounterMetricFamily(
            "rocketmq_ha_received_bytes_total",
            "Bytes of the log received from a master.",
            labels=LABELS,
        )
        received.add_metric(self._labels, replicas.received_bytes)
        yield received

    def _collect_lag(self) -> Iterator[Metric]:
        """Yield the lag of each replica, as its master measures it."""
        behind = GaugeMetricFamily(
            "rocketmq_ha_replica_behind_bytes",
            "Bytes of the master's log that a replica has not acknowledged.",
            labels=("replica",),
        )
        silent = GaugeMetricFamily(
            "rocketmq_ha_replica_behind_seconds",
            "Seconds since a replica had acknowledged the whole log, checked every second.",
            labels=("replica",),
        )
        for replica_id, lag in self._replicas.lags().items():
            behind.add_metric((str(replica_id),), lag.behind_bytes)
            silent.add_metric((str(replica_id),), lag.behind_ms / MS_PER_S)
        yield behind
        yield silent
