"""Broker and store: how the log is written, what the disk holds, and what the process takes."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, heatmap, panel, quantiles

_LOAD = Row(
    "Load",
    (
        panel(
            "Messages in",
            "Messages stored a second, by broker.",
            Query(
                "sum by (node_id) (rate(rocketmq_messages_in_total{HERE, TOPIC}[RATE]))",
                "{{node_id}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Messages out",
            "Messages handed out a second, by broker.",
            Query(
                "sum by (node_id) (rate(rocketmq_messages_out_total{HERE, TOPIC}[RATE]))",
                "{{node_id}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Message size",
            "Bytes of the messages that are stored.",
            heatmap("rocketmq_message_size", "HERE, TOPIC"),
            unit="bytes",
            look=Look.HEATMAP,
        ),
        panel(
            "Requests P99",
            "Milliseconds from a request's arrival at the broker to its answer, by request.",
            *quantiles(
                "rocketmq_rpc_latency",
                'HERE, node_type="broker"',
                by="request_code",
                legend="{{request_code}}",
                of=(0.99,),
            ),
            unit="ms",
        ),
        panel(
            "Waiting for the next round",
            "Frames and calls that have come in and are not begun.",
            Query(
                "sum by (node_id, processor) (rocketmq_processor_watermark{HERE})",
                "{{node_id}} {{processor}}",
            ),
        ),
        panel(
            "May be written",
            "6: the broker takes messages. 4: it only hands them out, since its disk is full.",
            Query("min by (node_id) (rocketmq_broker_permission{HERE})", "{{node_id}}"),
            look=Look.STATES,
            alerts=("DiskFull",),
        ),
    ),
)

_LOG = Row(
    "The log",
    (
        panel(
            "Append",
            "Seconds to write what a round appends.",
            *quantiles("rocketmq_storage_append_seconds"),
            unit="s",
        ),
        panel(
            "Sync",
            "Seconds until it is on the disk. Every OK waits for one.",
            *quantiles("rocketmq_storage_fsync_seconds"),
            unit="s",
        ),
        panel(
            "Behind",
            "Bytes appended and not synced, and in the log and not in the queues.",
            Query(
                "sum by (node_id) (rocketmq_storage_flush_behind_bytes{HERE})", "sync {{node_id}}"
            ),
            Query(
                "sum by (node_id) (rocketmq_storage_dispatch_behind_bytes{HERE})",
                "dispatch {{node_id}}",
            ),
            unit="bytes",
            alerts=("FlushBehind", "DispatchBehind"),
        ),
        panel(
            "Oldest message",
            "How long ago the oldest record of the log was stored, and the age at which retention removes it; it may be gone earlier, by size.",
            Query(
                "max by (node_id) (rocketmq_storage_message_reserve_time{HERE}) / 1000",
                "{{node_id}}",
            ),
            Query("max(rocketmq_storage_retention_seconds{HERE})", "kept for"),
            unit="s",
        ),
        panel(
            "Damage",
            "Damage met since the start: in the log, and in files derived from it, which are made again.",
            Query(
                "sum by (node_id, file) (rocketmq_storage_corrupt_records_total{HERE})",
                "{{node_id}} {{file}}",
            ),
            alerts=("Corruption",),
        ),
        panel(
            "Last start",
            "Seconds that the last start took, and bytes of an unfinished write that it cut from the log's end.",
            Query(
                "max by (node_id) (rocketmq_storage_recover_seconds{HERE})", "seconds {{node_id}}"
            ),
            Query(
                "max by (node_id) (rocketmq_storage_truncated_bytes_total{HERE})",
                "bytes {{node_id}}",
            ),
        ),
    ),
)

_DISK = Row(
    "The disk",
    (
        panel(
            "Used",
            "Used part of the volume. Sends are refused before it is full.",
            Query("max by (node_id) (rocketmq_storage_disk_used_ratio{HERE})", "{{node_id}}"),
            unit="percentunit",
            alerts=("DiskFull",),
        ),
        panel(
            "Used in four hours",
            "Used part of the volume in four hours, if it goes on as in the last six.",
            Query(
                "max by (node_id) "
                "(predict_linear(rocketmq_storage_disk_used_ratio{HERE}[6h], 4 * 3600))",
                "{{node_id}}",
            ),
            unit="percentunit",
            alerts=("DiskFull",),
        ),
        panel(
            "Full in",
            "Seconds until the volume is full at the last hour's rate, at most a year: retention may keep it "
            "from that.",
            Query(
                "clamp_max(min by (node_id) (rocketmq_storage_full_in_seconds{HERE}), 31536000)",
                "{{node_id}}",
            ),
            unit="s",
            alerts=("DiskFull",),
        ),
        panel(
            "Kept for an archive",
            "Brokers whose oldest segment waits for an archive to seal it; segments in the last hour that went "
            "unsealed for want of room.",
            Query("sum(rocketmq_storage_archive_gate_holding{HERE})", "wait"),
            Query(
                "sum(increase(rocketmq_storage_archive_gate_passed_total{HERE}[1h]))",
                "went unsealed",
            ),
            alerts=("ArchiveGatePassed",),
        ),
        panel(
            "Bytes",
            "Bytes used on the volume, and that can still be written.",
            Query("max by (node_id) (rocketmq_storage_size{HERE})", "used {{node_id}}"),
            Query("min by (node_id) (rocketmq_storage_free_bytes{HERE})", "free {{node_id}}"),
            unit="bytes",
        ),
        panel(
            "Largest topics",
            "Bytes of the log that the messages of a topic take.",
            Query(
                "topk(10, sum by (topic) (rocketmq_storage_topic_bytes{HERE, TOPIC}))", "{{topic}}"
            ),
            unit="bytes",
            look=Look.BARS,
        ),
    ),
)

_PROCESS = Row(
    "The process",
    (
        panel(
            "CPU",
            "Cores that a process uses.",
            Query("sum by (node_id) (rate(process_cpu_seconds_total{HERE}[RATE]))", "{{node_id}}"),
        ),
        panel(
            "Memory",
            "Resident memory. What is mapped of the log counts as long as the system keeps it.",
            Query("max by (node_id) (process_resident_memory_bytes{HERE})", "{{node_id}}"),
            unit="bytes",
        ),
        panel(
            "Open files",
            "Files and connections that a process has open.",
            Query("max by (node_id) (process_open_fds{HERE})", "{{node_id}}"),
        ),
        panel(
            "Garbage collections",
            "Collections of the oldest generation a second; each stops the process for a moment.",
            Query(
                'sum by (node_id) (rate(python_gc_collections_total{HERE, generation="2"}[RATE]))',
                "{{node_id}}",
            ),
            unit="cps",
        ),
    ),
)

PAGE: Final = Page(
    name="broker-and-store",
    title="Tidemill / Broker and store",
    description="How the log is written, what the disk holds, and what the processes take.",
    rows=(_LOAD, _LOG, _DISK, _PROCESS),
    has_topics=True,
)
