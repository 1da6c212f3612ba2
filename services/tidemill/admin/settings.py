"""Every knob of the admin process."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tidemill.common.setting_types import Addresses, Port
from tidemill.common.shared_settings import AdminFrontSettings, ClusterTlsSettings


class AdminSettings(AdminFrontSettings, ClusterTlsSettings):
    """Serve the REST API for topics, consumer groups and messages."""

    command: ClassVar[str] = "admin"
    panels: ClassVar[dict[str, str]] = {
        "": "Process",
        "host": "REST API",
        "port": "REST API",
        "broker": "Brokers",
        "controllers": "Brokers",
        "request_": "Brokers",
    }

    host: str = Field("127.0.0.1", description="Address of the REST API.")
    port: Port = Field(8080, description="Port of the REST API; 0: a free one.")
    broker: Addresses = Field(
        ["127.0.0.1:10911"],
        min_length=1,
        max_length=64,
        description="Addresses (host:port) of brokers. One that is up is enough to find the others"
        " of its cluster.",
    )
    controllers: Addresses = Field(
        [],
        max_length=9,
        description="Addresses (host:port) of all controllers, where broker groups have several"
        " replicas.",
    )
    request_timeout_ms: int = Field(
        5_000, ge=1, description="How long a request waits for a broker."
    )
    unready_after_ms: int = Field(
        10_000,
        ge=0,
        le=600_000,
        description="How long all brokers may be unreachable until this process is unready.",
    )
    drain_delay_ms: int = Field(
        3_000,
        ge=0,
        le=600_000,
        description="How long a process that is to stop serves on as unready, so that balancers"
        " send it no more requests, before it closes its port.",
    )
    drain_timeout_ms: int = Field(
        5_000, ge=0, description="How long a stop waits for requests that are in flight."
    )
