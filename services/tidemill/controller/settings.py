"""Every knob of the controller."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from tidemill.common.setting_types import Flag, Port, is_loopback
from tidemill.common.shared_settings import ClusterTlsSettings
from tidemill.controller.election.sessions import ElectionTiming

_TIMING = ElectionTiming()  # Defaults stand there: these are what a user sees of them.


class ControllerSettings(ClusterTlsSettings):
    """Watch over the replicas of broker groups, and decide which of them is master."""

    command: ClassVar[str] = "controller"
    panels: ClassVar[dict[str, str]] = {
        "": "Elections",
        "group_store": "Records of broker groups",
        "kubernetes_": "Records of broker groups",
        "makes_groups": "Records of broker groups",
        "grpc_": "Connections",
        "plain_links": "Connections",
        "drain_": "Connections",
    }

    name: str = Field(
        "controller-0",
        min_length=1,
        description="Name of this controller: no other one of the cluster has it.",
    )
    group_store: Path = Field(
        Path("data/groups.sqlite"),
        description="File with the records of all broker groups, made when missing. Controllers of"
        " one machine may share it.",
    )
    kubernetes_groups: Flag = Field(
        False,
        description="Keep the records in the BrokerGroup resources of this pod's namespace, instead"
        " of in group_store; the cluster's name and a hyphen stand before a group's name there.",
    )
    grpc_host: str = Field(
        "127.0.0.1", description="Address on which brokers, proxies and admins are served."
    )
    grpc_port: Port = Field(10912, description="Port on which they are served; 0: a free one.")
    grpc_reuse_port: Flag = Field(
        False, description="Share the port with whoever reserved it (SO_REUSEPORT)."
    )
    plain_links: Flag = Field(
        False,
        description="Serve other machines without TLS: whoever reaches the port may then make any"
        " replica master.",
    )
    min_in_sync: int = Field(
        2,
        ge=1,
        le=7,
        description="How many replicas must have a message before it is acknowledged, of broker"
        " groups that this controller makes. One: a group may lose what only its master had.",
    )
    makes_groups: Flag = Field(
        True, description="Make the record of a broker group when the first of its replicas comes."
    )
    deputy_rank: int = Field(
        1,
        ge=1,
        le=9,
        description="How many steps of deputy_step_ms this controller waits, while it does not"
        " lead, before it replaces a master that has failed.",
    )
    session_timeout_ms: int = Field(
        _TIMING.session_timeout_ms,
        ge=100,
        le=60_000,
        description="How long a replica may be silent before it counts as gone.",
    )
    stall_limit_ms: int = Field(
        _TIMING.stall_limit_ms,
        ge=100,
        le=60_000,
        description="How long a broker's event loop may stand still, while its supervisor is heard,"
        " before it counts as gone.",
    )
    peer_silence_ms: int = Field(
        _TIMING.peer_silence_ms,
        ge=100,
        le=60_000,
        description="A master that is silent here is kept while a replica has heard it within this"
        " time.",
    )
    deputy_step_ms: int = Field(
        _TIMING.deputy_step_ms,
        ge=100,
        le=60_000,
        description="How long a deputy waits for those before it.",
    )
    flapping_guard_ms: int = Field(
        _TIMING.flapping_guard_ms,
        ge=0,
        le=3_600_000,
        description="After an election no master is moved for being slow or blocked for so long;"
        " one that has failed is replaced at any time.",
    )
    drain_timeout_ms: int = Field(
        2_000, ge=0, description="How long a stop waits for calls that are in flight."
    )

    @property
    def timing(self) -> ElectionTiming:
        """How long is waited for whom."""
        return ElectionTiming(
            session_timeout_ms=self.session_timeout_ms,
            stall_limit_ms=self.stall_limit_ms,
            peer_silence_ms=self.peer_silence_ms,
            deputy_step_ms=self.deputy_step_ms,
            flapping_guard_ms=self.flapping_guard_ms,
        )

    @model_validator(mode="after")
    def check_reach(self) -> Self:
        """Refuse an open port without TLS, unless that is said."""
        is_open = not is_loopback(self.grpc_host) and not self.cluster_tls_ca_file
        if is_open and not self.plain_links:
            raise ValueError(
                f"grpc_host {self.grpc_host} lets other machines make masters: set the"
                " cluster_tls_* files, or plain_links if nobody else reaches the port"
            )
        return self
