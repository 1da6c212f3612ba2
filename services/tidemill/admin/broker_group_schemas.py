"""The JSON of broker groups."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidemill.admin.schemas import Schema, Text


class Left(Schema):
    """What is left at a broker group for somebody to receive."""

    messages: int = Field(
        description="Messages that groups can receive; of a topic that no group reads, all it"
        " holds."
    )
    in_flight: int = Field(description="Messages that were popped and not acked yet.")
    delayed: int = Field(description="Delayed messages that wait for their time.")


class Replica(Schema):
    """One broker of a group."""

    name: str = Field(description="Its name.")
    role: Literal["master", "replica"] = Field(description="Whether it takes what is sent.")
    in_sync: bool = Field(description="Whether it has all that the master has confirmed.")
    behind_bytes: int = Field(description="Bytes of the log that it does not have yet.")


class BrokerGroup(Schema):
    """A broker group."""

    name: str = Field(description="Its name.")
    state: Literal["active", "draining"] = Field(
        description="draining: it takes no new messages, and may be removed when it is empty."
    )
    is_home: bool = Field(
        description="Whether it decides about topics, consumer groups and broker groups."
    )
    address: str = Field(description="Where the other processes reach it.")
    reachable: bool = Field(description="Whether it answers the admin process.")
    reason: str | None = Field(
        None, description="What is wrong with it, where something is known to be."
    )
    master: str = Field(description="Name of the broker that takes what is sent.")
    epoch: int | None = Field(
        None,
        description="How often a broker has taken over its log; missing where it cannot be asked.",
    )
    replicas: list[Replica] = Field(description="Its brokers, the master first.")
    left: Left | None = Field(
        None, description="Of a draining one: what is left there; missing where nobody knows."
    )


class BrokerGroupList(Schema):
    """All broker groups."""

    items: list[BrokerGroup] = Field(description="The broker groups, the home first.")


class NewMember(Schema):
    """A broker group to add."""

    address: Text = Field(
        min_length=1, max_length=300, description="host:port at which its broker serves."
    )


class BrokerGroupChange(Schema):
    """What a change of a broker group does."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked: what the caller says of itself, and its address.")
    group: BrokerGroup = Field(description="The broker group.")
