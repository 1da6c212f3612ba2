"""The base of every process's settings: flags win over environment, environment over a file.

Each process declares one frozen model below `ProcessSettings`; it is read once, where the process
starts, and handed on as parameters. Nothing else reads the environment.

    1. flags            --metrics-port 5557
    2. environment      TIDEMILL_METRICS_PORT=5557
    3. YAML             --config tidemill.yaml (or TIDEMILL_CONFIG), keys as the field names
    4. the field's default
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliImplicitFlag,
    CliSettingsSource,
    EnvSettingsSource,
    NoDecode,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def _checked_address(value: str) -> str:
    found = _ADDRESS.fullmatch(value)
    if found is None or not 0 < int(found[2]) < 65_536:
        raise ValueError(f"{value!r} is not an address of the form host:port")
    return value


def _checked_folder(value: object) -> object:
    if value == "":
        raise ValueError("the name of the folder is empty")
    return value


Port = Annotated[int, Field(ge=0, le=65_535)]
Flag = CliImplicitFlag[bool]  # --thing and --no-thing
Address = Annotated[str, AfterValidator(_checked_address)]  # host:port, or [IPv6]:port
Folder = Annotated[Path, BeforeValidator(_checked_folder)]


def _checked_network(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"{error}; write 10.1.2.3 or 10.1.0.0/16") from None
    return value


def is_loopback(host: str) -> bool:
    """Whether a server on `host` is reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Whether it is no address that others could reach, but all of this machine's."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return not host


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]  # a,b or repeated flags
Addresses = Annotated[list[Address], NoDecode, BeforeValidator(_split)]
# Addresses of machines, or networks of them.
Networks = Annotated[
    list[Annotated[str, AfterValidator(_checked_network)]], NoDecode, BeforeValidator(_split)
]

# The settings of all processes, which share one file: whatever else is in it is a slip. Processes
# do not import each other, so they stand here; a test holds them against the models.
KNOWN_KEYS = frozenset(
    [
        "admin_body_bytes_max",
        "admin_host",
        "admin_hosts",
        "admin_port",
        "admin_tls_certificate_file",
        "admin_tls_key_file",
        "admin_token_file",
        "advertised_address",
        "allow_unknown_settings",
        "archive_gate_group",
        "auto_create",
        "auto_create_per_s",
        "broker",
        "brokers",
        "checkpoint_log_bytes",
        "client_metrics",
        "clients_max",
        "cluster",
        "cluster_tls_ca_file",
        "cluster_tls_certificate_file",
        "cluster_tls_key_file",
        "config",
        "connection_max_age_ms",
        "connections_max",
        "connections_per_address_max",
        "controller_port",
        "controllers",
        "controllers_fd",
        "data_dir",
        "data_dir_wait_ms",
        "deadline_reserve_ms",
        "default_queues",
        "deliveries_max",
        "deputy_rank",
        "deputy_step_ms",
        "disk_reserve_bytes",
        "drain_delay_ms",
        "drain_timeout_ms",
        "flapping_guard_ms",
        "group_store",
        "groups",
        "groups_max",
        "grpc_client_consumer_min_long_polling_timeout_ms",
        "invisible_duration_min_ms",
        "grpc_host",
        "grpc_port",
        "grpc_reuse_port",
        "host",
        "keeper_fd",
        "kubernetes_groups",
        "link_pending_max",
        "log_format",
        "log_level",
        "long_polling_max_ms",
        "makes_groups",
        "memory_bytes_max",
        "metrics_host",
        "metrics_port",
        "min_in_sync",
        "name",
        "node_id",
        "parked_max",
        "peer_silence_ms",
        "pending_bytes_max",
        "plain_links",
        "port",
        "proxies",
        "proxy_protocol_from",
        "replica_address",
        "replica_id",
        "replica_name",
        "replicas",
        "request_timeout_ms",
        "retention_bytes",
        "retention_ms",
        "reuse_port",
        "routes_file",
        "scaler_host",
        "scaler_port",
        "scaler_tls_certificate_file",
        "scaler_tls_client_ca_file",
        "scaler_tls_key_file",
        "segment_bytes",
        "session_timeout_ms",
        "stall_limit_ms",
        "stop_timeout_ms",
        "supervisor_fd",
        "timer_clock_hold_ms",
        "timer_evacuation_lead_ms",
        "timer_evacuation_rate_bytes",
        "timer_expire_backlog_after_ms",
        "timer_flush_period_ms",
        "timer_load_chunk_records",
        "timer_load_horizon_ms",
        "timer_max_delay_ms",
        "timer_max_pending",
        "timer_max_pinned_part",
        "timer_max_rate",
        "timer_overload_policy",
        "timer_soft_limit_per_second",
        "timer_spread_ms",
        "tls",
        "tls_certificate_file",
        "tls_client_ca_file",
        "tls_key_file",
        "topics_max",
        "unready_after_ms",
    ]
)
# Variables of ours that are no settings, such as those of the command line, which a test holds
# against it; and those that Kubernetes makes for a service of our name.
_OTHER_VARIABLES = re.compile(
    r"ADMIN|ADMIN_TOKEN|ADMIN_CA_FILE|ENDPOINTS|PIPELINE_PRIORITY|COMMIT|TEST_.*"
    r"|(.*_)?SERVICE_HOST|(.*_)?SERVICE_PORT(_.*)?|(.*_)?PORT_\d+_.*"
)

