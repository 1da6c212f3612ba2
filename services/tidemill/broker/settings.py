"""Every knob of the broker."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.timer.config import OverloadPolicy
from tidemill.common.setting_types import Addresses, Flag, Folder, Port, is_loopback, is_unspecified
from tidemill.common.shared_settings import ClusterTlsSettings

MIB = 1 << 20
REPLICA_NAME_CHARS_MAX = 80  # a group's name has 64, and an ordinal follows
REPLICA_ID_MAX = 999  # ordinals of a StatefulSet, of which a group has three or five
_ENGINE = EngineConfig()  # Defaults stand there: these are what a user sees of them.
_TIMER = _ENGINE.timer


class BrokerSettings(ClusterTlsSettings):
    """Store messages, and hand them to consumers through the proxies."""

    command: ClassVar[str] = "broker"

    name: str = Field("broker-0", min_length=1, description="Name of the broker group.")
    replica_name: str = Field(
        "",
        max_length=REPLICA_NAME_CHARS_MAX,
        description="Name of this replica of the broker group, which is shown as its master; empty:"
        " the group's name.",
    )
    replica_id: int = Field(
        -1,
        ge=-1,
        le=REPLICA_ID_MAX,
        description="Number of this replica of the broker group, from 0; -1: the group has no other"
        " replica, and no controller.",
    )
    data_dir: Folder = Field(Path("data"), description="Folder of the store; made when missing.")
    data_dir_wait_ms: int = Field(
        0,
        ge=0,
        le=600_000,
        description="How long a start waits for another broker to leave data_dir; 0: it is refused"
        " at once.",
    )
    grpc_host: str = Field("127.0.0.1", description="Address on which proxies are served.")
    grpc_port: Port = Field(10911, description="Port on which proxies are served; 0: a free one.")
    grpc_reuse_port: Flag = Field(
        False, description="Share the port with whoever reserved it (SO_REUSEPORT)."
    )
    plain_links: Flag = Field(
        False,
        description="Serve proxies and admins of other machines without TLS: whoever reaches the"
        " port may then read, send and delete everything.",
    )
    drain_timeout_ms: int = Field(
        10_000, ge=0, description="How long a stop waits for requests that are in flight."
    )

    controllers: Addresses = Field(
        [],
        max_length=9,
        description="Addresses (host:port) of all controllers. With them this process is the first"
        " of a replica: it starts the broker, tells them how that is, and starts it again.",
    )
    controllers_fd: int | None = Field(
        None, description="Set by the first process of a replica: where it is spoken to."
    )
    replica_address: str = Field(
        "",
        description="Address (host:port) at which other replicas and proxies reach this replica;"
        " empty: where it listens, which must then be one address and not all of the machine's.",
    )

    auto_create: Flag = Field(
        _ENGINE.auto_create,
        description="Create topics and groups when they are used for the first time.",
    )
    topics_max: int = Field(
        _ENGINE.topics_max,
        ge=1,
        description="Topics that there may be, retry and dead-letter topics among them; no more is"
        " created beyond it.",
    )
    groups_max: int = Field(
        _ENGINE.groups_max, ge=1, description="Consumer groups that there may be."
    )
    auto_create_per_s: int = Field(
        _ENGINE.auto_create_per_s,
        ge=1,
        description="Topics and groups that their first use may create in a second, behind a burst"
        " of 1,000; beyond it that use is refused with TOO_MANY_REQUESTS.",
    )
    default_queues: int = Field(
        _ENGINE.default_queues,
        ge=1,
        le=1024,
        description="Queues of a topic that is created without a number.",
    )

    segment_bytes: int = Field(
        _ENGINE.segment_bytes,
        ge=MIB,
        le=1024 * MIB,
        description="Size of one file of the commit log.",
    )
    checkpoint_log_bytes: int = Field(
        _ENGINE.checkpoint_log_bytes,
        ge=MIB,
        description="Log between two checkpoints; bounds what a start replays.",
    )
    retention_ms: int = Field(
        _ENGINE.retention_ms, ge=0, description="Age at which messages are deleted, acked or not."
    )
    retention_bytes: int = Field(
        _ENGINE.retention_bytes,
        ge=0,
        description="Size of the log beyond which the oldest is deleted; 0: no limit.",
    )
    archive_gate_group: str = Field(
        _ENGINE.archive_gate_group,
        max_length=255,
        description=(
            "Consumer group by whose pull offsets an archive says how far it has sealed; retention "
            "keeps what is not, while there is room. Empty: it waits for nobody."
        ),
    )
    disk_reserve_bytes: int = Field(
        _ENGINE.disk_reserve_bytes,
        ge=0,
        description=(
            "Free space below which sends are refused; below a quarter of it pops and copies are "
            "too, and acks go on."
        ),
    )
    deliveries_max: int = Field(
        _ENGINE.deliveries_max,
        ge=1,
        description="Live pop checkpoints; beyond it a pop is refused.",
    )

    timer_max_delay_ms: int = Field(
        _TIMER.max_delay_ms,
        ge=60_000,
        le=_TIMER.max_delay_ms,
        description="How far ahead a message may be scheduled.",
    )
    timer_load_horizon_ms: int = Field(
        _TIMER.load_horizon_ms,
        ge=2_000,
        le=600_000,
        description="How long before they are due delayed messages are loaded into memory.",
    )
    timer_load_chunk_records: int = Field(
        _TIMER.load_chunk_records,
        ge=4_096,
        le=4_194_304,
        description="Delayed messages of one second that are loaded at a time; 40 bytes each.",
    )
    timer_clock_hold_ms: int = Field(
        10_000,
        ge=0,
        le=600_000,
        description="How long delayed messages wait after the machine's clock has jumped.",
    )
    timer_flush_period_ms: int = Field(
        _TIMER.flush_period_ms,
        ge=1_000,
        le=600_000,
        description="How often the files of the timer wheel are written.",
    )
    timer_max_rate: int = Field(
        _TIMER.max_rate,
        ge=0,
        description="Delayed messages delivered a second at most; 0: no limit.",
    )
    timer_soft_limit_per_second: int = Field(
        _TIMER.soft_limit_per_second,
        ge=0,
        description="Messages due in one second beyond which the policy below is asked; 0: never.",
    )
    timer_overload_policy: OverloadPolicy = Field(
        _TIMER.overload_policy, description="What becomes of a message whose second is full."
    )
    timer_spread_ms: int = Field(
        _TIMER.spread_ms,
        ge=1,
        le=3_600_000,
        description="By how much the policy spread delays at most.",
    )
    timer_max_pending: int = Field(
        _TIMER.max_pending,
        ge=1,
        description="Delayed messages that wait; beyond it they are refused.",
    )
    timer_max_pinned_part: float = Field(
        _TIMER.max_pinned_part,
        gt=0,
        le=1,
        description="Part of the volume that delayed messages may hold; beyond it: refused.",
    )
    timer_evacuation_lead_ms: int = Field(
        _TIMER.evacuation_lead_ms,
        ge=0,
        description="How long before retention delayed messages are copied out of a segment.",
    )
    timer_evacuation_rate_bytes: int = Field(
        _TIMER.evacuation_rate_bytes,
        ge=64 << 10,
        description="Bytes a second of such copies at most.",
    )
    timer_expire_backlog_after_ms: int = Field(
        _TIMER.expire_backlog_after_ms,
        ge=0,
        description="Lateness at which a message is dead-lettered instead; 0: never.",
    )

    pending_bytes_max: int = Field(
        64 * MIB, ge=MIB, description="Requests that wait for a round; beyond it proxies wait."
    )
    parked_max: int = Field(
        100_000, ge=0, description="Long polls that wait at once; beyond it they are refused."
    )

    @model_validator(mode="after")
    def check_neighbours(self) -> Self:
        """Refuse to hand out the secret of receipt handles to a network."""
        if not (is_loopback(self.grpc_host) or self.cluster_tls_ca_file or self.plain_links):
            raise ValueError(
                f"grpc_host {self.grpc_host} is no loopback address, and whoever reaches this port"
                " may do everything: set cluster_tls_ca_file, cluster_tls_certificate_file and"
                " cluster_tls_key_file here, in the proxies and in the admin process, or set"
                " plain_links where nobody else is on the network"
            )
        return self

    @model_validator(mode="after")
    def check_replica(self) -> Self:
        """Refuse controllers without a replica that they could decide about."""
        if self.controllers and self.replica_id < 0:
            raise ValueError("controllers are for one of several replicas: set replica_id, from 0")
        host = self.replica_address.rpartition(":")[0] if self.replica_address else self.grpc_host
        if self.controllers and is_unspecified(host):
            raise ValueError(
                f"others cannot reach this replica at {host or 'no host'}: set replica_address to"
                " the host and port at which they do"
            )
        return self
