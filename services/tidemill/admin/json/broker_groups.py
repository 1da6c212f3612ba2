"""The JSON of broker groups and their backlogs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, StrictBool

from tidemill.admin.json.schema import BY, DRY_RUN, Schema, Text

# A documented pattern: host names, IPv4 and IPv6 addresses. `HostPort.parse` checks the address.
_NAME = r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*"
_IPV6 = r"\[(([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|([0-9a-f]{1,4}:){1,6}:[0-9a-f]{1,4}|::1)\]"
ADDRESS = f"^({_NAME}|{_IPV6}):([1-9][0-9]{{0,3}}|[1-5][0-9]{{4}})$"


class BacklogItemView(Schema):
    """The backlog of one topic for one consumer group."""

    topic: str = Field(description="Name of the topic.")
    group: str | None = Field(
        None, description="Name of the consumer group. Missing if no group has read the topic."
    )
    messages: int = Field(description="Messages that the group can receive.")
    in_flight: int = Field(description="Messages in flight: delivered to the group and not acked.")
    unread: bool = Field(
        description="Whether the group has not read the topic there yet. It would begin with the"
        " first message."
    )
    pulled_queue: int | None = Field(
        None,
        description="Of a group that pulls: the queue in which its pull offset is behind these"
        " messages.",
    )


class BacklogView(Schema):
    """The messages at a broker group that consumers still have to receive."""

    messages: int = Field(
        description="Messages that groups can receive, summed over the groups that read a topic. A"
        " group that has not read any topic may still begin with any topic. All messages of a topic"
        " without readers count."
    )
    in_flight: int = Field(description="Messages in flight: delivered and not acked.")
    delayed: int = Field(description="Pending delayed messages.")
    half_messages: int = Field(
        0, description="Half messages that are neither committed nor rolled back."
    )
    dedup_keys: int = Field(
        0, description="Known dedup keys. Another broker group would store their repeats."
    )
    items: list[BacklogItemView] = Field(
        [], description="Backlog by topic and group; a long list is cut."
    )
    unnamed: int = Field(0, description="Number of items that were cut.")
    at_ms: int | None = Field(
        None, description="Time of the count (Unix, ms), if the broker group is unreachable now."
    )


class ReplicaView(Schema):
    """One replica of a broker group."""

    name: str = Field(description="Name of the replica.")
    role: Literal["master", "replica"] = Field(description="Only the master accepts messages.")
    in_sync: bool = Field(description="Whether the replica is in the sync state set.")
    behind_bytes: int = Field(description="Bytes of the log that the replica does not have yet.")


class BrokerGroupView(Schema):
    """A broker group."""

    name: str = Field(description="Name of the broker group.")
    state: Literal["active", "draining"] = Field(
        description="draining: it accepts no new messages and can be removed when its backlog is"
        " empty."
    )
    is_home: bool = Field(
        description="Whether it is the home, which stores topics, groups and the list of members."
    )
    address: str = Field(
        description="Address (host:port) in the list of broker groups. With controllers, the other"
        " processes use it to find the master."
    )
    reachable: bool = Field(description="Whether it answers the admin process.")
    reason: str | None = Field(None, description="Known problem of the broker group, if any.")
    unreachable_ms: int | None = Field(
        None,
        description="Time for which it has not answered the home, in ms: new topics and consumer"
        " groups do not reach it. Missing while it answers.",
    )
    master: str = Field(description="Name of the replica that accepts messages.")
    master_address: str | None = Field(
        None,
        description="Address (host:port) of the master, from the controllers. Missing without"
        " controllers or without a master.",
    )
    epoch: int | None = Field(
        None, description="Number of changes of the master. Missing if it is unreachable."
    )
    feature_level: int | None = Field(
        None,
        description="Feature level: versions with a lower one cannot read its log. Missing if it is"
        " unreachable.",
    )
    replicas: list[ReplicaView] = Field(description="Its replicas, the master first.")
    left: BacklogView | None = Field(
        None, description="Backlog of a draining broker group. Missing if it is unknown."
    )
    last_left: BacklogView | None = Field(
        None,
        description="Last known backlog of a draining broker group that is unreachable. Missing if"
        " it has not reported one since the start of the home.",
    )


class BrokerGroupListView(Schema):
    """All broker groups."""

    items: list[BrokerGroupView] = Field(description="The broker groups, the home first.")


class NewBrokerGroup(Schema):
    """A broker group to add."""

    address: Text = Field(
        min_length=1,
        max_length=255,
        description="Address (host:port) of its broker.",
        json_schema_extra={"pattern": ADDRESS},
    )
    force: StrictBool = Field(
        False,
        description="Add it even if no broker with this name answers at the address. It receives"
        " message groups at once; their messages are rejected until the broker is up.",
    )


class BrokerGroupChangeView(Schema):
    """The result of a change of a broker group."""

    dry_run: bool = DRY_RUN
    by: str = BY
    group: BrokerGroupView = Field(
        description="The broker group. After a removal: its last state with its backlog."
    )
