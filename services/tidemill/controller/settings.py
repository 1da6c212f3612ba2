"""Settings of the controller."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from tidemill.common.addresses import is_loopback
from tidemill.common.setting_types import Flag, Port
from tidemill.common.shared_settings import ClusterTlsSettings, FeatureLevelSettings
from tidemill.controller.election.sessions import ElectionTiming

_TIMING = ElectionTiming()  # the defaults of the time-outs below


class ControllerSettings(FeatureLevelSettings, ClusterTlsSettings):
    """Decide which replica of each broker group is master."""

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
        "controller-0", min_length=1, description="Name of this controller, unique in the cluster."
    )
    group_store: Path = Field(
        Path("data/groups.sqlite"),
        description="File with the records of all broker groups, created if missing. Controllers"
        " on one machine may share it.",
    )
    kubernetes_groups: Flag = Field(
        False,
        description="Keep the records in BrokerGroup resources named CLUSTER-GROUP, not in"
        " group_store. The namespace is that of this pod, or outside Kubernetes that of the"
        " kubeconfig.",
    )
    grpc_host: str = Field(
        "127.0.0.1", description="Listen address for brokers, proxies and admin processes."
    )
    grpc_port: Port = Field(10912, description="Listen port; 0: a free port.")
    grpc_reuse_port: Flag = Field(
        False, description="Share the port with the process that reserved it (SO_REUSEPORT)."
    )
    plain_links: Flag = Field(
        False,
        description="Serve other machines without TLS. Any client that reaches the port can then"
        " make any replica master.",
    )
    min_in_sync: int = Field(
        2,
        ge=1,
        le=7,
        description="Replicas that must store a message before it is acknowledged, in broker groups"
        " that this controller creates. With 1, a group may lose messages that only its master"
        " has.",
    )
    makes_groups: Flag = Field(
        True, description="Create the record of a broker group when its replica 0 registers."
    )
    deputy_rank: int = Field(
        1,
        ge=1,
        le=9,
        description="Steps of deputy_step_ms that this controller waits as a deputy before it"
        " replaces a failed master.",
    )
    session_timeout_ms: int = Field(
        _TIMING.session_timeout_ms,
        ge=100,
        le=60_000,
        description="Silence after which a replica counts as failed.",
    )
    stall_limit_ms: int = Field(
        _TIMING.stall_limit_ms,
        ge=100,
        le=60_000,
        description="Standstill of a broker's event loop after which it counts as failed, while its"
        " supervisor is heard.",
    )
    peer_silence_ms: int = Field(
        _TIMING.peer_silence_ms,
        ge=100,
        le=60_000,
        description="A master that is silent here stays master while a replica has heard it within"
        " this time.",
    )
    deputy_step_ms: int = Field(
        _TIMING.deputy_step_ms,
        ge=100,
        le=60_000,
        description="Time that a deputy waits for each controller before it.",
    )
    flapping_guard_ms: int = Field(
        _TIMING.flapping_guard_ms,
        ge=0,
        le=3_600_000,
        description="Time after an election in which a slow master is not moved. A failed master is"
        " replaced at any time.",
    )
    drain_timeout_ms: int = Field(
        2_000, ge=0, description="Time that a stop waits for calls in flight."
    )

    @property
    def timing(self) -> ElectionTiming:
        """The time-outs of elections."""
        return ElectionTiming(
            session_timeout_ms=self.session_timeout_ms,
            stall_limit_ms=self.stall_limit_ms,
            peer_silence_ms=self.peer_silence_ms,
            deputy_step_ms=self.deputy_step_ms,
            flapping_guard_ms=self.flapping_guard_ms,
        )

    @model_validator(mode="after")
    def check_reach(self) -> Self:
        """Reject a port that other machines reach without TLS, unless plain_links is set."""
        is_open = not is_loopback(self.grpc_host) and not self.cluster_tls_ca_file
        if is_open and not self.plain_links:
            raise ValueError(
                f"grpc_host {self.grpc_host} is not a loopback address and TLS is off, so other"
                " machines can make any replica master; set the cluster_tls_* files, or plain_links"
                " if only trusted machines reach the port"
            )
        return self
