"""All settings of the proxy."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import CliSuppress

from tidemill.common.setting_types import Address, Addresses, Flag, Port
from tidemill.common.shared_settings import (
    ClusterTlsSettings,
    FrontSettings,
    MessageSettings,
    SecuritySettings,
)

# 15 hours: time zones differ from UTC by up to 14 hours, and clocks by some minutes.
SIGNATURE_AGE_MS_MIN: Final = 54_000_000


class ProxySettings(FrontSettings, MessageSettings, SecuritySettings, ClusterTlsSettings):
    """Settings of the proxy: its addresses, its brokers and its limits."""

    command: ClassVar[str] = "proxy"
    panels: ClassVar[dict[str, str]] = {
        "": "Calls",
        "grpc_host": "Connections of clients",
        "grpc_port": "Connections of clients",
        "grpc_reflection": "Connections of clients",
        "pipeline_source": "Connections of clients",
        "reuse_port": "Connections of clients",
        "keeper_": "Connections of clients",
        "connection": "Connections of clients",
        "advertised_": "Connections of clients",
        "brokers": "Brokers",
        "controllers": "Brokers",
        "routes_file": "Brokers",
        "link_": "Limits",
        "memory_": "Limits",
        "clients_max": "Limits",
        "drain_": "Process",
        "unready_": "Process",
        "security_stale_max_ms": "Brokers",
        "signature_age_max_ms": "Users and rights",
        "slow_call_ms": "Logs and metrics",
    }

    name: str = Field("proxy-0", description="Name of this proxy, in its logs and metrics.")
    grpc_host: str = Field(
        "127.0.0.1", description="Address on which the public gRPC API is served."
    )
    grpc_port: Port = Field(8081, description="Port of the public gRPC API; 0 picks a free one.")
    reuse_port: Flag = Field(
        False, description="Share the gRPC port with other proxies on this machine (SO_REUSEPORT)."
    )
    pipeline_source: Flag = Field(
        True, description="Serve the reads of data pipelines on the gRPC port."
    )
    security_stale_max_ms: int = Field(
        0,
        ge=0,
        description="Longest time without an answer of the home in which its last users and rights"
        " count, in ms. Afterwards calls get 50001. 0: without limit.",
    )
    signature_age_max_ms: int = Field(
        0,
        ge=0,
        description="Longest difference between the date of a signature and the clock of the proxy,"
        f" in ms, against copied headers. At least {SIGNATURE_AGE_MS_MIN}, because Java, Go, Python"
        " and C# clients sign their local time as UTC. Exports of client metrics have no limit."
        " 0: without limit.",
    )
    slow_call_ms: int = Field(
        500,
        ge=1,
        description="Keep calls that take at least this time, in ms, for `tidemill process"
        " slow-calls`. Polls wait for messages, so they do not count.",
    )
    grpc_reflection: Flag = Field(
        True, description="Serve gRPC reflection, which tools read the methods from."
    )
    keeper_fd: CliSuppress[int | None] = Field(
        None,
        description="Descriptor that passes sockets; the process that keeps the port open sets it.",
    )
    connections_max: int = Field(
        10_000, ge=1, description="Connections of clients; beyond it new ones are closed at once."
    )
    connections_per_address_max: int = Field(
        1_000,
        ge=1,
        description="Connections from one address; beyond it new ones are closed at once.",
    )
    brokers: Addresses = Field(
        ["127.0.0.1:10911"],
        min_length=1,
        max_length=64,
        description="Addresses (host:port) of brokers. One that is up is enough to find the others"
        " of its cluster; several that are new become a cluster when all of them are up.",
    )
    controllers: Addresses = Field(
        [],
        max_length=9,
        description="Addresses (host:port) of all controllers, which name the master of each broker"
        " group; none: the replicas name it.",
    )
    routes_file: Path | None = Field(
        None, description="File that keeps the routes of the controllers, for a start without them."
    )
    advertised_address: Literal[""] | Address = Field(
        "",
        description="host:port to name in routes when a client does not say which access point it"
        " uses; empty refuses such requests. Every official client says it.",
    )
    request_timeout_ms: int = Field(
        3_000,
        ge=100,
        le=60_000,
        description="How long a call without a deadline waits for the broker.",
    )
    deadline_reserve_ms: int = Field(
        200,
        ge=100,
        le=2_000,
        description="The answer leaves at the latest this long before the client's deadline.",
    )
    grpc_client_consumer_min_long_polling_timeout_ms: int = Field(
        5_000,
        ge=0,
        le=60_000,
        description="Shortest long poll; shorter requests are lengthened. A client that asks for 0"
        " asks every broker once.",
    )
    long_polling_max_ms: int = Field(
        20_000, ge=1_000, le=60_000, description="Longest long poll; longer requests are cut."
    )
    invisible_duration_min_ms: int = Field(
        1_000,
        ge=10,
        le=600_000,
        description="Shortest invisible duration of a receive: below it a message comes back before"
        " it has arrived. A later change may be shorter.",
    )
    unready_after_ms: int = Field(
        10_000,
        ge=0,
        le=600_000,
        description="Time that all brokers may be unreachable until this proxy is unready. Until"
        " then calls wait within their deadlines; after it they are rejected at once.",
    )
    link_pending_max: int = Field(
        200_000,
        ge=1,
        description="Maximum number of requests in flight to one broker, including parked polls;"
        " further calls are rejected with TOO_MANY_REQUESTS.",
    )
    memory_bytes_max: int = Field(
        256 << 20,
        ge=128 << 20,
        description="Maximum memory for clients in bytes: requests on their way to a broker,"
        " waiting polls and unread replies. At the limit, messages over 64 KiB wait some seconds"
        " for room, in turn, and calls are rejected with TOO_MANY_REQUESTS, first those of the"
        " connection that holds most. The clients of one address together get half of it, or 11/16"
        " if messages wait. Behind a load balancer without PROXY protocol, all clients have"
        " one address.",
    )
    clients_max: int = Field(
        100_000,
        ge=1,
        description="Limit of clients whose settings the proxy remembers. Beyond it, the proxy"
        " forgets the client with the oldest call; for an address with half of all clients, one"
        " of its own.",
    )
    client_metrics: Flag = Field(
        False,
        description="Have Java and Python clients send measurements here every minute, for"
        " `/metrics`: times to send, to deliver, to wait and to process. Each opens one"
        " more connection. Python clients send it without TLS, and are not asked where it is"
        " required.",
    )
    drain_delay_ms: int = Field(
        3_000,
        ge=0,
        le=600_000,
        description="How long a stopping process continues to serve as unready, so that balancers"
        " send it no more clients, before it tells its clients to leave.",
    )
    connection_max_age_ms: int = Field(
        1_800_000,
        ge=0,
        description="Age, give or take a tenth, of a connection when its client is asked to replace"
        " it; the new one may lead to another proxy. 0 lets it stay.",
    )
    drain_timeout_ms: int = Field(
        5_000, ge=0, le=600_000, description="Time that a stop waits for calls in flight."
    )

    @model_validator(mode="after")
    def check_signature_age(self) -> Self:
        """Reject an age that would refuse clients in other time zones."""
        if 0 < self.signature_age_max_ms < SIGNATURE_AGE_MS_MIN:
            raise ValueError(
                f"signature_age_max_ms {self.signature_age_max_ms} is less than"
                f" {SIGNATURE_AGE_MS_MIN} (15 hours); clients that sign their local time would be"
                " refused; set 0 for no limit"
            )
        return self