_SERVICE_ADDRESSES = "tcp://", "udp://", "sctp://"  # how the values of the latter begin

EXIT_USAGE = 2  # exit status of a process that was given settings it cannot use


class ProcessSettings(BaseSettings):
    """Settings that every process has."""

    model_config = SettingsConfigDict(
        env_prefix="TIDEMILL_",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        nested_model_default_partial_update=True,
    )

    # What `tidemill` is followed by to start the process; set by each model.
    command: ClassVar[str]

    config: Path | None = Field(
        None, description="YAML file with settings; flags and environment win over it."
    )
    name: str = Field(
        "", description="Name of this process in logs and metrics; empty: the kind of process."
    )
    node_id: str = Field(
        "",
        description="The label of this process on each of its metrics, such as the name of its pod;"
        " empty: its name, of a broker that of its replica.",
    )
    cluster: str = Field("tidemill", description="Name of the cluster: the label on every metric.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severity of the log lines that are written."
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto",
        description="How log lines are written; auto: text for people on a terminal, else JSON.",
    )
    allow_unknown_settings: Flag = Field(
        False,
        description="Start although the file or a variable has a name that no process knows, as"
        " when another version reads them.",
    )
    metrics_host: str = Field(
        "127.0.0.1", description="Address on which /metrics, /livez and /readyz are served."
    )
    metrics_port: Port = Field(
        5557, description="Port of /metrics, /livez and /readyz; 0 picks a free one."
    )
    supervisor_fd: int | None = Field(
        None, description="Set by the standalone supervisor: where to announce readiness."
    )

    @classmethod
    def load(cls, arguments: Sequence[str]) -> Self:
        """Read the settings from `arguments`, the environment and the file they name.

        Prints what is wrong and exits with status 2 when they cannot be used; `--help` exits
        with 0.
        """
        config = _config_of(arguments)
        unknown: list[str] = []
        try:
            flags: CliSettingsSource[Any] = CliSettingsSource(
                cls, cli_prog_name=f"tidemill {cls.command}", cli_parse_args=list(arguments)
            )
            values: dict[str, Any] = {}
            if config:
                unknown += _unknown_in_file(cls, config)
                values.update(_SharedFile(cls, yaml_file=config)())
            # Each source wins over those before it.
            values.update(_Variables(cls)())
            unknown += _unknown_variables(cls)
            values.update(flags())
            settings = cls.model_validate(values)
        except ValidationError as error:
            reasons = [
                f"  {'.'.join(map(str, item['loc'])) or 'settings'}: {_sentence(item['msg'])}"
                for item in error.errors()
            ]
            # What is missing may be what is misspelt.
            reasons += [f"  {each}" for each in unknown]
            _refuse(cls, "\n".join(["these settings cannot be used:", *reasons]))
        # Of a child the supervisor has looked at both already.
        if unknown and settings.supervisor_fd is None and not settings.allow_unknown_settings:
            told = [
                "no process has these settings (--allow-unknown-settings starts all the same):",
                *(f"  {each}" for each in unknown),
            ]
            _refuse(cls, "\n".join(told))
        return settings

    @classmethod
    def settings_customise_sources(cls, *_sources: Any, **sources: Any) -> tuple[Any, ...]:
        """Take what is given, and nothing else: `load` has already read every source."""
        return (sources["init_settings"],)


