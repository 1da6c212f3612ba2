"""Every knob of `tidemill standalone`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from tidemill.common.setting_types import Flag, Folder, Port
from tidemill.common.shared_settings import AdminFrontSettings, FrontSettings

GROUPS_MAX = 64  # as many as a cluster has at most
REPLICAS_MAX = 5  # two may then be lost at once, and each more is a copy more to wait for


class StandaloneSettings(FrontSettings, AdminFrontSettings):
    """Run a broker, proxies and the admin process on this machine, data in one folder.

    When all serve, one line of JSON on standard output says where. SIGTERM stops them all.

    Each setting is also an environment variable (TIDEMILL_GRPC_PORT) and a key of the YAML file
    given by --config (grpc_port). Flags win over the environment, the environment over the file.
    What is not listed here, such as retention_ms of the broker, goes through those two.
    """

    command: ClassVar[str] = "standalone"

    data_dir: Folder = Field(Path("data"), description="Folder of the store; made when missing.")
    metrics_port: Port = Field(
        5557,
        description="First port of /metrics, /livez and /readyz: the first broker's; the other"
        " brokers, the proxies and the admin process take the next ones. 0 picks free ones.",
    )
    grpc_host: str = Field("127.0.0.1", description="Address on which clients are served.")
    grpc_port: Port = Field(8081, description="Port on which clients are served; 0: a free one.")
    admin_host: str = Field("127.0.0.1", description="Address of the REST API.")
    admin_port: Port = Field(8080, description="Port of the REST API; 0: a free one.")
    proxies: int = Field(1, ge=1, le=64, description="Proxies that share the clients' port.")
    groups: int = Field(
        1,
        ge=1,
        le=GROUPS_MAX,
        description="Broker groups that share the messages. The first keeps its store in data_dir,"
        " the others in folders of it by their names; there must not be more of them than this.",
    )
    replicas: int = Field(
        1,
        ge=1,
        le=REPLICAS_MAX,
        description="Replicas of each broker group: with three, a message is acknowledged when"
        " two have it, and another one takes over when the master dies. With two, nothing is"
        " acknowledged while either is away. There must not be more of them in data_dir than this.",
    )
    controller_port: Port = Field(
        0, description="Port of the controller, where there are replicas; 0: a free one."
    )
    auto_create: Flag = Field(
        True, description="Create topics and groups when they are used for the first time."
    )
    stop_timeout_ms: int = Field(
        20_000, ge=0, description="How long a process may take to stop before it is killed."
    )
