"""A commit log as replication sees it, with the durable state beside it.

    replica/state.a, state.b   epoch seen, journal, confirm offset
    replica/truncate           exists while a cut is in progress: the intent
    replica/cut                the last cut, for operators; nothing depends on it
    replica/addresses          one line per replica: addresses for a start with a damaged log

The confirm offset is saved with some syncs. After a start it may be too low, and never too high.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import final
from zlib import crc32

from tidemill.broker.engine.layout import replica_state, truncate_intent
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.replica_state import ReplicaState
from tidemill.broker.engine.layout.truncate_intent import LogCut
from tidemill.broker.engine.replication.epoch_journal import ENTRIES_MAX, EpochEntry, Journal
from tidemill.broker.engine.replication.messages import Data, Digest
from tidemill.broker.engine.replication.replicated_log import DIGEST_BYTES
from tidemill.broker.engine.store.checked_run import find_last_run
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import Disk, File, ReadFailed
from tidemill.broker.engine.store.segment import CorruptStore

FOLDER = "replica"
COPIES = (f"{FOLDER}/state.a", f"{FOLDER}/state.b")
INTENT = f"{FOLDER}/truncate"
CUT = f"{FOLDER}/cut"
ADDRESSES = f"{FOLDER}/addresses"


def find_intent(disk: Disk) -> LogCut | None:
    """Return the cut that a crash interrupted, or None.

    A start repeats the cut before it reads the log, and then calls `end_intent`.
    """
    return truncate_intent.find(disk.read(INTENT))


def find_cut(disk: Disk) -> LogCut | None:
    """Return the last cut, for operators; None if there is none or the file is unreadable."""
    with contextlib.suppress(ReadFailed):
        return truncate_intent.find(disk.read(CUT))
    return None


def find_addresses(disk: Disk) -> dict[int, str]:
    """Return the last saved addresses of the replicas; none if the file is torn."""
    try:
        lines = (disk.read(ADDRESSES) or b"").decode().splitlines()
        return {int(number): address for number, address in (line.split(" ", 1) for line in lines)}
    except ValueError:
        return {}


def save_addresses(disk: Disk, addresses: Iterable[tuple[int, str]]) -> None:
    """Save the addresses of the replicas."""
    data = "".join(f"{number} {address}\n" for number, address in addresses).encode()
    if disk.read(ADDRESSES) == data:
        return
    temporary = f"{ADDRESSES}.new"
    file = disk.open(temporary, create=disk.read(temporary) is None)
    file.resize(len(data))
    file.write_at(0, [data])
    file.sync()
    file.close()
    disk.rename(temporary, ADDRESSES)
    disk.folder(FOLDER).sync()


def find_confirm(disk: Disk) -> int:
    """Return the saved confirm offset. Everything before it is durable here."""
    return _find_state(disk).confirm


def find_epoch_seen(disk: Disk) -> int:
    """Return the highest epoch that a store has learned of; 0 if it is not a replica's."""
    return _find_state(disk).epoch_seen


def _find_state(disk: Disk) -> ReplicaState:
    """Return the newest state. Raises CorruptStore if both copies are damaged.

    A torn copy was never reported as durable, and the other copy is unchanged.
    """
    copies = [disk.read(name) for name in COPIES]
    known = [state for copy in copies if (state := replica_state.find(copy)) is not None]
    if not known and all(copy is not None for copy in copies):
        raise CorruptStore(
            f"{' and '.join(COPIES)} are damaged, so it is unknown which epochs this replica has"
            f" acknowledged. It does not start. Empty its data directory; it is then copied again."
        )
    return max(known, default=ReplicaState(), key=lambda state: state.generation)


def make_state(disk: Disk) -> None:
    """Write the state of a new store, durably. A store gets its name only afterwards.

    An earlier process may have left a torn first copy.
    """
    copies = [disk.read(name) for name in COPIES]
    if None in copies and not any(map(replica_state.find, copies)):
        file = _write(disk, ReplicaState())
        file.sync()
        file.close()


def refuse_forgotten(disk: Disk) -> None:
    """Raise CorruptStore if a store that has a name has no replica state."""
    if all(replica_state.find(disk.read(name)) is None for name in COPIES):
        raise CorruptStore(
            f"{' and '.join(COPIES)} are missing, so it is unknown which epochs this replica has"
            f" acknowledged. It does not start. Empty its data directory; it is then copied again."
        )


def _write(disk: Disk, state: ReplicaState) -> File:
    """Write one copy and return its file for a sync. A crash leaves the other copy intact."""
    name = COPIES[state.generation % len(COPIES)]
    data = replica_state.encode(state)
    is_new = disk.read(name) is None
    file = disk.open(name, create=is_new)
    file.resize(len(data))
    file.write_at(0, [data])
    if is_new:
        disk.folder(FOLDER).sync()
    return file


def end_intent(disk: Disk) -> None:
    """Record, durably, that a cut is complete, and keep its description for operators."""
    disk.rename(INTENT, CUT)
    disk.folder(FOLDER).sync()


