"""The durable mark of a replica: it separates a torn tail of the log from damage.

    replica/durable.a, .b   the mark, written alternately

The headers of a master's records state the durable end of the master's log. They prove nothing
about another disk. Therefore a replica records the durable end of its own log, together with the
syncs of the log: once per second during writes, and at the end of the process. A start compares the
log with the mark:

    state of the log                              verdict
    broken before the mark                        damage
    broken, with intact records after it          damage, if there was no power cut since, or if
                                                  this store's own headers say that it was durable
    cut, without a power cut                      doubtful: the process was killed during a write,
                                                  or the last records are damaged
    cut, after a power cut                        a torn tail
    missing, but durable before                   doubtful

A doubtful replica reports so in each registration, across restarts, until it is a member again.
Invariant: the doubt is durable before anything is cut.
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.layout import durable_mark
from tidemill.broker.engine.layout.durable_mark import NO_BOOT_ID, DurableMark
from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.store.log_opening import DurabilityProofs

COPIES = ("replica/durable.a", "replica/durable.b")


@final
class KnownEnd:
    """The durable mark of one store, from the opening of its log on."""

    def __init__(self, disk: Disk, boot_id: bytes) -> None:
        """Read the mark. `boot_id` identifies this boot of the machine; zeros mean unknown.

        An unreadable mark counts as missing: the log is then trusted up to its confirm offset.
        """
        self._disk = disk
        self._boot_id = boot_id
        known = [durable_mark.find(disk.read(name)) for name in COPIES]
        found = [mark for mark in known if mark is not None]
        self._mark = max(found, default=DurableMark(), key=lambda mark: mark.generation)
        # The copies alternate: the last durable one is never overwritten.
        self._durable_copy = self._written_copy = known.index(self._mark) if found else 1
        self._under_way: File | None = None

    @property
    def is_doubtful(self) -> bool:
        """Whether this log may lack records that this store has acknowledged."""
        return self._mark.is_doubtful

    @property
    def is_same_boot(self) -> bool:
        """Whether the machine has not restarted since the last start, so no write was torn."""
        return self._mark.boot_id == self._boot_id != NO_BOOT_ID

    def proofs(self, *, confirmed: int) -> DurabilityProofs:
        """Return the proofs of durability. Everything before `confirmed` is durable too."""
        mark = self._mark
        return DurabilityProofs(
            durable_offset=max(confirmed, mark.durable),
            led_epoch=mark.led_epoch,
            is_same_boot=self.is_same_boot,
            doubt=self.mark_doubtful,
        )

    def mark_doubtful(self) -> None:
        """Record, durably, that acknowledged records may be lost."""
        if not self._mark.is_doubtful:
            self._save(self._mark._replace(is_doubtful=True))

    def accept_loss(self) -> None:
        """Record, durably, that no replica has the damaged bytes. The log may then be cut there."""
        self._save(DurableMark(self._mark.generation, is_doubtful=True))

    def clear_doubt(self) -> None:
        """Record that the log has everything confirmed: its master has seen it catch up."""
        if self._mark.is_doubtful:
            self._save(self._mark._replace(is_doubtful=False))

    def note_opened(self, log_end: int) -> None:
        """Record that a start has made everything it found durable."""
        if log_end < self._mark.durable:
            self.mark_doubtful()  # No cut removed that much: files are missing.
        # The boot id changes here and not earlier. A power cut during the start still tears the
        # tail.
        self._save(self._mark._replace(durable=log_end, boot_id=self._boot_id))

    def note_led_epoch(self, epoch: int) -> None:
        """Record that this replica writes the records of an epoch. The next mark includes it."""
        self._mark = self._mark._replace(led_epoch=epoch)

    def note_cut(self, log_offset: int) -> None:
        """Record, durably, that nothing from `log_offset` on is valid, before the log is cut."""
        if log_offset < self._mark.durable:
            self._save(self._mark._replace(durable=log_offset))

    def note_emptied(self) -> None:
        """Record that the log starts again with records of another replica."""
        self._save(self._mark._replace(durable=0, led_epoch=0))

    def is_behind(self, durable_offset: int) -> bool:
        """Return whether more is durable than the mark says."""
        return durable_offset > self._mark.durable

    def write(self, durable_offset: int) -> File:
        """Write the mark and return its file. Sync it, then call `note_synced`."""
        assert self._under_way is None, "one after the other"
        self._under_way = self._write(self._mark._replace(durable=durable_offset))
        return self._under_way

    def note_synced(self) -> None:
        """Record that the mark of `write` is durable, if there is one."""
        if self._under_way is not None:
            self._under_way.close()
            self._durable_copy = self._written_copy
            self._under_way = None

    def _save(self, mark: DurableMark) -> None:
        file = self._write(mark)
        file.sync()
        file.close()
        # Also during a sync of that copy: this is its newer content.
        self._durable_copy = self._written_copy

    def _write(self, mark: DurableMark) -> File:
        self._mark = mark._replace(generation=self._mark.generation + 1)
        self._written_copy = 1 - self._durable_copy
        name = COPIES[self._written_copy]
        is_new = self._disk.read(name) is None
        file = self._disk.open(name, create=is_new)
        file.write_at(0, [durable_mark.encode(self._mark)])
        if is_new:
            self._disk.folder(name.rpartition("/")[0]).sync()
        return file
