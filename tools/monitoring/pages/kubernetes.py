"""Kubernetes: the pods, claims and autoscalers that Tidemill runs in.

Its metrics come from kube-state-metrics, kubelet and cAdvisor, so it is empty on a laptop.
"""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, panel

# Pods of a release are told by the name that the chart gives them.
_PODS = 'namespace=~"$namespace",pod=~".*tidemill.*"'
_OURS = 'namespace=~"$namespace"'

_POD_ROW = Row(
    "Pods",
    (
        panel(
            "Restarts",
            "Restarts of containers in the last hour.",
            Query(
                f"sum by (pod) (increase(kube_pod_container_status_restarts_total{{{_PODS}}}[1h]))",
                "{{pod}}",
            ),
        ),
        panel(
            "Killed for memory",
            "Containers whose last end was an OOM kill.",
            Query(
                "sum by (pod) (kube_pod_container_status_last_terminated_reason"
                f'{{{_PODS},reason="OOMKilled"}}) or vector(0)',
                "{{pod}}",
            ),
        ),
        panel(
            "Probes that fail",
            "Failed probes a second, by kind.",
            Query(
                f'sum by (pod, probe_type) (rate(prober_probe_total{{{_PODS},result="failed"}}[RATE]))',
                "{{pod}} {{probe_type}}",
            ),
            unit="cps",
        ),
        panel(
            "CPU against its limit",
            "Part of the time that a container was throttled.",
            Query(
                f"sum by (pod) (rate(container_cpu_cfs_throttled_periods_total{{{_PODS}}}[RATE])) / "
                f"sum by (pod) (rate(container_cpu_cfs_periods_total{{{_PODS}}}[RATE]))",
                "{{pod}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Major page faults",
            "Pages a second that had to be read from the disk: a broker whose consumers are far behind.",
            Query(
                "sum by (pod) (rate(container_memory_failures_total"
                f'{{{_PODS},failure_type="pgmajfault",scope="container"}}[RATE]))',
                "{{pod}}",
            ),
            unit="cps",
        ),
        panel(
            "Disk",
            "Bytes that containers write and read a second.",
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
            "Used part of each volume claim.",
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
            "Pods that a drain of a node may take at once: 0 blocks it.",
            Query(
                "kube_poddisruptionbudget_status_pod_disruptions_allowed"
                f'{{{_OURS},poddisruptionbudget=~".*tidemill.*"}}',
                "{{poddisruptionbudget}}",
            ),
        ),
        panel(
            "Autoscalers",
            "Replicas that autoscalers want, and that there are.",
            Query(
                "kube_horizontalpodautoscaler_status_desired_replicas"
                f'{{{_OURS},horizontalpodautoscaler=~".*tidemill.*"}}',
                "wanted {{horizontalpodautoscaler}}",
            ),
            Query(
                "kube_horizontalpodautoscaler_status_current_replicas"
                f'{{{_OURS},horizontalpodautoscaler=~".*tidemill.*"}}',
                "there {{horizontalpodautoscaler}}",
            ),
        ),
        panel(
            "What autoscalers follow",
            "Messages that are ready and that are due within five minutes, of all groups: what consumers would "
            "be scaled by.",
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
    description="The pods, claims, budgets and autoscalers that Tidemill runs in.",
    rows=(_POD_ROW, _CLUSTER_ROW),
    needs=("kube_", "kubelet_", "container_", "prober_"),
)