@final
class StoreLog:
    """The part of a `ReplicatedLog` that needs only a commit log and the state beside it.

    `GroupLog` implements the rest.
    """

    def __init__(
        self,
        disk: Disk,
        log: CommitLog,
        *,
        begin: Callable[[int], int],
        confirmed: Callable[[int], None],
    ) -> None:
        """Read the state from disk. Raises CorruptStore.

        `begin` begins an epoch in the engine and returns the end of its first record. `confirmed`
        receives each new confirm offset.
        """
        self._disk = disk
        self._log = log
        self._begin = begin
        self._confirmed = confirmed
        self._state = _find_state(disk)
        self._under_way: File | None = None  # written by `write_confirm`, not known to be durable
        self._overtaken: File | None = None  # in a sync, but its newer content is durable already
        self.journal: Journal = tuple(EpochEntry(*entry) for entry in self._state.journal)
        self.confirm_offset = min(self._state.confirm, log.log_end)

    @property
    def log_min(self) -> int:
        """Begin of the log."""
        return self._log.min_offset

    @property
    def log_end(self) -> int:
        """End of the log."""
        return self._log.log_end

    @property
    def durable_offset(self) -> int:
        """Offset before which the log is durable here."""
        return self._log.durable_offset

    @property
    def epoch_seen(self) -> int:
        """The highest epoch that this store has learned of."""
        return self._state.epoch_seen

    # ------------------------------------------------------------ durable state

    def save_epoch_seen(self, epoch: int) -> None:
        """Make an epoch durable."""
        self._save(self._state._replace(epoch_seen=epoch))

    def save_journal(self, journal: Journal) -> None:
        """Make a journal durable. If it is too long, drop its oldest epochs."""
        self.journal = journal[-ENTRIES_MAX:]
        if self.journal != self._state.journal:
            self._save(self._state._replace(journal=self.journal))

    def save_confirm(self) -> None:
        """Make the confirm offset durable."""
        self._save(self._state)

    def write_confirm(self) -> File:
        """Write the confirm offset and return the file. Sync it, then call `note_synced`."""
        assert self._under_way is None, "one after the other"
        self._under_way = _write(self._disk, self._next(self._state))
        return self._under_way

    def note_synced(self) -> None:
        """Record that the file of `write_confirm` is durable, if there is one."""
        for file in (self._under_way, self._overtaken):
            if file is not None:
                file.close()
        self._under_way = self._overtaken = None

    def _save(self, state: ReplicaState) -> None:
        file = _write(self._disk, self._next(state))
        file.sync()
        file.close()
        # This newer content of the same copy is durable, so the next write goes to the other copy.
        self._under_way, self._overtaken = None, self._under_way or self._overtaken

    def _next(self, state: ReplicaState) -> ReplicaState:
        """Return the next state. It goes to the copy that is not known to be durable."""
        generation = self._state.generation + (1 if self._under_way is None else len(COPIES))
        # Other replicas may have records that are not durable here. Losing these is not damage.
        confirm = min(self.confirm_offset, self.durable_offset)
        self._state = state._replace(generation=generation, confirm=confirm)
        return self._state

    # ------------------------------------------------------------ the log

    def begin_epoch(self, epoch: int) -> int:
        """Append the first record of this replica's own epoch; return its end."""
        return self._begin(epoch)

    def frame_at(self, offset: int, size_max: int) -> Data | None:
        """Return whole records from `offset` on, or None."""
        found = self._log.frame_at(LogOffset(offset), size_max)
        if found is None:
            return None
        data, segment = found
        return Data(
            epoch=0,
            offset=offset,
            data=data,
            crc=crc32(data),
            confirm=0,
            segment_start=segment.start,
            segment_bytes=segment.size,
        )

    def append(self, frame: Data) -> None:
        """Write a frame of the master."""
        self._log.append_frame(
            frame.data, segment_start=frame.segment_start, segment_bytes=frame.segment_bytes
        )

    def digest(self, low: int, end: int) -> Digest:
        """Return the checksum of the last records before `end`. Raises LogDamaged."""
        run = find_last_run(self._log, low, end, DIGEST_BYTES)
        return Digest(run.begin, end, run.crc)

    def truncate(self, cut: LogCut) -> None:
        """Cut the end of the log, durably and atomically."""
        if cut.offset < self.confirm_offset:
            # A later election was unclean, so these records are no longer confirmed.
            self.confirm_offset = cut.offset
            self.save_confirm()
        self._write_cut(INTENT, cut)
        self._log.truncate(LogOffset(cut.offset))
        end_intent(self._disk)

    def note_cut(self, cut: LogCut) -> None:
        """Record, durably, a cut that deletes the whole store."""
        self._write_cut(CUT, cut)

    def _write_cut(self, name: str, cut: LogCut) -> None:
        data = truncate_intent.encode(cut)
        file = self._disk.open(name, create=self._disk.read(name) is None)
        file.resize(len(data))
        file.write_at(0, [data])
        file.sync()
        file.close()
        self._disk.folder(FOLDER).sync()

    def confirm(self, offset: int) -> None:
        """Record that everything before `offset` is confirmed."""
        self.confirm_offset = offset
        self._confirmed(offset)
