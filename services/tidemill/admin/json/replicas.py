"""The JSON of replicas and of elections."""

from __future__ import annotations

from pydantic import Field, StrictBool, StrictInt

from tidemill.admin.json.schema import BY, DRY_RUN, Schema

MIN_IN_SYNC_TEXT = "Number of replicas that must store a message before it is acknowledged."
MIN_IN_SYNC = Field(description=MIN_IN_SYNC_TEXT)


class ReplicaStateView(Schema):
    """One replica of a broker group, as the controllers see it."""

    replica: int = Field(description="Number of the replica, from 0.")
    role: str = Field(
        description="master, in-sync, learner (is catching up) or retired (does not count)."
    )
    retired: str | None = Field(
        None,
        description="Reason for its retirement: drained (by an operator) or surplus (the group has"
        " too many replicas). Missing if it is not retired.",
    )
    address: str = Field(description="Address (host:port) of the replica.")
    silent_ms: int = Field(description="Time since its last heartbeat, in ms.")
    log_end: int | None = Field(
        None, description="End of its log. Missing if it has not sent a heartbeat."
    )
    confirm: int | None = Field(None, description="Confirm offset that the replica knows.")
    lag_bytes: int | None = Field(None, description="Bytes of log that the master has in addition.")
    unclean: bool = Field(description="Whether it lost acknowledged records at its last start.")
    diverged: bool = Field(
        description="Whether its log differs from the log of the master and must not be cut. An"
        " operator must decide."
    )
    full: bool = Field(
        description="Whether its disk is full, so that it accepts no messages as master. It counts"
        " as full until a segment of the log fits."
    )
    unheard: list[int] = Field(
        description="Replicas that it cannot reach although the controllers reach both."
    )


class CutTailView(Schema):
    """Records of a replica that the new master did not have, so that they were cut."""

    replica: int = Field(description="Number of the replica.")
    offset: int = Field(description="Log offset of the first cut byte.")
    bytes: int = Field(description="Number of cut bytes.")
    records: int = Field(description="Number of cut records: messages, acks and others.")
    confirmed_bytes: int = Field(
        description="Number of cut bytes that were confirmed. 0, except after an unclean election,"
        " which loses them."
    )


class ElectionView(Schema):
    """One change of the master."""

    epoch: int = Field(description="The new epoch.")
    source: int | None = Field(None, description="The previous master. Missing without one.")
    target: int = Field(description="The new master.")
    reason: str = Field(description="Reason of the change.")
    at_ms: int = Field(description="Time of the change (Unix, ms), by the clock of the controller.")
    detected_ms: int = Field(
        description="Time from the last heartbeat of the master to the election, in ms. For a"
        " planned transfer: time without accepted sends."
    )
    away_ms: int | None = Field(
        None,
        description="Time without answers to sends, from the loss of the master to the first commit"
        " of the next one, in ms. Missing if it is not measured or not over.",
    )
    cuts: list[CutTailView] = Field(
        description="Records that replicas cut because the new master did not have them."
    )


class ReplicatedBrokerGroupView(Schema):
    """A broker group and its replicas."""

    name: str = Field(description="Name of the broker group.")
    epoch: int = Field(description="Number of changes of the master.")
    version: int = Field(description="Number of changes of the record.")
    master: int | None = Field(None, description="Number of the master. Missing without one.")
    in_sync: int = Field(description="Number of replicas in the sync state set.")
    min_in_sync: int = MIN_IN_SYNC
    unclean_since: int | None = Field(
        None, description="Epoch of the last unclean election, which may have lost messages."
    )
    alarm: str | None = Field(
        None, description="Reason why the broker group is unavailable or needs an operator."
    )
    notice: str | None = Field(
        None, description="Reason why a change of its pods waits or was not done."
    )
    transfer: int | None = Field(None, description="Target of a planned transfer in progress.")
    replicas: list[ReplicaStateView] = Field(description="All registered replicas.")
    history: list[ElectionView] = Field(description="The last elections, the latest first.")


class ReplicaChangeView(ReplicatedBrokerGroupView):
    """A broker group after a change of its replicas, or as a dry run plans it."""

    dry_run: bool = DRY_RUN
    by: str = BY
    lost_bytes: int | None = Field(
        None,
        description="Of a dry run: bytes of confirmed log that the new master does not have, at the"
        " last heartbeats: messages, acks and others. Missing if unknown.",
    )
    unknown: str | None = Field(
        None, description="Why `lostBytes` is unknown. Missing if it is known."
    )


class ReplicatedBrokerGroupListView(Schema):
    """All broker groups with a record at the controllers."""

    items: list[ReplicatedBrokerGroupView] = Field(description="The broker groups, by name.")


class MasterTransferRequest(Schema):
    """The next master."""

    target: StrictInt | None = Field(
        None, ge=0, le=999, description="Number of the replica. Default: any one in sync."
    )


class ReplicaDrainRequest(Schema):
    """The replica to drain."""

    replica: StrictInt = Field(ge=0, le=999, description="Number of the replica.")
    undo: StrictBool = Field(False, description="Undo the drain instead.")


class MinInSyncRequest(Schema):
    """The number of replicas that must store a message."""

    min_in_sync: StrictInt = Field(ge=1, le=7, description=MIN_IN_SYNC_TEXT)


class MasterReplacementRequest(Schema):
    """The replica to make master even if it lacks acknowledged messages."""

    target: StrictInt = Field(ge=0, le=999, description="Number of the replica.")
    reason: str = Field(min_length=1, max_length=200, description="Reason, for the history.")