class FrontSettings(ProcessSettings):
    """How clients are served: settings of the proxy, which the standalone hands on."""

    tls: Literal["off", "optional", "required"] = Field(
        "off",
        description="TLS for clients; optional serves those with and those without on one port.",
    )
    tls_certificate_file: str = Field("", description="Certificate chain of the server, PEM.")
    tls_key_file: str = Field("", description="Private key of the server, PEM.")
    tls_client_ca_file: str = Field(
        "",
        description="Authorities, PEM; when set, clients with TLS must show a certificate that one"
        " of them has signed.",
    )

    proxy_protocol_from: Networks = Field(
        [],
        description="Addresses or networks of load balancers: they must begin each connection with"
        " a header of PROXY protocol 2, and the client's address in it counts.",
    )

    @model_validator(mode="after")
    def check_tls(self) -> Self:
        """Refuse TLS where it cannot be served, and files of it where it is off."""
        files = self.tls_certificate_file or self.tls_key_file or self.tls_client_ca_file
        if self.tls == "off" and files:
            raise ValueError(
                "files for TLS are set and tls is off: set tls to optional or required"
            )
        if self.tls == "optional" and self.tls_client_ca_file:
            raise ValueError(
                "tls_client_ca_file keeps nobody out while tls is optional: set tls to required"
            )
        if self.tls != "off" and not (self.tls_certificate_file and self.tls_key_file):
            raise ValueError("TLS needs tls_certificate_file and tls_key_file")
        return self


class AdminFrontSettings(ProcessSettings):
    """Who may use the REST API and the scaler: settings that the standalone hands on."""

    admin_hosts: Names = Field(
        [],
        description="Names by which the REST API may be called, beside loopback names, its host and"
        " the address that was connected to; others are refused with 421.",
    )
    admin_token_file: str = Field(
        "",
        description="File with the bearer token that callers of the REST API show; read again when"
        " it changes. Empty: nobody needs one.",
    )
    admin_body_bytes_max: int = Field(
        8 << 20,
        ge=1 << 10,
        le=1 << 30,
        description="Largest message that the REST API takes, in bytes of its request; beyond it"
        " 413. The largest message takes 6 MiB as base64. Other requests have 64 KiB.",
    )
    admin_tls_certificate_file: str = Field(
        "", description="Certificate chain of the REST API, PEM; empty: it is served without TLS."
    )
    admin_tls_key_file: str = Field("", description="Private key to it, PEM.")

    scaler_host: str = Field(
        "127.0.0.1", description="Address on which KEDA is told how many consumers are needed."
    )
    scaler_port: Port | None = Field(
        None,
        description="Port of that (gRPC, KEDA's external scaler); 0: a free one. Not set: KEDA is"
        " not served. Who reaches it may read how much groups have to do.",
    )
    scaler_tls_certificate_file: str = Field(
        "", description="Certificate chain of the scaler, PEM; empty: it is served without TLS."
    )
    scaler_tls_key_file: str = Field("", description="Private key to it, PEM.")
    scaler_tls_client_ca_file: str = Field(
        "",
        description="Authorities, PEM; when set, KEDA must show a certificate that one of them has"
        " signed. Not those of the processes: their certificates open brokers.",
    )

    @model_validator(mode="after")
    def check_admin_tls(self) -> Self:
        """Refuse one of the files without the other."""
        if bool(self.admin_tls_certificate_file) != bool(self.admin_tls_key_file):
            raise ValueError(
                "TLS of the REST API needs admin_tls_certificate_file and admin_tls_key_file"
            )
        return self

    @model_validator(mode="after")
    def check_scaler_tls(self) -> Self:
        """Refuse one of the files without the other, and authorities without both."""
        has_both = bool(self.scaler_tls_certificate_file and self.scaler_tls_key_file)
        files = (
            self.scaler_tls_certificate_file,
            self.scaler_tls_key_file,
            self.scaler_tls_client_ca_file,
        )
        if any(files) and not has_both:
            raise ValueError(
                "TLS of the scaler needs scaler_tls_certificate_file and scaler_tls_key_file"
            )
        return self


