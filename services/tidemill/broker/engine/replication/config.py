"""Settings of a replica and the times of replication."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AckMode(Enum):
    """The moment at which a replica has a record."""

    # The record is on its disk: a power cut of all replicas loses nothing.
    SYNC_FSYNC = "sync-fsync"
    # Its process has written the record: killing all replicas loses nothing.
    SYNC_MEMORY = "sync-memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """Waiting times and sizes. Safety does not depend on them."""

    ack_mode: AckMode = AckMode.SYNC_FSYNC
    # A stream sends at least this often. After this silence its peer closes it.
    heartbeat_ms: int = 200
    stream_silence_ms: int = 1_000
    # Pauses between dials of a master. The first is short: a replica often learns of an epoch
    # before the master does.
    dial_first_ms: int = 50
    dial_longest_ms: int = 1_000
    # The master proposes to remove a member if its stream is down longer, or lags by more time.
    stream_gone_ms: int = 300
    lag_longest_ms: int = 1_500
    # The master repeats a proposal without a result after this time.
    proposal_again_ms: int = 500
    # In doubt it waits longer each time. The controllers wait a second for their store.
    proof_again_ms_max: int = 2_000
    # After a rejection it repeats sooner: often the newer view is about to arrive.
    refused_again_ms: int = 100
    # A replica that was removed this often within the window must keep up this long before it
    # rejoins.
    removals_max: int = 3
    removals_window_ms: int = 60_000
    caught_up_for_ms: int = 10_000
    # A master that hands over rejects sends for at most this time.
    transfer_timeout_ms: int = 2_000
    # Pause after a failed hand-over. Callers repeat the request, and would block sends all the
    # time.
    transfer_pause_ms: int = 30_000
    # A replica that lags by less catches up within milliseconds, so commits may wait for it.
    near_bytes: int = 1 << 20
    # Bytes sent to one replica and not acked: a gigabit link sends 8 times this much per second.
    window_bytes: int = 16 << 20
    frame_bytes: int = 1 << 20
    # Bytes sent to one replica and not applied there: half a second of the smallest records.
    unapplied_bytes: int = 16 << 20
    # If an elected replica has more than this to apply (30 ms of the smallest records), it applies
    # it between other events. It does so for at most this time, because the group waits for its
    # master.
    applied_at_once_bytes: int = 1 << 20
    apply_first_ms: int = 500
