"""Settings of the admin process."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from tidemill.common.setting_types import Addresses, Port
from tidemill.common.shared_settings import (
    AdminFrontSettings,
    ClusterTlsSettings,
    MessageSettings,
    SecuritySettings,
)


class AdminSettings(AdminFrontSettings, MessageSettings, SecuritySettings, ClusterTlsSettings):
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
        description="Addresses (host:port) of brokers. One reachable broker is enough to find the"
        " others of its cluster.",
    )
    controllers: Addresses = Field(
        [],
        max_length=9,
        description="Addresses (host:port) of all controllers, if broker groups have several"
        " replicas.",
    )
    request_timeout_ms: int = Field(5_000, ge=1, description="Timeout of a request to a broker.")
    unready_after_ms: int = Field(
        10_000,
        ge=0,
        le=600_000,
        description="Time that all brokers may be unreachable until this process is unready.",
    )
    drain_delay_ms: int = Field(
        3_000,
        ge=0,
        le=600_000,
        description="Time between SIGTERM and the close of the port. The process continues to serve"
        " but is unready, so that load balancers stop sending requests.",
    )
    drain_timeout_ms: int = Field(
        5_000, ge=0, description="Time that a stop waits for requests in flight."
    )

    @model_validator(mode="after")
    def check_own_door(self) -> Self:
        """Refuse an open door, except with its flag."""
        self.check_door("host", self.host, floor=self.security_floor)
        return self
