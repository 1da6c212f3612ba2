"""The epoch journal: the log offset of each epoch, and the common part of two logs.

The journal is a cache of the EPOCH_START records of the log. It is written again whenever an entry
is added or cut.

Invariant: epochs and offsets both strictly increase (F-15). If two epochs begin at the same offset,
this log has no record of the earlier one, and the journal drops it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias, final

# 64 KiB on disk: one failover per hour for half a year; then the oldest entries are dropped.
ENTRIES_MAX = 4_096


class EpochEntry(NamedTuple):
    """An epoch and the log offset of its first record."""

    epoch: int
    start: int


Journal: TypeAlias = tuple[EpochEntry, ...]


class CommonPrefix(NamedTuple):
    """The end of the common part of two logs. The replica cuts its log there."""

    offset: int


class FullCopy(NamedTuple):
    """The master's log begins after the replica's end. The replica copies all of it, from there."""

    log_min: int


class Divergence(NamedTuple):
    """Two overlapping logs without a common epoch. Nothing is cut; an operator must decide."""

    why: str


Agreement: TypeAlias = CommonPrefix | FullCopy | Divergence


def with_epoch(journal: Journal, epoch: int, start: int, *, log_min: int) -> Journal:
    """Return the journal with an epoch that begins at `start`, without entries at or after it.

    Without an earlier epoch, the epoch begins at `log_min`. Older records are those of a broker
    that was alone. They are the same in all logs, so a copy of them can be continued.
    """
    earlier = tuple(entry for entry in journal if entry.start < start)
    assert not earlier or earlier[-1].epoch < epoch, f"epoch {epoch} after {earlier[-1].epoch}"
    return (*earlier, EpochEntry(epoch, start if earlier else log_min))


def cut_at(journal: Journal, log_offset: int) -> Journal:
    """Return the journal of a log that ends at `log_offset`."""
    return tuple(entry for entry in journal if entry.start < log_offset)


def last_epoch(journal: Journal) -> int:
    """Return the epoch of the last record; 0 if the log is empty."""
    return journal[-1].epoch if journal else 0


def epoch_at(journal: Journal, log_offset: int) -> int:
    """Return the epoch of the record at `log_offset`; 0 if it is older than all epochs."""
    return next((e.epoch for e in reversed(journal) if e.start <= log_offset), 0)


def end_of(journal: Journal, index: int, log_end: int) -> int:
    """Return the end of the epoch at `index`: where the next one begins, or the log end."""
    return journal[index + 1].start if index + 1 < len(journal) else log_end


@final
class LogExtent(NamedTuple):
    """The range and the epochs of a log, for a comparison."""

    journal: Journal
    log_min: int
    log_end: int
    state_floor: int = 0  # of a master: before it the log may have live messages only


def agree(master: LogExtent, replica: LogExtent) -> Agreement:
    """Return how a replica makes its log a prefix of the master's.

    The common part ends with the last epoch that began at the same offset in both logs, in the log
    where this epoch ends first. One master writes an epoch, so both logs have the same records up
    to there.
    """
    if not replica.journal or replica.log_end == replica.log_min:
        return (
            CommonPrefix(replica.log_end)
            if replica.log_end == master.log_min
            else FullCopy(master.log_min)
        )
    if replica.log_end < master.log_min:
        return FullCopy(master.log_min)
    starts = {entry: n for n, entry in enumerate(master.journal)}
    for n in range(len(replica.journal) - 1, -1, -1):
        other = starts.get(replica.journal[n])
        if other is not None:
            end = end_of(replica.journal, n, replica.log_end)
            cut = min(end, end_of(master.journal, other, master.log_end))
            # Before its log begins, the master cannot compare anything and cannot send anything.
            return CommonPrefix(cut) if cut >= master.log_min else FullCopy(master.log_min)
    return Divergence(
        f"no epoch of {_text(replica.journal)} is one of {_text(master.journal)}, and the logs"
        f" overlap: [{replica.log_min}, {replica.log_end}) and"
        f" [{master.log_min}, {master.log_end})"
    )


def _text(journal: Iterable[EpochEntry]) -> str:
    return ", ".join(f"{entry.epoch} from {entry.start}" for entry in journal)
