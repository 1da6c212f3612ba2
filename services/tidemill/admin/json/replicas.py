"""The JSON of replicas and of elections."""

from __future__ import annotations

from pydantic import Field

from tidemill.admin.json.schema import Schema


class ReplicaStateView(Schema):
    """One replica of a broker group, as the controllers see it."""

    replica: int = Field(description="Its number, from 0.")
    role: str = Field(
        description="master, in-sync, learner: one that has yet to catch up, or retired: one that"
        " counts no more."
    )
    retired: str | None = Field(
        None,
        description="Why it is to count no more: drained, by an operator, or surplus, where the"
        " group is to have fewer; missing: it counts.",
    )
    address: str = Field(description="Where it serves.")
    silent_ms: int = Field(description="For how long nothing was heard of it.")
    log_end: int | None = Field(None, description="Where its log ends; missing: not heard of.")
    confirm: int | None = Field(None, description="Up to where it knows the log to be confirmed.")
    lag_bytes: int | None = Field(None, description="How much less it has than the master.")
    unclean: bool = Field(description="Whether it has started without all that it had acked.")
    diverged: bool = Field(
        description="Whether its log is not its master's, and may not be cut: somebody must look."
    )
    unheard: list[int] = Field(
        description="Which replicas it does not hear, though the controllers hear both."
    )


class CutTailView(Schema):
    """What a replica had and the new master did not: it was cut, and nobody was told OK for it."""

    replica: int = Field(description="Whose log was cut.")
    offset: int = Field(description="From this byte of the log on.")
    bytes: int = Field(description="How many bytes.")
    records: int = Field(description="How many records: messages, acks and others.")
    confirmed_bytes: int = Field(
        description="How many of the bytes had been confirmed: 0, but for an unclean election, by"
        " which they are lost."
    )


class ElectionView(Schema):
    """One change of the master."""

    epoch: int = Field(description="The epoch that it began.")
    source: int | None = Field(None, description="Who was the master; missing: nobody.")
    target: int = Field(description="Who is the master since.")
    reason: str = Field(description="Why.")
    at_ms: int = Field(description="When, by the controller's clock.")
    detected_ms: int = Field(
        description="For how long the master had not been heard by then; of a planned transfer, for"
        " how long it had taken no sends."
    )
    away_ms: int | None = Field(
        None,
        description="For how long sends were not answered, from the loss of the master to the first"
        " commit of the next one; missing: not measured, or not over yet.",
    )
    cuts: list[CutTailView] = Field(
        description="What replicas had that the new master did not, and cut since."
    )


class ReplicatedBrokerGroupView(Schema):
    """A broker group and its replicas."""

    name: str = Field(description="Name of the broker group.")
    epoch: int = Field(description="One more with each change of the master.")
    version: int = Field(description="One more with each change of the record.")
    master: int | None = Field(None, description="Who is the master; missing: nobody.")
    in_sync: int = Field(description="How many replicas have all that is confirmed.")
    min_in_sync: int = Field(description="With fewer, nothing is acknowledged.")
    unclean_since: int | None = Field(
        None, description="The epoch of the last election that may have lost something."
    )
    alarm: str | None = Field(None, description="Why it is not available, or needs somebody.")
    notice: str | None = Field(
        None, description="What a change of its pods waits for, or what did not come about."
    )
    transfer: int | None = Field(
        None, description="Who was asked to take over, as long as it has not."
    )
    replicas: list[ReplicaStateView] = Field(description="All that have registered.")
    history: list[ElectionView] = Field(description="The last elections, the latest first.")


class ReplicatedBrokerGroupListView(Schema):
    """All broker groups that controllers watch over."""

    items: list[ReplicatedBrokerGroupView] = Field(description="The broker groups, by name.")


class MasterTransferRequest(Schema):
    """Who is to be the master."""

    target: int | None = Field(
        None, ge=0, le=999, description="Number of the replica; missing: one that is in sync."
    )


class ReplicaDrainRequest(Schema):
    """Which replica is to be emptied of its duties."""

    replica: int = Field(ge=0, le=999, description="Number of the replica.")
    undo: bool = Field(False, description="Let it count again instead.")


class MinInSyncRequest(Schema):
    """How many replicas must have a message."""

    min_in_sync: int = Field(ge=1, le=7, description="With fewer, nothing is acknowledged.")


class MasterReplacementRequest(Schema):
    """Who is to be the master although it may lack something."""

    target: int = Field(ge=0, le=999, description="Number of the replica.")
    reason: str = Field(min_length=1, max_length=200, description="Why, for the history.")
