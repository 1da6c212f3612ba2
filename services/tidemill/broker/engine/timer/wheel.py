"""The timer wheel: a ring of one-second slots in memory, and its file.

The slots are a private buffer instead of a shared mapping, so that only a flush writes them. A
flush writes the timer log first, so that no slot on disk points beyond it. If the file is missing,
torn or damaged, the wheel is rebuilt from the state table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from tidemill.broker.engine.layout import timer_slot
from tidemill.broker.engine.layout.timer_record import NO_POSITION
from tidemill.broker.engine.layout.timer_slot import DTYPE, NUM_MAX, SIZE
from tidemill.broker.engine.store.disk import Disk, File, ReadFailed
from tidemill.broker.engine.timer.pages import DirtyPages

FOLDER = "timer"
FILE = f"{FOLDER}/wheel"
PAGE_BYTES = 4096
PAGES_A_SLICE = 16  # 2,048 slots: a millisecond for checksums and writing


class WheelDamaged(Exception):
    """The wheel contradicts itself or the timer log and must be rebuilt."""


@final
class TimerWheel:
    """The slots of the timer wheel."""

    def __init__(self, disk: Disk, *, slot_count: int) -> None:
        assert slot_count * SIZE % PAGE_BYTES == 0, "the wheel is made of whole pages"
        self._disk = disk
        self._file: File | None = None
        self.slot_count = slot_count
        self._slots = _empty_slots(slot_count)
        self._pages = DirtyPages(self._page)
        self.used_count = 0  # slots that were ever written

    def _page(self, page: int) -> bytes:
        return bytes(self._slots[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])

    # ------------------------------------------------------------ slots

    def last(self, slot_s: int) -> int:
        """Return the newest position of the chain of a second, NO_POSITION if it has none."""
        slot = timer_slot.read(self._slots, slot_s % self.slot_count * SIZE)
        return slot.last if slot.time_ms == slot_s * 1000 else NO_POSITION

    def first(self, slot_s: int) -> int:
        """Return the oldest position of the chain of a second, NO_POSITION if it has none."""
        slot = timer_slot.read(self._slots, slot_s % self.slot_count * SIZE)
        return slot.first if slot.time_ms == slot_s * 1000 else NO_POSITION

    def count(self, slot_s: int) -> int:
        """Return the approximate number of timers linked at a second."""
        slot = timer_slot.read(self._slots, slot_s % self.slot_count * SIZE)
        return slot.num if slot.time_ms == slot_s * 1000 else 0

    def link(self, slot_s: int, position: int, *, change: int) -> int:
        """Set the newest position of the chain of a second. Return the one before.

        `change` is added to the count.
        """
        at, slots = slot_s % self.slot_count * SIZE, self._slots
        self._pages.touch(at // PAGE_BYTES)
        slot_ms = slot_s * 1000
        time_ms, first, last, num, magic = timer_slot.unpack_from(slots, at)
        if not magic:
            self.used_count += 1
        if time_ms != slot_ms:
            first, last, num = position, NO_POSITION, 0
        num = min(max(num + change, 0), NUM_MAX)
        timer_slot.pack_into(slots, at, slot_ms, first, position, num, timer_slot.UNSEALED)
        return int(last)

    def link_if_newer(self, slot_s: int, position: int, *, change: int) -> None:
        """Link a record of the timer log unless the file of the wheel contains the link."""
        slot = timer_slot.read(self._slots, slot_s % self.slot_count * SIZE)
        if slot.time_ms != slot_s * 1000 or slot.last < position:
            self.link(slot_s, position, change=change)

    def filled(self, first_s: int, end_s: int) -> list[int]:
        """Return the seconds from `first_s` to before `end_s` with a chain in their slots."""
        assert end_s - first_s <= self.slot_count, "one revolution at most"
        found: list[int] = []
        while first_s < end_s:
            begin = first_s % self.slot_count
            count = min(end_s - first_s, self.slot_count - begin)
            times = np.frombuffer(self._slots, DTYPE, count, begin * SIZE)["time"]
            seconds_ms = np.arange(first_s, first_s + count, dtype=np.int64) * 1000
            found += (np.flatnonzero(times == seconds_ms) + first_s).tolist()
            del times
            first_s += count
        return found

    def rows(self, seconds: np.ndarray) -> np.ndarray:
        """Return the slots of some seconds, with the values of `first`, `last` and `count`."""
        rows: np.ndarray = np.frombuffer(self._slots, DTYPE)[seconds % self.slot_count]
        is_other = rows["time"] != seconds * 1000
        rows["first"][is_other] = rows["last"][is_other] = NO_POSITION
        rows["num"][is_other] = 0
        return rows

    def filled_count(self, first_s: int, end_s: int) -> int:
        """Count the seconds that `filled` would return."""
        seconds = np.arange(first_s, end_s, dtype=np.int64)
        times = np.frombuffer(self._slots, DTYPE)["time"][seconds % self.slot_count]
        return int((times == seconds * 1000).sum())

    def peak(self, first_s: int, end_s: int) -> int:
        """Return the largest count among the seconds from `first_s` to before `end_s`."""
        seconds = self.filled(first_s, min(end_s, first_s + self.slot_count))
        slots = np.array(seconds, dtype=np.int64) % self.slot_count
        counts = np.frombuffer(self._slots, DTYPE)["num"][slots]
        return int(counts.max(initial=0))

    def place_rows(self, rows: np.ndarray) -> None:
        """Fill slots from rows of their layout."""
        rows["magic"] = timer_slot.UNSEALED
        slots = np.frombuffer(self._slots, DTYPE)
        numbers = rows["time"] // 1000 % self.slot_count
        for page in set((numbers * SIZE // PAGE_BYTES).tolist()):
            self._pages.touch(page)
        self.used_count += int((slots["magic"][numbers] == 0).sum())
        slots[numbers] = rows

    # ------------------------------------------------------------ file

    def load(self, *, position_min: int, position_max: int, hand_s: int, used_count: int) -> None:
        """Read the file. Raises WheelDamaged if it is missing or a slot is impossible.

        A chain after the hand that reaches below `position_min` may lack its oldest records: a
        compaction has linked them again, or their file was deleted by hand.
        """
        try:
            data = self._disk.read(FILE)
        except ReadFailed as error:
            self._disk.delete(FILE)  # The next write uses intact sectors.
            raise WheelDamaged("the wheel's file cannot be read") from error
        if data is None or len(data) != len(self._slots):
            raise WheelDamaged("the wheel's file is missing")
        slots = np.frombuffer(data, DTYPE)
        # Most slots were never written. Comparing them as words of 8 bytes finds these fast.
        used = np.flatnonzero(np.frombuffer(data, np.uint64).reshape(-1, SIZE // 8).any(axis=1))
        found = slots[used]
        is_right = (
            timer_slot.is_intact(found)
            & (found["time"] % 1000 == 0)
            & (found["time"] // 1000 % self.slot_count == used)
            & (found["last"] < position_max)
            & ((found["first"] >= position_min) | (found["time"] // 1000 <= hand_s))
        )
        # Slots are never emptied. If fewer are in use than at the checkpoint, a page is missing.
        if not is_right.all() or len(used) < used_count:
            raise WheelDamaged("a slot is impossible")
        self._slots[:] = data
        self.used_count = len(used)

    def clear(self) -> None:
        """Empty all slots."""
        self._slots = _empty_slots(self.slot_count)
        self.used_count = 0
        self._pages.dirty = set(range(len(self._slots) // PAGE_BYTES))

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""
        return len(self._slots)

    @property
    def dirty_count(self) -> int:
        """Pages that changed since the last flush began."""
        return len(self._pages.dirty)

    def freeze(self) -> None:
        """Begin a flush of the current slots."""
        self._pages.freeze()

    def write_frozen(self) -> Iterator[list[File]]:
        """Write the pages of the flush in slices. The last one yields the file to sync."""
        file = self._open()
        for n, (page, data) in enumerate(self._pages.frozen(), 1):
            rows = np.frombuffer(bytearray(data), DTYPE)
            timer_slot.seal(rows)
            file.write_at(page * PAGE_BYTES, [rows.tobytes()])
            if n % PAGES_A_SLICE == 0:
                yield []
        yield [file, self._disk.folder(FOLDER)]

    def _open(self) -> File:
        if self._file is None:
            self._file = self._disk.open(FILE, create=FILE not in self._disk.names(FOLDER))
            if self._file.size() != len(self._slots):
                self._file.resize(len(self._slots))
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _empty_slots(count: int) -> memoryview:
    """Return slots of zeros. Their pages use neither memory nor time until they are written."""
    zeros: memoryview = np.zeros(count * SIZE, np.uint8).data
    return zeros
