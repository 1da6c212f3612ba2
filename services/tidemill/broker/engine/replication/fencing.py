"""Every comparison of epochs and versions: what is news, what is over, and who may still speak.

They stand together since each of them alone keeps a deposed master from doing harm (failover.md
14), and since an exploration breaks each of them to see whether it is needed.
"""

from __future__ import annotations

from tidemill.common.replica_group import ReplicaRun, ReplicationView


def is_of_group(view: ReplicationView, group: str) -> bool:
    """Whether a view is of this broker group: of another one nothing counts, whatever it says.

    Addresses are given to others, and settings have slips.
    """
    return view.group in ("", group)


def is_news(known: ReplicationView | None, view: ReplicationView, *, epoch_seen: int) -> bool:
    """Whether a view is to be believed: newer than what is known, and of no restored backup."""
    return (known is None or view.version > known.version) and view.epoch >= epoch_seen


def may_lead(view: ReplicationView, me: ReplicaRun, *, epoch_seen: int) -> bool:
    """Whether a view makes this run the master (F-14).

    A run that has registered in our place since has our place in the set.
    """
    return view.master == me and me in view.sss and view.epoch >= epoch_seen


def may_begin(view: ReplicationView, me: ReplicaRun, *, epoch_seen: int, log_epoch: int) -> bool:
    """Whether this run may begin the epoch of a view, whose last record is of `log_epoch`.

    Once: who has led it, and stepped down since, may not do so again when the view comes late.
    """
    return may_lead(view, me, epoch_seen=epoch_seen) and view.epoch > log_epoch


def may_serve(epoch: int, *, epoch_seen: int) -> bool:
    """Whether the master of `epoch` is still that, to a replica that has seen `epoch_seen`."""
    return epoch_seen <= epoch


def may_follow(epoch: int, *, epoch_seen: int) -> bool:
    """Whether a replica may take anything from the master of `epoch`, and ack it (F-10)."""
    return epoch >= epoch_seen


def is_late(silent_ms: int, *, silence_ms: int) -> bool:
    """Whether what a stream brings is of before a silence in which it should have been ended.

    It has waited while this process stood still. By now another one may be master, and one that
    lacks it, where an operator could not wait: nothing else would keep who stood still together
    from confirming it.
    """
    return silent_ms > silence_ms


def is_of_epoch(epoch: int, other: int) -> bool:
    """Whether a frame or an ack is of the epoch that its stream belongs to (8.10)."""
    return epoch == other
