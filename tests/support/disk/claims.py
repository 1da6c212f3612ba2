"""What a start may claim: whether its log has all that any earlier run of it has acked.

A clean replica keeps its place in the sync state set; an unclean one loses it before anything else
happens (failover.md 3). Invariant: what is kept of the last run is replaced only when a
registration that told the truth was accepted. A start that crashes before that leaves the next one
no excuse.

Where acks are durable a log has them that ends where it was written to. It does not where bytes
have rotted behind what is known to be confirmed, and nobody has them: such a log is cut there, and
that is noted before it is done.
"""

from __future__ import annotations

from typing import NamedTuple


class LastRun(NamedTuple):
    """What the volume says of the run before, written when that one had registered."""

    boot_id: str  # of the machine; another one: the page cache is gone
    # Of an orderly end; None: there was none.
    clean_end: int | None = None
    was_cut: bool = False  # at damage, and no registration has told of it


def tail_is_whole(last: LastRun, *, boot_id: str) -> bool:
    """Whether all that was written is there: nothing of the log's end is torn but the last record.

    The machine has not been started since; so an intact record behind a broken one is damage.
    """
    return bool(boot_id) and last.boot_id == boot_id


def claims_clean(last: LastRun, *, boot_id: str, log_end: int, acks_are_durable: bool) -> bool:
    """Whether this start has what was acked; `log_end` is where its log was found to end.

    Where acks are durable a log that was opened has them, unless it was cut at damage. Otherwise
    the page cache has them, unless the machine was started since.
    """
    if last.was_cut:
        return False
    return acks_are_durable or last.boot_id == boot_id or last.clean_end == log_end


def after_registration(last: LastRun, *, boot_id: str, is_accepted: bool) -> LastRun:
    """Return what is to be written: nothing new until a registration was accepted."""
    return LastRun(boot_id) if is_accepted else last
