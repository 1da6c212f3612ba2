"""The epoch journal: at which log offset each epoch of a log begins, and where two logs part.

A cache of the EPOCH_START records of the log, which is written anew whenever one is added or cut.

Invariant: epochs and offsets both strictly increase (F-15). An epoch that begins where another one
did has no record of that other one in this log: the other one is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias, final

ENTRIES_MAX = 4_096  # 64 KiB on disk: a failover an hour for half a year; then the oldest go


class EpochEntry(NamedTuple):
    """An epoch, and where its first record stands."""

    epoch: int
    start: int


Journal: TypeAlias = tuple[EpochEntry, ...]


class CommonPrefix(NamedTuple):
    """Up to where two logs are the same: what the replica has behind it goes."""

    offset: int


class FullCopy(NamedTuple):
    """The master's log begins behind the replica's end: it is copied whole, from there."""

    log_min: int


class Divergence(NamedTuple):
    """Two logs that overlap and have no epoch in common. Nothing is cut; an operator must look."""

    why: str


Agreement: TypeAlias = CommonPrefix | FullCopy | Divergence


def with_epoch(journal: Journal, epoch: int, start: int) -> Journal:
    """Return the journal with an epoch that begins at `start`; what began there or later goes."""
    kept = tuple(entry for entry in journal if entry.start < start)
    assert not kept or kept[-1].epoch < epoch, f"epoch {epoch} after {kept[-1].epoch}"
    return (*kept, EpochEntry(epoch, start))


def cut_at(journal: Journal, log_offset: int) -> Journal:
    """Return the journal of a log that ends at `log_offset`."""
    return tuple(entry for entry in journal if entry.start < log_offset)


def last_epoch(journal: Journal) -> int:
    """Return the epoch of the last record; 0: there is none."""
    return journal[-1].epoch if journal else 0


def epoch_at(journal: Journal, log_offset: int) -> int:
    """Return the epoch of the record at `log_offset`; 0: of before there were epochs."""
    return next((e.epoch for e in reversed(journal) if e.start <= log_offset), 0)


def end_of(journal: Journal, index: int, log_end: int) -> int:
    """Return where the epoch at `index` ends: where the next begins, or at the end of the log."""
    return journal[index + 1].start if index + 1 < len(journal) else log_end


@final
class LogExtent(NamedTuple):
    """What a log says of itself, for a comparison."""

    journal: Journal
    log_min: int
    log_end: int


def agree(master: LogExtent, replica: LogExtent) -> Agreement:
    """Return up to where both logs are the same.

    That is the end of the last epoch that began at the same offset in both, in the log where it
    ends first: one epoch is written by one master, so up to there both have its records.
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
            # What the master has had before its beginning nobody can compare, and none is sent.
            return CommonPrefix(cut) if cut >= master.log_min else FullCopy(master.log_min)
    return Divergence(
        f"no epoch of {_text(replica.journal)} is one of {_text(master.journal)}, and the logs"
        f" overlap: [{replica.log_min}, {replica.log_end}) and"
        f" [{master.log_min}, {master.log_end})"
    )


def _text(journal: Iterable[EpochEntry]) -> str:
    return ", ".join(f"{entry.epoch} from {entry.start}" for entry in journal)
