"""The JSON of processes: their state, settings, log levels and slow calls."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from tidemill.admin.json.schema import UNREACHABLE, LowerCase, Schema

PARTS_UNKNOWN: Final = (
    "the broker took less than 50 ms, or rejected the call, or the call has several messages"
)
NAME = Field(description="Name of the process.", examples=["proxy-0"])


class CertificateView(Schema):
    """A certificate that a process uses."""

    use: str = Field(
        description="Its use: clients (of a proxy), cluster (between processes), members (of a"
        " broker to other brokers), admin, admin_grpc or scaler.",
        examples=["clients"],
    )
    expires_at_ms: int | None = Field(
        None, description="When it expires (Unix, ms). Missing if it is unknown."
    )
    unknown: str | None = Field(None, description="Why its end is unknown.")


class ProcessView(Schema):
    """One process of the cluster."""

    name: str = NAME
    kind: str = Field(description="admin, broker, controller or proxy.")
    address: str = Field(description="Address that it serves. Empty until it serves.")
    version: str = Field(description="Version of its program.")
    commit: str | None = Field(None, description="Commit of its image. Missing outside an image.")
    feature_level: int = Field(description="Feature level of its program.")
    pid: int = Field(description="Process id on its machine or in its container.")
    started_at_ms: int = Field(description="Time of its start (Unix, ms).")
    ready: bool = Field(description="Whether its readiness check passes.")
    log_level: str = Field(description="Lowest severity of its log lines.")
    log_level_until_ms: int | None = Field(
        None,
        description="When it returns to the log level of its settings (Unix, ms). Missing if the"
        " level stays.",
    )
    clock_skew_ms: int = Field(
        description="Its clock minus the clock of this process, exact to half the time of a call."
    )
    certificates: list[CertificateView] | None = Field(
        None,
        description="Its certificates, by use; empty without TLS. Missing if the process has an"
        " older version, which does not report them.",
    )


class ProcessListView(Schema):
    """All processes of the cluster."""

    items: list[ProcessView] = Field(description="The processes, by name.")
    unreachable: list[str] | None = UNREACHABLE


class SettingView(Schema):
    """The value of a setting in a process."""

    name: str = Field(description="Name of the setting.", examples=["log_level"])
    value: Any = Field(description="Value in effect since the start of the process.")
    default: Any = Field(description="Value without a flag, a variable or a file.")
    source: Literal["DEFAULT", "FILE", "ENVIRONMENT", "FLAG"] = Field(
        description="Origin of the value. A standalone passes flags to its processes."
    )


class SettingListView(Schema):
    """The settings of a process. They need a restart of the process to change."""

    process: str = NAME
    items: list[SettingView] = Field(
        description="The settings, by name. No setting has a secret: settings name files with them."
    )


class LogLevelRequest(Schema):
    """A new log level of a process."""

    level: Annotated[Literal["debug", "info", "warning", "error"], LowerCase] | None = Field(
        None,
        description="Lowest severity of log lines. Missing: the level of the settings of the"
        " process.",
        examples=["debug"],
    )
    for_ms: int = Field(
        1_800_000,
        strict=True,
        ge=1,
        description="Time until the process returns to the level of its settings, in ms; at most a"
        " day. Default: 30 minutes.",
        le=86_400_000,
    )


class LogLevelView(Schema):
    """The log level of a process before and after a change."""

    process: str = NAME
    before: str = Field(description="Level before the change.")
    level: str = Field(description="Level after the change.")
    until_ms: int | None = Field(
        None,
        description="When the process returns to the level of its settings (Unix, ms). Missing if"
        " it has that level.",
    )


class LogLevelListView(Schema):
    """The changed log levels."""

    items: list[LogLevelView] = Field(description="The changed processes, by name.")
    unreachable: list[str] | None = UNREACHABLE


class SlowCallPartsView(Schema):
    """Where the time of the slowest request of a call to a broker went.

    The rest of the duration is of the proxy: it checks, waits for quotas and repeats.
    """

    queue_ms: int | None = Field(
        None,
        description="Waiting at the proxy, on the network and at the broker, in ms. Missing if it"
        " is unknown.",
    )
    broker_ms: int = Field(
        description="Applying the requests of the round, writing them and building the replies, in"
        " ms."
    )
    sync_ms: int | None = Field(
        None, description="Until the log was durable, in ms. Missing if it is unknown."
    )
    replicate_ms: int | None = Field(
        None,
        description="From then until enough replicas had the message, in ms. Missing if it is"
        " unknown, or if the broker group has no replicas.",
    )


class SlowCallView(Schema):
    """A call of a client that took long."""

    process: str = NAME
    at_ms: int = Field(description="Time of its end (Unix, ms).")
    method: str = Field(description="Method, such as send_message.")
    duration_ms: int = Field(description="Duration at the process, in ms.")
    topic: str | None = Field(None, description="Topic. Missing if the method has none.")
    group: str | None = Field(None, description="Consumer group. Missing if the method has none.")
    client_id: str | None = Field(None, description="Id of the client.")
    code: str = Field(description="Code of the response.", examples=["OK"])
    parts: SlowCallPartsView | None = Field(
        None, description="Where the time went. Missing if it is unknown."
    )
    parts_unknown: str | None = Field(
        None, description="Why `parts` is missing.", examples=[PARTS_UNKNOWN]
    )


class SlowCallListView(Schema):
    """The last slow calls of all proxies."""

    items: list[SlowCallView] = Field(description="The calls, the newest first.")
    unreachable: list[str] | None = UNREACHABLE
