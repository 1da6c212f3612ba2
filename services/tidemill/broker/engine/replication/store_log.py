"""A commit log as replication sees it, with the state that survives beside it.

    replica/state.a, state.b   epoch seen, journal, what is confirmed, what a start may claim by
    replica/truncate           while it is there: an intent to cut (failover.md 9.4)
    replica/cut                what was cut last, for people: nothing rests on it
    replica/addresses          of the replicas, a line each: whom a start asks whose log is damaged

What is confirmed is saved now and then, by whoever makes a checkpoint; a start knows less, never
more.
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
    """Return where a truncation was to cut that a crash has interrupted; None: there was none.

    A start cuts there before it looks at what the log holds, and then calls `end_intent`.
    """
    return truncate_intent.find(disk.read(INTENT))


def find_cut(disk: Disk) -> LogCut | None:
    """Return the last cut, for operators; None if there is none or the file is unreadable."""
    with contextlib.suppress(ReadFailed):
        return truncate_intent.find(disk.read(CUT))
    return None


def find_addresses(disk: Disk) -> dict[int, str]:
    """Return where the replicas were when that was saved last; of a file that is torn nothing."""
    try:
        lines = (disk.read(ADDRESSES) or b"").decode().splitlines()
        return {int(number): address for number, address in (line.split(" ", 1) for line in lines)}
    except ValueError:
        return {}


def save_addresses(disk: Disk, addresses: Iterable[tuple[int, str]]) -> None:
    """Note where the replicas are."""
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
    """Return up to where the log is known to be confirmed, and durable: a start finds it all."""
    return _find_state(disk).confirm


def find_epoch_seen(disk: Disk) -> int:
    """Return the last epoch of a broker group that a store has heard of; 0: it is no replica's."""
    return _find_state(disk).epoch_seen


def _find_state(disk: Disk) -> ReplicaState:
    """Return the newest state. Raises CorruptStore where neither copy can be read.

    One that was torn was never said to be durable, and the other one is as it was.
    """
    copies = [disk.read(name) for name in COPIES]
    known = [state for copy in copies if (state := replica_state.find(copy)) is not None]
    if not known and all(copy is not None for copy in copies):
        raise CorruptStore(
            f"{' and '.join(COPIES)} are damaged: nobody can say which epochs this replica has"
            f" acknowledged, so it does not join. Empty its folder, and it is copied again."
        )
    return max(known, default=ReplicaState(), key=lambda state: state.generation)


def make_state(disk: Disk) -> None:
    """Write the state of a new store, durably, before it gets a name: from then on there is one.

    An earlier process may have been about to, and have left a first copy that is torn.
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
            f"{' and '.join(COPIES)} are missing: nobody can say which epochs this replica has"
            f" acknowledged, so it does not join. Empty its folder, and it is copied again."
        )


def _write(disk: Disk, state: ReplicaState) -> File:
    """Write one copy, and return its file to be synced: a crash leaves the other as it was."""
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
    """Note, durably, that a truncation is done; what it has cut is told from here on."""
    disk.rename(INTENT, CUT)
    disk.folder(FOLDER).sync()


@final
class StoreLog:
    """What a `ReplicatedLog` is of a commit log and the state beside it; `GroupLog` is the rest."""

    def __init__(
        self,
        disk: Disk,
        log: CommitLog,
        *,
        begin: Callable[[int], int],
        confirmed: Callable[[int], None],
    ) -> None:
        """Take over what is on disk. Raises CorruptStore.

        `begin` lets the engine begin an epoch, and returns where its first record ends; `confirmed`
        hears how far all is confirmed.
        """
        self._disk = disk
        self._log = log
        self._begin = begin
        self._confirmed = confirmed
        self._state = _find_state(disk)
        self._under_way: File | None = None  # written by `write_confirm`, and not known as durable
        self._overtaken: File | None = None  # under way too, and what is in it is durable
        self.journal: Journal = tuple(EpochEntry(*entry) for entry in self._state.journal)
        self.confirm_offset = min(self._state.confirm, log.log_end)

    @property
    def log_min(self) -> int:
        """Where it begins."""
        return self._log.min_offset

    @property
    def log_end(self) -> int:
        """Where it ends."""
        return self._log.log_end

    @property
    def durable_offset(self) -> int:
        """Up to where it is durable here."""
        return self._log.durable_offset

    @property
    def epoch_seen(self) -> int:
        """The highest epoch that this store has heard of."""
        return self._state.epoch_seen

    # ------------------------------------------------------------ what survives

    def save_epoch_seen(self, epoch: int) -> None:
        """Make durable that an epoch exists."""
        self._save(self._state._replace(epoch_seen=epoch))

    def save_journal(self, journal: Journal) -> None:
        """Make a journal durable; of one that is too long the oldest epochs go."""
        self.journal = journal[-ENTRIES_MAX:]
        if self.journal != self._state.journal:
            self._save(self._state._replace(journal=self.journal))

    def save_confirm(self) -> None:
        """Make durable how far all is confirmed."""
        self._save(self._state)

    def write_confirm(self) -> File:
        """Write the confirm offset and return the file. Sync it, then call `note_synced`."""
        assert self._under_way is None, "one after the other"
        self._under_way = _write(self._disk, self._next(self._state))
        return self._under_way

    def note_synced(self) -> None:
        """Hear that what `write_confirm` has written is durable, if there was anything."""
        for file in (self._under_way, self._overtaken):
            if file is not None:
                file.close()
        self._under_way = self._overtaken = None

    def _save(self, state: ReplicaState) -> None:
        file = _write(self._disk, self._next(state))
        file.sync()
        file.close()
        # This is the newer content of the same copy, and it is durable: the next goes to the other.
        self._under_way, self._overtaken = None, self._under_way or self._overtaken

    def _next(self, state: ReplicaState) -> ReplicaState:
        """Return the next state; the copy that is not known to be durable is the one to write."""
        generation = self._state.generation + (1 if self._under_way is None else len(COPIES))
        # Others may have what is not durable here: after a power cut that is no damage.
        confirm = min(self.confirm_offset, self.durable_offset)
        self._state = state._replace(generation=generation, confirm=confirm)
        return self._state

    # ------------------------------------------------------------ the log

    def begin_epoch(self, epoch: int) -> int:
        """Append the first record of an epoch of our own, and return where it ends."""
        return self._begin(epoch)

    def frame_at(self, offset: int, size_max: int) -> Data | None:
        """Return whole records from `offset` on."""
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
        """Write what a master has sent."""
        self._log.append_frame(
            frame.data, segment_start=frame.segment_start, segment_bytes=frame.segment_bytes
        )

    def digest(self, low: int, end: int) -> Digest:
        """Return the checksum of the last records before `end`. Raises LogDamaged."""
        run = find_last_run(self._log, low, end, DIGEST_BYTES)
        return Digest(run.begin, end, run.crc)

    def truncate(self, cut: LogCut) -> None:
        """Take away what is cut, durably, whole or not at all."""
        if cut.offset < self.confirm_offset:
            # An election since then was unclean: what was confirmed is so no more.
            self.confirm_offset = cut.offset
            self.save_confirm()
        self._write_cut(INTENT, cut)
        self._log.truncate(LogOffset(cut.offset))
        end_intent(self._disk)

    def note_cut(self, cut: LogCut) -> None:
        """Note, durably, what goes with all of the store."""
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
        """Hear that all before `offset` is confirmed."""
        self.confirm_offset = offset
        self._confirmed(offset)
