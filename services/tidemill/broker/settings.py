"""The settings of the broker."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import CliSuppress

from tidemill.broker.engine.config import DiskFullPolicy, EngineConfig
from tidemill.broker.engine.dedup.config import DedupConfig
from tidemill.broker.engine.timer.config import OverloadPolicy
from tidemill.broker.engine.transaction.config import TransactionConfig
from tidemill.common.addresses import HostPort, is_loopback, is_unspecified
from tidemill.common.setting_types import Address, Addresses, Flag, Folder, Port
from tidemill.common.shared_settings import ClusterTlsSettings, FeatureLevelSettings

MIB = 1 << 20
REPLICA_NAME_CHARS_MAX = 80  # 64 for the name of the broker group, and an ordinal
REPLICA_ID_MAX = 999  # ordinals of a StatefulSet; a broker group has three or five replicas
_ENGINE = EngineConfig()  # The defaults of the engine; a user sees them here.
_TIMER = _ENGINE.timer
_TRANSACTION = TransactionConfig()
_DEDUP = DedupConfig()


class BrokerSettings(FeatureLevelSettings, ClusterTlsSettings):
    """Store messages and deliver them through the proxies."""

    command: ClassVar[str] = "broker"
    panels: ClassVar[dict[str, str]] = {
        "": "Store",
        "grpc_": "Connections",
        "plain_links": "Connections",
        "drain_": "Connections",
        "replica": "Replicas",
        "controllers": "Replicas",
        "auto_create_": "Topics and consumer groups",
        "topics_": "Topics and consumer groups",
        "groups_": "Topics and consumer groups",
        "recreate_": "Topics and consumer groups",
        "default_queues": "Topics and consumer groups",
        "retention_": "Retention",
        "archive_": "Retention",
        "disk_": "Retention",
        "timer_": "Delayed messages",
        "transaction_": "Transactions",
        "dedup_": "Deduplication",
        "deliveries_max": "Limits",
        "pending_": "Limits",
        "parked_": "Limits",
    }

    name: str = Field("broker-0", min_length=1, description="Name of the broker group.")
    replica_name: str = Field(
        "",
        max_length=REPLICA_NAME_CHARS_MAX,
        description="Name of this replica, shown while it is the master of its broker group. Empty:"
        " the name of the broker group.",
    )
    replica_id: int = Field(
        -1,
        ge=-1,
        le=REPLICA_ID_MAX,
        description="Number of this replica in its broker group, from 0. -1: a broker without other"
        " replicas and controllers.",
    )
    data_dir: Folder = Field(Path("data"), description="Folder of the store; created if missing.")
    data_dir_wait_ms: int = Field(
        0,
        ge=0,
        le=600_000,
        description="Wait for another broker to release data_dir. 0: fail at once.",
    )
    grpc_host: str = Field("127.0.0.1", description="Listen address for proxies.")
    grpc_port: Port = Field(10911, description="Listen port for proxies. 0: a free port.")
    grpc_reuse_port: Flag = Field(
        False, description="Share the port with a process that has reserved it (SO_REUSEPORT)."
    )
    plain_links: Flag = Field(
        False,
        description="Serve proxies and admin processes of other machines without TLS. Every process"
        " that reaches the port can then read, send and delete everything.",
    )
    drain_timeout_ms: int = Field(
        10_000, ge=0, description="Time that a stop waits for requests in flight."
    )

    controllers: Addresses = Field(
        [],
        max_length=9,
        description="Addresses (host:port) of all controllers. If set, this process supervises the"
        " broker: it starts the broker, reports its health and restarts it.",
    )
    controllers_fd: CliSuppress[int | None] = Field(
        None, description="Socket to the supervisor of a replica; set by the supervisor."
    )
    replica_address: Literal[""] | Address = Field(
        "",
        description="Address (host:port) of this replica for other replicas and proxies. Empty:"
        " grpc_host and grpc_port; grpc_host must then be a single address.",
    )

    auto_create_topics: Flag = Field(
        _ENGINE.auto_create_topics, description="Create topics on first use."
    )
    auto_create_groups: Flag = Field(
        _ENGINE.auto_create_groups, description="Create consumer groups on first use."
    )
    topics_max: int = Field(
        _ENGINE.topics_max,
        ge=1,
        description="Limit of topics, including retry and dead-letter topics.",
    )
    groups_max: int = Field(_ENGINE.groups_max, ge=1, description="Limit of consumer groups.")
    auto_create_per_s: int = Field(
        _ENGINE.auto_create_per_s,
        ge=1,
        description="Topics and consumer groups created on first use per second, after a burst of"
        " 1,000. Beyond it requests are rejected with TOO_MANY_REQUESTS.",
    )
    recreate_block_ms: int = Field(
        _ENGINE.recreate_block_ms,
        ge=0,
        description="Time after the deletion of a topic or consumer group in which its use does"
        " not create it again. An operator can create it.",
    )
    default_queues: int = Field(
        _ENGINE.default_queues,
        ge=1,
        le=1024,
        description="Queues of a new topic, if the request does not set a number.",
    )

    segment_bytes: int = Field(
        _ENGINE.segment_bytes,
        ge=MIB,
        le=1024 * MIB,
        description="Size of one segment file of the commit log.",
    )
    checkpoint_log_bytes: int = Field(
        _ENGINE.checkpoint_log_bytes,
        ge=MIB,
        description="Bytes of the log between two checkpoints; limits the replay of a start.",
    )
    retention_ms: int = Field(
        _ENGINE.retention_ms,
        ge=0,
        description="Age at which messages are deleted, even if they are not acked. A topic may"
        " have its own retention.",
    )
    retention_bytes: int = Field(
        _ENGINE.retention_bytes,
        ge=0,
        description="Size of the messages of all topics without a size of their own, beyond which"
        " the oldest segments lose these messages. Topics that keep messages for ever do not count."
        " Below feature level 2: size of the log. 0: no limit.",
    )
    event_retention_ms: int = Field(
        _ENGINE.event_retention_ms,
        ge=0,
        description="How long the log keeps the records of deliveries and acks, from which pipeline"
        " events are made. 0: as long as an earlier message is live, and at most `retention_ms`. On"
        " a full disk at most one hour.",
    )
    pack_rate_bytes: int = Field(
        _ENGINE.pack_rate_bytes,
        ge=MIB,
        description="Bytes per second that the broker copies when it frees the content of dead"
        " messages in segments of the log.",
    )
    archive_gate_group: str = Field(
        _ENGINE.archive_gate_group,
        max_length=255,
        description="Consumer group of an archive; its pull offsets mark the sealed messages."
        " Retention keeps unsealed messages while there is room. Empty: no archive.",
    )
    disk_reserve_bytes: int = Field(
        _ENGINE.disk_reserve_bytes,
        ge=0,
        description="Free space below which sends are rejected. Below a quarter of it pops and"
        " copies are rejected, too; acks still work.",
    )
    disk_full_policy: DiskFullPolicy = Field(
        _ENGINE.disk_full_policy,
        description="What happens on a full disk if nothing else frees space. `reject`: sends are"
        " rejected. `trim_oldest`: the oldest messages are deleted, one segment at a time, read or"
        " not, except those of topics that keep messages for ever.",
    )
    deliveries_max: int = Field(
        _ENGINE.deliveries_max,
        ge=1,
        description="Limit of deliveries in flight. Beyond it pops are rejected. While several"
        " groups poll, each has half of it. A group with few deliveries is served beyond it.",
    )

    timer_max_delay_ms: int = Field(
        _TIMER.max_delay_ms,
        ge=60_000,
        le=_TIMER.max_delay_ms,
        description="Longest delay of a message.",
    )
    timer_load_horizon_ms: int = Field(
        _TIMER.load_horizon_ms,
        ge=2_000,
        le=600_000,
        description="How long before the due time delayed messages are loaded into memory.",
    )
    timer_load_chunk_records: int = Field(
        _TIMER.load_chunk_records,
        ge=4_096,
        le=4_194_304,
        description="Delayed messages of one second loaded at a time; 40 bytes each.",
    )
    timer_clock_hold_ms: int = Field(
        10_000,
        ge=0,
        le=600_000,
        description="Pause of delayed messages after a jump of the machine's clock.",
    )
    timer_flush_period_ms: int = Field(
        _TIMER.flush_period_ms,
        ge=1_000,
        le=600_000,
        description="Period of writing the files of the timer wheel.",
    )
    timer_max_rate: int = Field(
        _TIMER.max_rate,
        ge=0,
        description="Limit of delayed messages delivered per second. 0: no limit.",
    )
    timer_soft_limit_per_second: int = Field(
        _TIMER.soft_limit_per_second,
        ge=0,
        description="Messages due in one second beyond which timer_overload_policy applies. 0:"
        " never.",
    )
    timer_overload_policy: OverloadPolicy = Field(
        _TIMER.overload_policy, description="Treatment of a delayed message if its second is full."
    )
    timer_spread_ms: int = Field(
        _TIMER.spread_ms,
        ge=1,
        le=3_600_000,
        description="Longest additional delay by the policy spread.",
    )
    timer_max_pending: int = Field(
        _TIMER.max_pending,
        ge=1,
        description="Limit of pending delayed messages; beyond it delayed sends are rejected. The"
        " last eighth is for topics with few.",
    )
    timer_max_pinned_part: float = Field(
        _TIMER.max_pinned_part,
        gt=0,
        le=1,
        description="Part of the volume that delayed messages may keep in use; beyond it delayed"
        " sends are rejected.",
    )
    timer_evacuation_lead_ms: int = Field(
        _TIMER.evacuation_lead_ms,
        ge=0,
        description="How long before its deletion delayed messages are copied out of a segment.",
    )
    timer_evacuation_rate_bytes: int = Field(
        _TIMER.evacuation_rate_bytes,
        ge=64 << 10,
        description="Limit of these copies in bytes per second.",
    )
    timer_expire_backlog_after_ms: int = Field(
        _TIMER.expire_backlog_after_ms,
        ge=0,
        description="Lateness beyond which a delayed message is dead-lettered. 0: never.",
    )

    transaction_open_max: int = Field(
        _TRANSACTION.open_max,
        ge=1,
        le=10_000_000,
        description="Limit of half messages without a decision. Beyond it half messages are"
        " rejected. Each takes about 50 bytes of memory.",
    )
    transaction_checks_per_second: int = Field(
        1_000,
        ge=1,
        le=100_000,
        description="Limit of the checks that the broker sends to producers. Others wait.",
    )
    transaction_outcomes_max: int = Field(
        _TRANSACTION.outcomes_max,
        ge=1_000,
        le=10_000_000,
        description="Limit of the results that are remembered, so that a repeated decision gets the"
        " first answer. Beyond it the oldest are forgotten.",
    )
    transaction_outcome_memory_ms: int = Field(
        _TRANSACTION.outcome_memory_ms,
        ge=60_000,
        le=86_400_000,
        description="How long a result is remembered.",
    )

    dedup_memory_bytes: int = Field(
        _DEDUP.memory_bytes,
        ge=MIB,
        le=4 << 30,
        description="Limit of the memory for dedup keys. Beyond it messages with new keys are"
        " rejected. A key takes at most 54 bytes, and that of a pending delayed message or an"
        " open half message at most 68.",
    )

    pending_bytes_max: int = Field(
        64 * MIB,
        ge=MIB,
        description="Limit of requests that wait for a round; beyond it proxies wait.",
    )
    parked_max: int = Field(
        100_000,
        ge=0,
        description="Limit of waiting long polls; beyond it polls are rejected. The last eighth is"
        " for groups with few.",
    )

    @model_validator(mode="after")
    def check_neighbours(self) -> Self:
        """Refuse to serve the secret of receipt handles to a network without TLS."""
        if not (is_loopback(self.grpc_host) or self.cluster_tls_ca_file or self.plain_links):
            raise ValueError(
                f"grpc_host {self.grpc_host} is not a loopback address and TLS is off; set"
                " cluster_tls_ca_file, cluster_tls_certificate_file and cluster_tls_key_file here,"
                " in the proxies and in the admin process, or set plain_links in a network without"
                " other machines"
            )
        return self

    @model_validator(mode="after")
    def check_replica(self) -> Self:
        """Refuse controllers without a replica id, or without an address of the replica."""
        if self.controllers and self.replica_id < 0:
            raise ValueError("controllers need a replica: set replica_id to 0 or more")
        host = HostPort.parse(self.replica_address).host if self.replica_address else self.grpc_host
        if self.controllers and is_unspecified(host):
            raise ValueError(
                f"other replicas cannot reach this replica at {host or 'an empty host'}; set"
                " replica_address to a host and port that they reach"
            )
        return self
