"""Whether a replica may take away the end of its log."""

from __future__ import annotations

from tidemill.broker.engine.replication.epoch_journal import Journal, epoch_at


def may_truncate(journal: Journal, *, cut: int, confirm: int, unclean_since: int) -> bool:
    """Whether all from `cut` on may go.

    What is confirmed may not (F-5), unless an election since then was said to be unclean.
    """
    return cut >= confirm or unclean_since > epoch_at(journal, confirm - 1)
