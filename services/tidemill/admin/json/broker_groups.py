"""The JSON of broker groups."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidemill.admin.json.schema import Schema, Text


class BacklogItemView(Schema):
    """What is left of one topic for one consumer group."""

    topic: str = Field(description="The topic.")
    group: str | None = Field(
        None, description="The consumer group; missing where nobody has ever read the topic."
    )
    messages: int = Field(description="Messages that the group can receive.")
    in_flight: int = Field(description="Messages that it has, and has not acked yet.")
    unread: bool = Field(
        description="Whether it has not begun to read the topic there, and would begin with the"
        " first message."
    )
    pulled_queue: int | None = Field(
        None, description="The queue, of a group that pulls: it has not said that it has these."
    )


class BacklogView(Schema):
    """What is left at a broker group for somebody to receive."""

    messages: int = Field(
        description="Messages that groups can receive, summed over the groups that read a topic or"
        " may: a group that reads nothing anywhere may begin with any. Of a topic that nobody reads"
        " or may, all it holds."
    )
    in_flight: int = Field(description="Messages that were popped and not acked yet.")
    delayed: int = Field(description="Delayed messages that wait for their time.")
    items: list[BacklogItemView] = Field(
        [], description="Of which topics and groups; of very many only the first."
    )
    unnamed: int = Field(0, description="How many more items there are.")
    at_ms: int | None = Field(
        None, description="When it was counted, where it cannot be counted now."
    )


class ReplicaView(Schema):
    """One broker of a group."""

    name: str = Field(description="Its name.")
    role: Literal["master", "replica"] = Field(description="Whether it takes what is sent.")
    in_sync: bool = Field(description="Whether it has all that the master has confirmed.")
    behind_bytes: int = Field(description="Bytes of the log that it does not have yet.")


class BrokerGroupView(Schema):
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
    replicas: list[ReplicaView] = Field(description="Its brokers, the master first.")
    left: BacklogView | None = Field(
        None, description="Of a draining one: what is left there; missing where nobody knows."
    )
    last_left: BacklogView | None = Field(
        None,
        description="Of a draining one that cannot be asked: what it said last; missing where it"
        " has said nothing since its home began.",
    )


class BrokerGroupListView(Schema):
    """All broker groups."""

    items: list[BrokerGroupView] = Field(description="The broker groups, the home first.")


class NewBrokerGroup(Schema):
    """A broker group to add."""

    address: Text = Field(
        min_length=1, max_length=300, description="host:port at which its broker serves."
    )
    force: bool = Field(
        False,
        description="Also where nobody answers at the address by that name: it gets places of"
        " message groups all the same, whose messages are refused until it is there.",
    )


class BrokerGroupChangeView(Schema):
    """What a change of a broker group does."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked: what the caller says of itself, and its address.")
    group: BrokerGroupView = Field(
        description="The broker group; of a removal as it was, with what was left there."
    )
