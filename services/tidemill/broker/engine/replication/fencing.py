"""All comparisons of epochs and versions: which views, streams and masters are still valid.

They are in one module for two reasons. Each of them protects against a deposed master. An
exploration disables each of them to show that it is needed.
"""

from __future__ import annotations

from tidemill.common.replica_group import ReplicaRun, ReplicationView


def is_of_group(view: ReplicationView, group: str) -> bool:
    """Return whether a view belongs to this broker group. Views of other groups are ignored.

    Addresses are reused, and settings contain mistakes.
    """
    return view.group in ("", group)


def is_news(known: ReplicationView | None, view: ReplicationView, *, epoch_seen: int) -> bool:
    """Return whether a view is newer than the known one and not from a restored backup."""
    return (known is None or view.version > known.version) and view.epoch >= epoch_seen


def may_lead(view: ReplicationView, me: ReplicaRun, *, epoch_seen: int) -> bool:
    """Return whether a view makes this run the master (F-14).

    A later run of the same replica takes this run's place in the set.
    """
    return view.master == me and me in view.sss and view.epoch >= epoch_seen


def may_begin(view: ReplicationView, me: ReplicaRun, *, epoch_seen: int, log_epoch: int) -> bool:
    """Return whether this run may begin the epoch of a view; its last record has `log_epoch`.

    It may begin an epoch only once. After it stepped down, a late view must not promote it again.
    """
    return may_lead(view, me, epoch_seen=epoch_seen) and view.epoch > log_epoch


def may_serve(epoch: int, *, epoch_seen: int) -> bool:
    """Return whether the master of `epoch` is current for a replica that has seen `epoch_seen`."""
    return epoch_seen <= epoch


def may_follow(epoch: int, *, epoch_seen: int) -> bool:
    """Return whether a replica may accept and ack data from the master of `epoch` (F-10)."""
    return epoch >= epoch_seen


def is_late(silent_ms: int, *, silence_ms: int) -> bool:
    """Return whether a stream was silent for so long that it should have been closed.

    This process was paused. Meanwhile another replica may have become master without its newest
    records, because an operator could not wait. Without this check, processes that were paused
    together would confirm these records: by an ack that waited, or by an earlier ack when the
    master's own sync ends.
    """
    return silent_ms > silence_ms


def is_of_epoch(epoch: int, other: int) -> bool:
    """Return whether a frame or an ack belongs to the epoch of its stream (8.10)."""
    return epoch == other
