"""The rule for cutting the end of a replica's log."""

from __future__ import annotations

from tidemill.broker.engine.replication.epoch_journal import Journal, epoch_at


def may_truncate(journal: Journal, *, cut: int, confirm: int, unclean_since: int) -> bool:
    """Return whether a replica may delete everything from `cut` on.

    It may not delete confirmed records (F-5), unless a later election was declared unclean.
    """
    return cut >= confirm or unclean_since > epoch_at(journal, confirm - 1)
