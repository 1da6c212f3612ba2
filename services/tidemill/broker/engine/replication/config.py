"""What a replica is told by its settings, and the times of specification section 20."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AckMode(Enum):
    """When a replica counts as having a record."""

    SYNC_FSYNC = "sync-fsync"  # its disk has it: a power cut of all replicas loses nothing
    SYNC_MEMORY = "sync-memory"  # its process has written it: a kill of all replicas loses nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """How long the machines of this package wait. Nothing here is needed for safety."""

    ack_mode: AckMode = AckMode.SYNC_FSYNC
    # A stream says something this often, and is given up after so long a silence.
    heartbeat_ms: int = 200
    stream_silence_ms: int = 1_000
    # From the first failed dial of a master to the longest pause between two. The first is short: a
    # replica often hears of an epoch before its master does.
    dial_first_ms: int = 50
    dial_longest_ms: int = 1_000
    # A member whose stream is gone for longer, or that lags by more time, is proposed away.
    stream_gone_ms: int = 300
    lag_longest_ms: int = 1_500
    # A proposal that nothing was heard of is sent again.
    proposal_again_ms: int = 500
    # One that was refused: often for a view that is on its way to us.
    refused_again_ms: int = 100
    # Who was removed so often in the window must have been caught up for so long to come back.
    removals_max: int = 3
    removals_window_ms: int = 60_000
    caught_up_for_ms: int = 10_000
    # Who hands over refuses sends for this long at most.
    transfer_timeout_ms: int = 2_000
    # After one that came to nothing: who asks, asks on, and sends would be refused all the time.
    transfer_pause_ms: int = 30_000
    # Whoever lags by less is there in milliseconds: it may be waited for.
    near_bytes: int = 1 << 20
    # Sent to one replica, and not acked: a second of a gigabit link is 8 of these.
    window_bytes: int = 16 << 20
    frame_bytes: int = 1 << 20
    # Sent to one replica, and not applied there: of the smallest records that is half a second.
    unapplied_bytes: int = 16 << 20
    # Who is elected and has more to apply than this, 30 ms of the smallest records, does so between
    # other events; but for so long at most, since somebody waits for a master.
    applied_at_once_bytes: int = 1 << 20
    apply_first_ms: int = 500
