"""The claim of a starting replica: whether its log has all messages that earlier runs acked.

A clean replica stays in the sync state set. An unclean replica leaves the set before anything else
happens. Invariant: the replica replaces its record of the last run only after the controllers have
accepted a true registration. So a crash before that does not hide the loss.

If acks are durable, an uncut log has all acked messages. If bytes behind the known confirmed end
are damaged and no replica has them, the replica cuts its log there. It records the cut first.
"""

from __future__ import annotations

from typing import NamedTuple


class LastRun(NamedTuple):
    """The volume's record of the last run, written after its registration."""

    boot_id: str  # of the machine; a different id: the page cache is lost
    # Log end at an orderly end; None: the run did not end in order.
    clean_end: int | None = None
    was_cut: bool = False  # at damage that no registration has reported


def tail_is_whole(last: LastRun, *, boot_id: str) -> bool:
    """Return whether the log has all written bytes: only the last record may be torn.

    The machine has not restarted. So an intact record behind a broken one means damage.
    """
    return bool(boot_id) and last.boot_id == boot_id


def claims_clean(last: LastRun, *, boot_id: str, log_end: int, acks_are_durable: bool) -> bool:
    """Return whether this start has all acked messages; `log_end` is the end of its log.

    If acks are durable, an opened log has them, unless it was cut at damage. Otherwise the page
    cache has them, unless the machine has restarted.
    """
    if last.was_cut:
        return False
    return acks_are_durable or last.boot_id == boot_id or last.clean_end == log_end


def after_registration(last: LastRun, *, boot_id: str, is_accepted: bool) -> LastRun:
    """Return the record to write. It changes only after an accepted registration."""
    return LastRun(boot_id) if is_accepted else last
