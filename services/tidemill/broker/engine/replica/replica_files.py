"""The files that a replica keeps beside its log.

    replica/store                identity of the store
    replica/state.a, .b          last epoch seen, journal, confirm offset; written alternately
    replica/durable.a, .b        end of the durable log (`known_end.py`); written alternately
    replica/truncate             intent of a cut; present until the cut is done
    replica/cut                  the last cut, for operators
    replica/addresses            addresses of the replicas, for a start with a damaged log

The confirm offset is saved now and then. After a start it may be too low, and is never too high.
Small files are written in place (ADR 0040).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Final, final
from zlib import crc32

from tidemill.broker.engine.layout import replica_state, store_identity, truncate_intent
from tidemill.broker.engine.layout.replica_state import ReplicaState
from tidemill.broker.engine.layout.truncate_intent import LogCut
from tidemill.broker.engine.replica.known_end import KnownEnd
from tidemill.broker.engine.replication.epoch_journal import ENTRIES_MAX, EpochEntry, Journal
from tidemill.broker.engine.store.disk import Disk, File, ReadFailed
from tidemill.broker.engine.store.segment import CorruptStore

FOLDER: Final = "replica"
IDENTITY: Final = f"{FOLDER}/store"
STATES: Final = (f"{FOLDER}/state.a", f"{FOLDER}/state.b")
INTENT: Final = f"{FOLDER}/truncate"
CUT: Final = f"{FOLDER}/cut"
ADDRESSES: Final = f"{FOLDER}/addresses"
# The confirm offset is saved after this many bytes of log. A sync of a small file in place takes as
# long as a sync of this much log.
SAVED_BYTES: Final = 1 << 20


@final
class ReplicaFiles:
    """The state and the journal of one replica, the intent of a cut and the last cut."""

    def __init__(self, disk: Disk, store_uuid: bytes, known_end: KnownEnd) -> None:
        """Read the state. Raises CorruptStore."""
        self._disk = disk
        self.store_uuid = store_uuid
        self.known_end = known_end
        self._state = _find_state(disk)
        self.journal: Journal = tuple(EpochEntry(*entry) for entry in self._state.journal)
        # The confirm offset at the last request to save it.
        self.requested_confirm = self._state.confirm
        self._is_confirm_due = self._is_mark_due = False
        self._in_sync: File | None = None  # a state of `begin_sync` that may not be durable yet
        self._overtaken: File | None = None  # the same file, with a newer and durable content

    @property
    def epoch_seen(self) -> int:
        """The highest epoch of its group that this store knows; 0: none."""
        return self._state.epoch_seen

    @property
    def confirm_offset(self) -> int:
        """The confirm offset that was saved last."""
        return self._state.confirm

    # ------------------------------------------------------------ saved at once

    def save_epoch_seen(self, epoch: int, *, confirm_offset: int) -> None:
        """Make durable that an epoch exists."""
        self._save(self._state._replace(epoch_seen=epoch), confirm_offset)

    def save_journal(self, journal: Journal, *, confirm_offset: int) -> None:
        """Make a journal durable; drop the oldest epochs of a journal that is too long."""
        self.journal = journal[-ENTRIES_MAX:]
        if self.journal != self._state.journal:
            self._save(self._state._replace(journal=self.journal), confirm_offset)

    def save_confirm(self, confirm_offset: int) -> None:
        """Make the confirm offset durable."""
        self._save(self._state, confirm_offset)

    # ------------------------------------------------------------ synced together with the log

    def request_confirm(self, confirm_offset: int) -> bool:
        """Let the next sync save the confirm offset if it has moved far; return whether it will.

        A start tells damage from a torn tail by it.
        """
        if confirm_offset - self.requested_confirm >= SAVED_BYTES:
            self.requested_confirm = confirm_offset
            self._is_confirm_due = True
        return self._is_confirm_due

    def request_mark(self, durable_offset: int) -> bool:
        """Let the next sync save the end of the durable log if it has moved; return whether."""
        self._is_mark_due = self.known_end.is_behind(durable_offset)
        return self._is_mark_due

    def begin_sync(self, *, confirm_offset: int, durable_offset: int) -> list[File]:
        """Write the requested values; return the files to sync. The last sync has ended."""
        self.end_sync()
        files = []
        if self._is_mark_due:
            files.append(self.known_end.write(durable_offset))
        if self._is_confirm_due:
            files.append(self.write_confirm(confirm_offset))
        self._is_mark_due = self._is_confirm_due = False
        return files

    def end_sync(self) -> None:
        """Note that the files of `begin_sync` are durable."""
        self.known_end.note_synced()
        for file in (self._in_sync, self._overtaken):
            if file is not None:
                file.close()
        self._in_sync = self._overtaken = None

    def write_confirm(self, confirm_offset: int) -> File:
        """Write the confirm offset; return the file to sync before `end_sync` is called."""
        assert self._in_sync is None, "one after the other"
        self._in_sync = _write_state(self._disk, self._next_state(self._state, confirm_offset))
        return self._in_sync

    def rewrite_damaged(self) -> str:
        """Write the state over a copy that is damaged or torn; return its name, "": there is none.

        The next damage then cannot pass for a write that a power cut tore.
        """
        damaged = damaged_state(self._disk)
        if damaged:
            self._save(self._state, self._state.confirm)
        return damaged

    def close(self, durable_offset: int) -> None:
        """Save the end of the durable log after the last sync."""
        self.end_sync()
        if self.known_end.is_behind(durable_offset):
            self.known_end.write(durable_offset).sync()
            self.known_end.note_synced()

    def _save(self, state: ReplicaState, confirm_offset: int) -> None:
        file = _write_state(self._disk, self._next_state(state, confirm_offset))
        file.sync()
        file.close()
        # The copy in `begin_sync` now has newer, durable content. The next state goes to the other
        # copy.
        self._in_sync, self._overtaken = None, self._in_sync or self._overtaken

    def _next_state(self, state: ReplicaState, confirm_offset: int) -> ReplicaState:
        """Return the next state; its generation chooses the copy that may not be durable."""
        generation = self._state.generation + (1 if self._in_sync is None else len(STATES))
        self._state = state._replace(generation=generation, confirm=confirm_offset)
        return self._state

    # ------------------------------------------------------------ cuts

    def begin_cut(self, cut: LogCut) -> None:
        """Make the intent of a cut durable. After a crash, the next start repeats the cut."""
        self._write_cut(INTENT, cut)

    def note_cut(self, cut: LogCut) -> None:
        """Make the report of a cut of the whole store durable, for operators."""
        self._write_cut(CUT, cut)

    def _write_cut(self, name: str, cut: LogCut) -> None:
        data = truncate_intent.encode(cut)
        file = self._disk.open(name, create=self._disk.read(name) is None)
        file.resize(len(data))
        file.write_at(0, [data])
        file.sync()
        file.close()
        self._disk.folder(FOLDER).sync()


# ---------------------------------------------------------------- identity and state


def identify(disk: Disk, fresh_uuid: bytes) -> bytes:
    """Return the identity of a store; give a new store `fresh_uuid`. Raises CorruptStore."""
    data = disk.read(IDENTITY)
    known = store_identity.find(data)
    if known is None and data is not None:
        raise CorruptStore(
            f"{IDENTITY} is damaged, so it is unknown whether this store is the one that the"
            f" broker group knows. It does not start. Empty its data directory; it is then copied"
            f" again."
        )
    if known is not None:
        _check_state(disk)
    else:
        _make_state(disk)
        # Written under another name and renamed, so that a torn write is not damage.
        _replace_file(disk, IDENTITY, store_identity.encode(fresh_uuid))
    # An earlier process may have created names here without this sync.
    disk.folder(FOLDER).sync()
    return known or fresh_uuid


def _check_state(disk: Disk) -> None:
    """Raise CorruptStore if a store that has an identity has no replica state."""
    if all(replica_state.find(disk.read(name)) is None for name in STATES):
        raise _state_unknown("missing")


def _make_state(disk: Disk) -> None:
    """Make the state of a new store durable, before the store gets its identity.

    An earlier process may have left a torn first copy.
    """
    copies = [disk.read(name) for name in STATES]
    if None in copies and not any(map(replica_state.find, copies)):
        file = _write_state(disk, ReplicaState())
        file.sync()
        file.close()


def _find_state(disk: Disk) -> ReplicaState:
    """Return the newest state. Raises CorruptStore if both copies are damaged.

    A torn copy was never durable, and the other copy is intact.
    """
    copies = [disk.read(name) for name in STATES]
    known = [state for copy in copies if (state := replica_state.find(copy)) is not None]
    if not known and all(copy is not None for copy in copies):
        raise _state_unknown("damaged")
    return max(known, default=ReplicaState(), key=lambda state: state.generation)


def damaged_state(disk: Disk) -> str:
    """Return the copy of the state that is torn or damaged beside an intact one; "": none."""
    copies = {name: disk.read(name) for name in STATES}
    found = [name for name, data in copies.items() if data and replica_state.find(data) is None]
    return found[0] if len(found) == 1 else ""


def _state_unknown(why: str) -> CorruptStore:
    return CorruptStore(
        f"{' and '.join(STATES)} are {why}, so it is unknown which epochs this replica has"
        f" acknowledged. It does not start. Empty its data directory; it is then copied again."
    )


def _write_state(disk: Disk, state: ReplicaState) -> File:
    """Write one copy and return its file, to be synced. A crash leaves the other copy intact."""
    name = STATES[state.generation % len(STATES)]
    data = replica_state.encode(state)
    is_new = disk.read(name) is None
    file = disk.open(name, create=is_new)
    file.resize(len(data))
    file.write_at(0, [data])
    if is_new:
        disk.folder(FOLDER).sync()
    return file


def find_confirm(disk: Disk) -> int:
    """Return the saved confirm offset. The log before it is durable here."""
    return _find_state(disk).confirm


def find_epoch_seen(disk: Disk) -> int:
    """Return the highest epoch that a store knows; 0 if it never was a replica."""
    return _find_state(disk).epoch_seen


# ---------------------------------------------------------------- cuts and addresses


def find_intent(disk: Disk) -> LogCut | None:
    """Return a cut that a crash has interrupted; None if there is none.

    A start repeats the cut before it reads the log, and then calls `end_cut`.
    """
    return truncate_intent.find(disk.read(INTENT))


def end_cut(disk: Disk) -> None:
    """Make durable that a cut is done; from here on it is the last cut."""
    disk.rename(INTENT, CUT)
    disk.folder(FOLDER).sync()


def find_cut(disk: Disk) -> LogCut | None:
    """Return the last cut, for operators; None if there is none or the file is unreadable."""
    with contextlib.suppress(ReadFailed):
        return truncate_intent.find(disk.read(CUT))
    return None


def find_addresses(disk: Disk) -> dict[int, str]:
    """Return the saved addresses of the replicas; none if the file is torn or damaged."""
    checksum, _, lines = (disk.read(ADDRESSES) or b"").partition(b"\n")
    try:
        if int(checksum) != crc32(lines):
            return {}
        pairs = [line.split(" ", 1) for line in lines.decode().splitlines()]
    except ValueError:
        return {}
    return {int(number): address for number, address in pairs}


def save_addresses(disk: Disk, addresses: Iterable[tuple[int, str]]) -> None:
    """Save the addresses of the replicas."""
    lines = "".join(f"{number} {address}\n" for number, address in addresses).encode()
    data = b"%d\n%b" % (crc32(lines), lines)
    if disk.read(ADDRESSES) == data:
        return
    _replace_file(disk, ADDRESSES, data)
    disk.folder(FOLDER).sync()


def _replace_file(disk: Disk, name: str, data: bytes) -> None:
    temporary = f"{name}.new"
    file = disk.open(temporary, create=disk.read(temporary) is None)
    file.resize(len(data))
    file.write_at(0, [data])
    file.sync()
    file.close()
    disk.rename(temporary, name)
