"""Broker and store: writes to the log, use of the disk, and resources of the process."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, heatmap, panel, quantiles

_LOAD = Row(
    "Load",
    (
        panel(
            "Messages in",
            "Stored messages per second, by broker.",
            Query(
                "sum by (node_id) (rate(rocketmq_messages_in_total{HERE, TOPIC}[RATE]))",
                "{{node_id}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Messages out",
            "Delivered messages per second, by broker.",
            Query(
                "sum by (node_id) (rate(rocketmq_messages_out_total{HERE, TOPIC}[RATE]))",
                "{{node_id}}",
            ),
            unit="cps",
            look=Look.STACKED,
        ),
        panel(
            "Message size",
            "Bytes per stored message.",
            heatmap("rocketmq_message_size", "HERE, TOPIC"),
            unit="bytes",
            look=Look.HEATMAP,
        ),
        panel(
            "Requests P99",
            "Milliseconds from the arrival of a request at the broker to its reply, by request.",
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
            "Frames and calls that wait for the next round.",
            Query(
                "sum by (node_id, processor) (rocketmq_processor_watermark{HERE})",
                "{{node_id}} {{processor}}",
            ),
        ),
        panel(
            "Permissions",
            "6: the broker accepts messages. 4: the disk is full, and the broker only delivers.",
            Query("min by (node_id) (rocketmq_broker_permission{HERE})", "{{node_id}}"),
            look=Look.STATES,
            alerts=("DiskFull",),
        ),
    ),
)

_LOG = Row(
    "Log",
    (
        panel(
            "Append",
            "Seconds to write the records of a round.",
            *quantiles("rocketmq_storage_append_seconds"),
            unit="s",
        ),
        panel(
            "Sync",
            "Seconds to sync a round to the disk. Every OK waits for a sync.",
            *quantiles("rocketmq_storage_fsync_seconds"),
            unit="s",
        ),
        panel(
            "Behind",
            "Bytes that are appended but not synced, and bytes of the log that are not in the queues yet.",
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
            "Age of the oldest record of the log, and the age at which retention removes it. The size limit may remove it earlier.",
            Query(
                "max by (node_id) (rocketmq_storage_message_reserve_time{HERE}) / 1000",
                "{{node_id}}",
            ),
            Query("max(rocketmq_storage_retention_seconds{HERE})", "retention"),
            unit="s",
        ),
        panel(
            "Damage",
            "Damaged records of the log, and damaged derived files, since the start. The broker rebuilds derived files.",
            Query(
                "sum by (node_id, file) (rocketmq_storage_corrupt_records_total{HERE})",
                "{{node_id}} {{file}}",
            ),
            alerts=("Corruption",),
        ),
        panel(
            "Last start",
            "Duration of the last start in seconds, and bytes of an unfinished write that it cut from the end of the log.",
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
    "Disk",
    (
        panel(
            "Used",
            "Used share of the volume. The broker rejects sends before the volume is full.",
            Query("max by (node_id) (rocketmq_storage_disk_used_ratio{HERE})", "{{node_id}}"),
            unit="percentunit",
            alerts=("DiskFull",),
        ),
        panel(
            "Used in four hours",
            "Used share of the volume in four hours, at the rate of the last six hours.",
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
            "Seconds until the volume is full, at the rate of the last hour; at most one year. Retention may prevent it.",
            Query(
                "clamp_max(min by (node_id) (rocketmq_storage_full_in_seconds{HERE}), 31536000)",
                "{{node_id}}",
            ),
            unit="s",
            alerts=("DiskFull",),
        ),
        panel(
            "Kept for an archive",
            "Brokers that keep their oldest segment until an archive seals it, and segments of the last hour that retention removed unsealed because the disk was full.",
            Query("sum(rocketmq_storage_archive_gate_holding{HERE})", "waiting"),
            Query(
                "sum(increase(rocketmq_storage_archive_gate_passed_total{HERE}[1h]))",
                "removed unsealed",
            ),
            alerts=("ArchiveGatePassed",),
        ),
        panel(
            "Bytes",
            "Used and free bytes of the volume.",
            Query("max by (node_id) (rocketmq_storage_size{HERE})", "used {{node_id}}"),
            Query("min by (node_id) (rocketmq_storage_free_bytes{HERE})", "free {{node_id}}"),
            unit="bytes",
        ),
        panel(
            "Largest topics",
            "Bytes of the log that the messages of a topic occupy.",
            Query(
                "topk(10, sum by (topic) (rocketmq_storage_topic_bytes{HERE, TOPIC}))", "{{topic}}"
            ),
            unit="bytes",
            look=Look.BARS,
        ),
        panel(
            "Log and derived files",
            "Bytes of the log: messages that can still be read, dead messages, what packs keep of dead messages, other records, and pending delayed messages. Bytes of the queue and index files, which are derived from the log.",
            Query("sum by (state) (rocketmq_storage_log_bytes{HERE})", "{{state}}"),
            Query("sum by (kind) (rocketmq_storage_derived_bytes{HERE})", "derived: {{kind}}"),
            unit="bytes",
            look=Look.STACKED,
            alerts=("DiskFull",),
        ),
        panel(
            "Freed",
            "Bytes of the log that return to the disk per second: oldest segments deleted, dead messages packed, and segments without live messages emptied.",
            Query("sum by (how) (rate(rocketmq_storage_freed_bytes_total{HERE}[RATE]))", "{{how}}"),
            unit="Bps",
            look=Look.STACKED,
            alerts=("DiskFull",),
        ),
        panel(
            "State floor",
            "Age of the record at the state floor, in seconds. Before the floor, the log has only messages.",
            Query("max by (node_id) (rocketmq_storage_floor_age_seconds{HERE})", "{{node_id}}"),
            unit="s",
        ),
    ),
)

_PROCESS = Row(
    "Process",
    (
        panel(
            "CPU",
            "Cores that a process uses.",
            Query("sum by (node_id) (rate(process_cpu_seconds_total{HERE}[RATE]))", "{{node_id}}"),
        ),
        panel(
            "Memory",
            "Resident memory. Mapped parts of the log count while the system keeps them in memory.",
            Query("max by (node_id) (process_resident_memory_bytes{HERE})", "{{node_id}}"),
            unit="bytes",
        ),
        panel(
            "Open files",
            "Open files and connections of a process.",
            Query("max by (node_id) (process_open_fds{HERE})", "{{node_id}}"),
        ),
        panel(
            "Garbage collections",
            "Collections of the oldest generation per second. Each one pauses the process briefly.",
            Query(
                'sum by (node_id) (rate(python_gc_collections_total{HERE, generation="2"}[RATE]))',
                "{{node_id}}",
            ),
            unit="cps",
        ),
    ),
)

_DEDUP = Row(
    "Deduplication",
    (
        panel(
            "Dedup keys",
            "Known dedup keys, by topic.",
            Query("sum by (topic) (rocketmq_dedup_keys{HERE, TOPIC})", "{{topic}}"),
            look=Look.STACKED,
        ),
        panel(
            "Memory for dedup keys",
            "Used part of the memory for the keys of a topic, by broker. At 1 the broker rejects messages with new keys.",
            Query(
                "max by (node_id, topic) (rocketmq_dedup_memory_used_ratio{HERE, TOPIC})",
                "{{node_id}} {{topic}}",
            ),
            unit="percentunit",
            alerts=("DedupMemory",),
        ),
        panel(
            "Repeats",
            "Messages per second that repeat a dedup key, those of them with another body, and delayed messages that were replaced.",
            Query(
                "sum by (reason) (rate(rocketmq_dedup_hit_total{HERE, TOPIC}[RATE]))", "{{reason}}"
            ),
            Query("sum(rate(rocketmq_dedup_mismatch_total{HERE, TOPIC}[RATE]))", "another body"),
            Query("sum(rate(rocketmq_dedup_replaced_total{HERE, TOPIC}[RATE]))", "replaced"),
            unit="cps",
        ),
        panel(
            "Rejected keys",
            "Rejected messages with a dedup key per second. memory: no memory for a new key. version: the sender has another list of owners than the broker group.",
            Query(
                "sum by (reason) (rate(rocketmq_dedup_rejected_total{HERE, TOPIC}[RATE]))",
                "{{reason}}",
            ),
            unit="cps",
            alerts=("DedupMemory",),
        ),
        panel(
            "Lookups of moved keys",
            "Lookups of dedup keys at their old owners per second, while a spread is open. unknown: the new owner stores the message.",
            Query("sum by (result) (rate(rocketmq_dedup_lookup_total{HERE}[RATE]))", "{{result}}"),
            unit="cps",
        ),
    ),
)

PAGE: Final = Page(
    name="broker-and-store",
    title="Tidemill / Broker and store",
    description="Writes to the log, use of the disk, and resources of the processes.",
    rows=(_LOAD, _LOG, _DISK, _DEDUP, _PROCESS),
    has_topics=True,
)
