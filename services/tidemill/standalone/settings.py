"""The settings of `tidemill standalone`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from tidemill.common.setting_types import Flag, Folder, Port
from tidemill.common.shared_settings import (
    AdminFrontSettings,
    FrontSettings,
    MessageSettings,
    SecuritySettings,
)

GROUPS_MAX = 64  # the limit of a cluster
REPLICAS_MAX = 5  # allows the loss of two; each further replica is one more copy to wait for


class StandaloneSettings(FrontSettings, AdminFrontSettings, MessageSettings, SecuritySettings):
    """Run a broker, proxies and the admin process on this machine, with their data in one folder.

    When all serve, standard output gets one line of JSON with the addresses. SIGTERM stops them
    all.

    Settings of the broker, such as retention_ms, are set by environment or file.
    """

    command: ClassVar[str] = "standalone"
    panels: ClassVar[dict[str, str]] = {
        "": "Processes on this machine",
        "grpc_": "Connections of clients",
        "admin_": "REST API",
        "auto_create_": "Topics and consumer groups",
    }

    data_dir: Folder = Field(Path("data"), description="Folder of the stores; created if missing.")
    metrics_port: Port = Field(
        5557,
        description="First port of /metrics, /livez and /readyz: that of the first broker. The"
        " other brokers, the proxies and the admin process use the next ports. 0: free ports.",
    )
    grpc_host: str = Field("127.0.0.1", description="Address for clients.")
    grpc_port: Port = Field(8081, description="Port for clients; 0: a free port.")
    admin_host: str = Field("127.0.0.1", description="Address of the REST API.")
    admin_port: Port = Field(8080, description="Port of the REST API; 0: a free port.")
    proxies: int = Field(
        1, ge=1, le=64, description="Number of proxies, which share the port for clients."
    )
    groups: int = Field(
        1,
        ge=1,
        le=GROUPS_MAX,
        description="Number of broker groups, which share the messages. The store of the first is"
        " in data_dir, the others are in folders by name. data_dir must not have more groups.",
    )
    replicas: int = Field(
        1,
        ge=1,
        le=REPLICAS_MAX,
        description="Number of replicas of each broker group. With three, a message is acknowledged"
        " when two have it, and another replica takes over if the master dies. With two, no message"
        " is acknowledged while one is down. data_dir must not have more replicas.",
    )
    controller_port: Port = Field(
        0, description="Port of the controller, if there are replicas; 0: a free port."
    )
    auto_create_topics: Flag = Field(True, description="Create topics at their first use.")
    auto_create_groups: Flag = Field(True, description="Create consumer groups at their first use.")
    stop_timeout_ms: int = Field(
        20_000, ge=0, description="Time for a process to stop before it is killed, in ms."
    )

    @model_validator(mode="after")
    def check_admin_door(self) -> Self:
        """Refuse an open door of the admin process, except with its flag."""
        self.check_door("admin_host", self.admin_host, floor=self.security_floor)
        return self
