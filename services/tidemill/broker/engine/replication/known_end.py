"""What a replica knows of the end of its own log: what tells damage from a tail that was torn.

    replica/durable.a, .b   the mark, written in turns

A master's headers say what was durable on its disk, which proves nothing on another one. So a
replica notes for itself how far its log is durable, beside the syncs of the log: each second while
something is written, and at the end of a life. A start compares the log with it:

    broken before the mark                       damage
    broken, and intact records behind it         damage, where no power was cut since, or where this
                                                 store's own headers say that it was durable
    cut, and no power was cut                    doubtful: a write in which the process was killed,
                                                 or damage to what came last
    cut after a power cut                        a torn tail
    a log that is gone, and had been durable     doubtful

Who is doubtful says so when it registers, however often it starts meanwhile, until it is a member
again. Invariant: it is said, durably, before anything is cut.
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
    """The mark of one store, from the opening of its log on."""

    def __init__(self, disk: Disk, boot_id: bytes) -> None:
        """Read what was noted; `boot_id` names this run of the machine, zeros for nobody knows.

        A mark that cannot be read is as none: the log is believed as far as its confirm offset.
        """
        self._disk = disk
        self._boot_id = boot_id
        known = [durable_mark.find(disk.read(name)) for name in COPIES]
        found = [mark for mark in known if mark is not None]
        self._mark = max(found, default=DurableMark(), key=lambda mark: mark.generation)
        # Copies take turns: the last one that is durable is never written over.
        self._durable_copy = self._written_copy = known.index(self._mark) if found else 1
        self._under_way: File | None = None

    @property
    def is_doubtful(self) -> bool:
        """Whether this log may lack what this store has acknowledged."""
        return self._mark.is_doubtful

    def proofs(self, *, confirmed: int) -> DurabilityProofs:
        """Return what proves that something had been durable; `confirmed` was so too."""
        mark = self._mark
        return DurabilityProofs(
            durable_offset=max(confirmed, mark.durable),
            led_epoch=mark.led_epoch,
            is_same_boot=mark.boot_id == self._boot_id != NO_BOOT_ID,
            doubt=self.mark_doubtful,
        )

    def mark_doubtful(self) -> None:
        """Note, durably, that something may be lost that was acknowledged."""
        if not self._mark.is_doubtful:
            self._save(self._mark._replace(is_doubtful=True))

    def accept_loss(self) -> None:
        """Note, durably, that nobody has what is damaged: it may be cut, wherever it is."""
        self._save(DurableMark(self._mark.generation, is_doubtful=True))

    def clear_doubt(self) -> None:
        """Hear that the log has all that is confirmed: its master has seen it catch up."""
        if self._mark.is_doubtful:
            self._save(self._mark._replace(is_doubtful=False))

    def note_opened(self, log_end: int) -> None:
        """Note that a start has made durable what it has found."""
        if log_end < self._mark.durable:
            self.mark_doubtful()  # Nobody has cut that much: the files are gone.
        # The machine's run is noted here and not before: what is cut meanwhile is torn as before.
        self._save(self._mark._replace(durable=log_end, boot_id=self._boot_id))

    def note_led_epoch(self, epoch: int) -> None:
        """Hear that the records of an epoch are written here; it is noted with the next mark."""
        self._mark = self._mark._replace(led_epoch=epoch)

    def note_cut(self, log_offset: int) -> None:
        """Note, durably, that nothing from `log_offset` on counts, before it is taken away."""
        if log_offset < self._mark.durable:
            self._save(self._mark._replace(durable=log_offset))

    def note_emptied(self) -> None:
        """Note that the log begins anew: with another's records, not with this store's own."""
        self._save(self._mark._replace(durable=0, led_epoch=0))

    def is_behind(self, durable_offset: int) -> bool:
        """Whether more is durable than was noted."""
        return durable_offset > self._mark.durable

    def write(self, durable_offset: int) -> File:
        """Write the mark and return its file. Sync it, then call `note_synced`."""
        assert self._under_way is None, "one after the other"
        self._under_way = self._write(self._mark._replace(durable=durable_offset))
        return self._under_way

    def note_synced(self) -> None:
        """Hear that what `write` has written is durable, if there was anything."""
        if self._under_way is not None:
            self._under_way.close()
            self._durable_copy = self._written_copy
            self._under_way = None

    def _save(self, mark: DurableMark) -> None:
        file = self._write(mark)
        file.sync()
        file.close()
        # Also where a sync of it is under way: this is the newer content of the same copy.
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
