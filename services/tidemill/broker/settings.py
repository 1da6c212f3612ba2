"""Every knob of the broker."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from tidemill.common.settings import Flag, Folder, Port, ProcessSettings

MIB = 1 << 20
DAY_MS = 24 * 3600 * 1000


class BrokerSettings(ProcessSettings):
    """Store messages, and hand them to consumers through the proxies."""

    command: ClassVar[str] = "broker"

    name: str = Field("broker-0", min_length=1, description="Name of this broker.")
    data_dir: Folder = Field(Path("data"), description="Folder of the store; made when missing.")
    grpc_host: str = Field("127.0.0.1", description="Address on which proxies are served.")
    grpc_port: Port = Field(10911, description="Port on which proxies are served; 0: a free one.")
    grpc_reuse_port: Flag = Field(
        False, description="Share the port with whoever reserved it (SO_REUSEPORT)."
    )
    drain_timeout_ms: int = Field(
        10_000, ge=0, description="How long a stop waits for requests that are in flight."
    )

    auto_create: Flag = Field(
        False, description="Create topics and groups when they are used for the first time."
    )
    default_queues: int = Field(
        8, ge=1, le=1024, description="Queues of a topic that is created without a number."
    )

    segment_bytes: int = Field(
        128 * MIB, ge=MIB, le=1024 * MIB, description="Size of one file of the commit log."
    )
    checkpoint_log_bytes: int = Field(
        64 * MIB, ge=MIB, description="Log between two checkpoints; bounds what a start replays."
    )
    retention_ms: int = Field(
        72 * 3600 * 1000, ge=0, description="Age at which messages are deleted, acked or not."
    )
    retention_bytes: int = Field(
        0, ge=0, description="Size of the log beyond which the oldest is deleted; 0: no limit."
    )
    disk_reserve_bytes: int = Field(
        512 * MIB, ge=0, description="Free space below which sends are refused; acks go on."
    )
    deliveries_max: int = Field(
        4_000_000, ge=1, description="Live pop checkpoints; beyond it a pop is refused."
    )

    timer_max_delay_ms: int = Field(
        400 * DAY_MS, ge=60_000, le=400 * DAY_MS,
        description="How far ahead a message may be scheduled.",
    )  # fmt: skip
    timer_load_horizon_ms: int = Field(
        10_000, ge=2_000, le=600_000,
        description="How long before they are due delayed messages are loaded into memory.",
    )  # fmt: skip
    timer_load_chunk_records: int = Field(
        262_144, ge=4_096, le=4_194_304,
        description="Delayed messages of one second that are loaded at a time; 40 bytes each.",
    )  # fmt: skip
    timer_clock_hold_ms: int = Field(
        10_000, ge=0, le=600_000,
        description="How long delayed messages wait after the machine's clock has jumped.",
    )  # fmt: skip
    timer_flush_period_ms: int = Field(
        10_000, ge=1_000, le=600_000,
        description="How often the files of the timer wheel are written.",
    )  # fmt: skip
    timer_max_rate: int = Field(
        0, ge=0, description="Delayed messages delivered a second at most; 0: no limit."
    )
    timer_soft_limit_per_second: int = Field(
        20_000, ge=0,
        description="Messages due in one second beyond which the policy below is asked; 0: never.",
    )  # fmt: skip
    timer_overload_policy: Literal["accept", "reject", "spread"] = Field(
        "accept", description="What becomes of a message whose second is full."
    )
    timer_spread_ms: int = Field(
        1_000, ge=1, le=3_600_000, description="By how much the policy spread delays at most."
    )
    timer_max_pending: int = Field(
        50_000_000, ge=1, description="Delayed messages that wait; beyond it they are refused."
    )
    timer_max_pinned_part: float = Field(
        0.25, gt=0, le=1,
        description="Part of the volume that delayed messages may hold; beyond it: refused.",
    )  # fmt: skip
    timer_evacuation_lead_ms: int = Field(
        6 * 3600 * 1000, ge=0,
        description="How long before retention delayed messages are copied out of a segment.",
    )  # fmt: skip
    timer_evacuation_rate_bytes: int = Field(
        8 * MIB, ge=64 << 10, description="Bytes a second of such copies at most."
    )
    timer_expire_backlog_after_ms: int = Field(
        0, ge=0,
        description="Lateness at which a message is dead-lettered instead; 0: never.",
    )  # fmt: skip

    pending_bytes_max: int = Field(
        64 * MIB, ge=MIB, description="Requests that wait for a round; beyond it proxies wait."
    )
    parked_max: int = Field(
        100_000, ge=0, description="Long polls that wait at once; beyond it they are refused."
    )