class ClusterTlsSettings(ProcessSettings):
    """TLS between the processes: the same three files in each of them."""

    cluster_tls_ca_file: str = Field(
        "",
        description="Authorities, PEM, of which one has signed the certificate of every process of"
        " this cluster. Set it with the two below, in all processes: they use TLS with each other.",
    )
    cluster_tls_certificate_file: str = Field(
        "",
        description="Certificate chain of this process, PEM, for both ends of a connection; a"
        " broker's names the address at which the others reach it.",
    )
    cluster_tls_key_file: str = Field("", description="Private key to it, PEM.")

    @model_validator(mode="after")
    def check_cluster_tls(self) -> Self:
        """Refuse some of the files without the others."""
        files = (
            self.cluster_tls_ca_file,
            self.cluster_tls_certificate_file,
            self.cluster_tls_key_file,
        )
        if any(files) and not all(files):
            raise ValueError(
                "TLS between the processes needs cluster_tls_ca_file, cluster_tls_certificate_file"
                " and cluster_tls_key_file"
            )
        return self


class _SharedFile(YamlConfigSettingsSource):
    """A YAML file that may hold the settings of other processes too."""

    def __call__(self) -> dict[str, Any]:
        fields = self.settings_cls.model_fields
        return {name: value for name, value in super().__call__().items() if name in fields}


class _Variables(EnvSettingsSource):
    """The environment, without what Kubernetes puts there for a service of the name of a setting.

    A service "tidemill-admin" makes TIDEMILL_ADMIN_PORT=tcp://10.0.0.1:8080, and one "tidemill"
    TIDEMILL_PORT.
    """

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {
            name: value
            for name, value in super()._load_env_vars().items()
            if not (value or "").startswith(_SERVICE_ADDRESSES)
        }


def _sentence(message: str) -> str:
    return message.removeprefix("Value error, ")  # Pydantic's, before a reason of ours.


def _config_of(arguments: Sequence[str]) -> str | None:
    """Find the configuration file before the other settings are read, since it holds some."""
    config = os.environ.get("TIDEMILL_CONFIG")
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            config = arguments[index + 1]
        elif argument.startswith("--config="):
            config = argument.removeprefix("--config=")
    return config


def _unknown_in_file(settings: type[ProcessSettings], config: str) -> list[str]:
    """Return what is to be said of keys that no process knows; refuse what holds no settings."""
    path = Path(config)
    if not path.exists():
        _refuse(settings, f"the file given by --config does not exist: {config}")
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        _refuse(settings, f"the file given by --config cannot be read: {config}: {error.strerror}")
    except yaml.YAMLError as error:
        _refuse(settings, f"the file given by --config is no YAML: {config}: {error}")
    if content is not None and not isinstance(content, dict):
        _refuse(settings, f"the file given by --config holds no `name: value` pairs: {config}")
    known = _known(settings)
    return [
        f"{key} in {config}{_nearest(str(key), known)}" for key in content or {} if key not in known
    ]


def _unknown_variables(settings: type[ProcessSettings]) -> list[str]:
    """Return what is to be said of variables of ours that no process knows."""
    known = _known(settings)
    unknown = []
    for variable, value in os.environ.items():
        name = variable.removeprefix("TIDEMILL_")
        is_other = _OTHER_VARIABLES.fullmatch(name) or value.startswith(_SERVICE_ADDRESSES)
        if name != variable and name.lower() not in known and not is_other:
            nearest = _nearest(name.lower(), known, as_variable=True)
            unknown.append(f"{variable} in the environment{nearest}")
    return unknown


def _known(settings: type[ProcessSettings]) -> frozenset[str]:
    return KNOWN_KEYS | settings.model_fields.keys()


def _nearest(name: str, known: frozenset[str], *, as_variable: bool = False) -> str:
    """Return the question whether a known name was meant; "" where none is like it."""
    # Written with hyphens it is meant as it is.
    found = difflib.get_close_matches(name.replace("-", "_"), sorted(known), n=1)
    if not found:
        return ""
    return f"; did you mean {f'TIDEMILL_{found[0].upper()}' if as_variable else found[0]}?"


def _refuse(settings: type[ProcessSettings], reason: str) -> NoReturn:
    sys.stderr.write(f"tidemill {settings.command}: {reason}\n")
    sys.exit(EXIT_USAGE)
