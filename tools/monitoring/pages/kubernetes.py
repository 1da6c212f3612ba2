"""Kubernetes: pods, volume claims and autoscalers of Tidemill.

Its metrics come from kube-state-metrics, kubelet and cAdvisor, so the page is empty on a laptop.
"""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, panel

# The chart gives the pods of a release this name.
_PODS = 'namespace=~"$namespace",pod=~".*tidemill.*"'
_OURS = 'namespace=~"$namespace"'

_POD_ROW = Row(
    "Pods",
    (
        panel(
            "Restarts",
            "Container restarts in the last hour.",
            Query(
                f"sum by (pod) (increase(kube_pod_container_status_restarts_total{{{_PODS}}}[1h]))",
                "{{pod}}",
            ),
        ),
        panel(
            "Killed for memory",
            "Containers that an OOM kill terminated last.",
            Query(
                "sum by (pod) (kube_pod_container_status_last_terminated_reason"
                f'{{{_PODS},reason="OOMKilled"}}) or vector(0)',
                "{{pod}}",
            ),
        ),
        panel(
            "Failed probes",
            "Failed probes per second, by kind.",
            Query(
                f'sum by (pod, probe_type) (rate(prober_probe_total{{{_PODS},result="failed"}}[RATE]))',
                "{{pod}} {{probe_type}}",
            ),
            unit="cps",
        ),
        panel(
            "CPU throttling",
            "Share of time that a container was throttled.",
            Query(
                f"sum by (pod) (rate(container_cpu_cfs_throttled_periods_total{{{_PODS}}}[RATE])) / "
                f"sum by (pod) (rate(container_cpu_cfs_periods_total{{{_PODS}}}[RATE]))",
                "{{pod}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Major page faults",
            "Pages per second that were read from the disk. Many page faults of a broker mean that its consumers are far behind.",
            Query(
                "sum by (pod) (rate(container_memory_failures_total"
                f'{{{_PODS},failure_type="pgmajfault",scope="container"}}[RATE]))',
                "{{pod}}",
            ),
            unit="cps",
        ),
        panel(
            "Disk",
            "Bytes per second that containers write and read.",
            Query(
                f"sum by (pod) (rate(container_fs_writes_bytes_total{{{_PODS}}}[RATE]))",
                "{{pod}} written",
            ),
            Query(
                f"sum by (pod) (rate(container_fs_reads_bytes_total{{{_PODS}}}[RATE]))",
                "{{pod}} read",
            ),
            unit="Bps",
        ),
    ),
)

_CLUSTER_ROW = Row(
    "Claims, budgets, autoscalers",
    (
        panel(
            "Claims",
            "Used share of each volume claim.",
            Query(
                "kubelet_volume_stats_used_bytes"
                f'{{{_OURS},persistentvolumeclaim=~".*tidemill.*"}} / '
                "kubelet_volume_stats_capacity_bytes"
                f'{{{_OURS},persistentvolumeclaim=~".*tidemill.*"}}',
                "{{persistentvolumeclaim}}",
            ),
            unit="percentunit",
            alerts=("DiskFull",),
        ),
        panel(
            "Disruptions allowed",
            "Pods that a node drain may evict at the same time. 0 blocks the drain.",
            Query(
                "kube_poddisruptionbudget_status_pod_disruptions_allowed"
                f'{{{_OURS},poddisruptionbudget=~".*tidemill.*"}}',
                "{{poddisruptionbudget}}",
            ),
        ),
        panel(
            "Autoscalers",
            "Desired and current replicas of the autoscalers.",
            Query(
                "kube_horizontalpodautoscaler_status_desired_replicas"
                f'{{{_OURS},horizontalpodautoscaler=~".*tidemill.*"}}',
                "desired {{horizontalpodautoscaler}}",
            ),
            Query(
                "kube_horizontalpodautoscaler_status_current_replicas"
                f'{{{_OURS},horizontalpodautoscaler=~".*tidemill.*"}}',
                "current {{horizontalpodautoscaler}}",
            ),
        ),
        panel(
            "Input of autoscalers",
            "Messages of all consumer groups that are ready, and that become due within five minutes. Autoscalers scale consumers by these values.",
            Query(
                "sum by (consumer_group) (rocketmq_consumer_ready_messages{HERE})",
                "ready {{consumer_group}}",
            ),
            Query(
                'sum(rocketmq_timer_message_snapshot{HERE, timer_bound_s=~"5|60|300"})',
                "due within 300 s",
            ),
            look=Look.LINES,
        ),
    ),
)

PAGE: Final = Page(
    name="kubernetes",
    title="Tidemill / Kubernetes",
    description="Pods, volume claims, disruption budgets and autoscalers of Tidemill.",
    rows=(_POD_ROW, _CLUSTER_ROW),
    needs=("kube_", "kubelet_", "container_", "prober_"),
)
