"""The store of group records in one SQLite file: for a laptop, tests, and a single machine.

    groups   name, token, record, checksum
                                    the token comes from one counter: it is never used twice, also
                                    when a group is removed and created again
    leases   name, holder, renewals

The checksum covers the other columns of its row. A damaged row raises StoreDamaged: an epoch that
the disk changed would let two replicas lead one epoch. There is no index on names: a damaged index
would hide a group. The pages and tables of the file are checked when it is opened.

Several processes of one machine may share the file. Each commit is on the disk before its caller
continues (synchronous = FULL), and in the file itself: SQLite drops the rest of a write-ahead log
(`-wal`) behind a damaged frame, which would bring an older record back. If another process reads at
that moment, the next write empties the log. All calls run in one thread, in their order. A call
that waits longer than BUSY_TIMEOUT_MS for the lock of another process raises StoreUnreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sqlite3 import SQLITE_CORRUPT, SQLITE_ERROR, SQLITE_NOTADB, SQLITE_READONLY
from typing import Final, TypeVar, final
from zlib import crc32

from tidemill.common.private_files import make_private_folder
from tidemill.controller.election.leadership import LeaseSeen
from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.swap import StoredRecord, WriteAttempt
from tidemill.controller.meta_store import (
    RecordChange,
    StoreDamaged,
    StoreUnreachable,
    WriteFailure,
)
from tidemill.controller.record_json import from_text, to_text

BUSY_TIMEOUT_MS: Final = 1_000  # the time-out of each call of a store
# Between two looks for writes of other processes. A look without news reads a counter in shared
# memory.
WATCH_PERIOD_S: Final = 0.05

_SCHEMA: Final = """
CREATE TABLE groups (
    name TEXT NOT NULL, token INTEGER NOT NULL, record TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE leases (name TEXT NOT NULL, holder TEXT NOT NULL, renewals INTEGER NOT NULL);
CREATE TABLE tokens (last INTEGER NOT NULL);
INSERT INTO tokens VALUES (0);
"""
# A damaged counter never repeats a token.
_MEND_COUNTER: Final = """
UPDATE tokens SET last = max(last, (SELECT coalesce(max(token), 0) FROM groups))
"""

_SELECT_ALL: Final = "SELECT name, token, record, checksum FROM groups"
_SELECT: Final = _SELECT_ALL + " WHERE name = ?"

# SQLite rejects a correct statement only if the tables are not those of `_SCHEMA`.
_DAMAGE_CODES: Final = frozenset({SQLITE_CORRUPT, SQLITE_NOTADB, SQLITE_ERROR})

T = TypeVar("T")


def _checksum(name: str, token: int, record: str) -> int:
    return crc32(f"{name}\0{token}\0{record}".encode())


def _checked(path: Path, row: tuple[str, int, str, int]) -> StoredRecord:
    """Return the record of a row. Raises StoreDamaged."""
    name, token, record, checksum = row
    if _checksum(name, token, record) != checksum:
        raise _damage(f"the record of broker group {name!r} in {path} is damaged")
    return StoredRecord(from_text(record), str(token))


def _damage(what: str) -> StoreDamaged:
    return StoreDamaged(
        f"{what}; stop the controllers, move the file away, and start them: the replicas register"
        " again, and an alarm names the command that chooses the master"
    )


def _failure(path: Path, error: sqlite3.Error | OSError | UnicodeDecodeError) -> StoreUnreachable:
    """Return the error of a call that SQLite or the disk failed."""
    kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
    is_damaged = (
        kind in _DAMAGE_CODES
        or isinstance(error, UnicodeDecodeError)  # The text of the error quotes damaged text.
        # The first bytes of a file can say that it is of a later format, which is only for reading.
        or (kind == SQLITE_READONLY and os.access(path, os.W_OK))
    )
    if is_damaged:
        return _damage(f"{path} is damaged ({error})")
    return StoreUnreachable(f"{path}: {error}")


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False
    )
    # A flipped bit may leave text that is not UTF-8: the checksum names its record.
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    return connection


def _find(path: Path, connection: sqlite3.Connection, group: str) -> StoredRecord | None:
    """Return the record of a group. Raises StoreDamaged."""
    row = connection.execute(_SELECT, (group,)).fetchone()
    if row is not None:
        return _checked(path, row)
    # It may be there under a damaged name.
    _check_all(path, connection)
    return None


def _check_all(path: Path, connection: sqlite3.Connection) -> None:
    for row in connection.execute(_SELECT_ALL):
        _checked(path, row)


def read_record(path: Path, group: str) -> GroupRecord | None:
    """Return a group's record from a file while no controller runs; None: it has none.

    Raises StoreUnreachable.
    """
    if not path.exists():
        return None
    try:
        with contextlib.closing(_open(path)) as file:
            stored = _find(path, file, group)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise _failure(path, error) from error
    return None if stored is None else stored.record


@final
class SqliteStore:
    """One connection to the file, in its own thread."""

    has_specs: Final = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="meta-store")
        self._connection: sqlite3.Connection | None = None
        self._has_written = asyncio.Event()  # Writes of this process do not wait for the next look.

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, path: Path) -> AsyncIterator[SqliteStore]:
        """Yield the store of a file, which is created if missing. Raises StoreUnreachable."""
        store = cls(path)
        try:
            await store._run(store._connect)
            yield store
        finally:
            # The thread disconnects after all earlier calls.
            with contextlib.suppress(StoreUnreachable):
                await store._run(store._disconnect)
            store._thread.shutdown()

    # ------------------------------------------------------------ records

    async def get(self, group: str) -> StoredRecord | None:
        """Return a group's record; None: there is no such group. Raises StoreUnreachable."""
        return await self._run(lambda: self._get(group))

    async def create(self, group: str, record: GroupRecord) -> StoredRecord | WriteFailure:
        """Store the first record of a group. Raises StoreUnreachable."""

        def insert(connection: sqlite3.Connection) -> StoredRecord | WriteFailure:
            if _find(self._path, connection, group) is not None:
                return WriteFailure.CONFLICT
            token = _next_token(connection)
            connection.execute(
                "INSERT INTO groups VALUES (?, ?, ?, ?)",
                (group, token, text := to_text(record), _checksum(group, token, text)),
            )
            return StoredRecord(record, str(token))

        return await self._write(insert)

    async def swap(self, group: str, attempt: WriteAttempt) -> StoredRecord | WriteFailure:
        """Replace the record on which the attempt is based. Raises StoreUnreachable."""

        def update(connection: sqlite3.Connection) -> StoredRecord | WriteFailure:
            token = _next_token(connection)
            done = connection.execute(
                "UPDATE groups SET token = ?, record = ?, checksum = ?"
                " WHERE name = ? AND token = ?",
                (
                    token,
                    text := to_text(attempt.record),
                    _checksum(group, token, text),
                    group,
                    int(attempt.base.token),
                ),
            )
            return (
                StoredRecord(attempt.record, str(token)) if done.rowcount else WriteFailure.CONFLICT
            )

        return await self._write(update)

    async def remove(self, group: str, token: str) -> WriteFailure | None:
        """Remove a group if its record still has `token`. Raises StoreUnreachable."""

        def delete(connection: sqlite3.Connection) -> WriteFailure | None:
            done = connection.execute(
                "DELETE FROM groups WHERE name = ? AND token = ?", (group, int(token))
            )
            return None if done.rowcount else WriteFailure.CONFLICT

        return await self._write(delete)

    async def groups(self) -> list[str]:
        """Return the names of all groups, sorted. Raises StoreUnreachable."""
        return sorted(await self._run(self._tokens))

    async def changes(self) -> AsyncGenerator[RecordChange, None]:
        """Yield all groups, then changes as they come; changes of this process at once.

        While the file is unreadable, it yields nothing; afterwards, the missed changes.
        """
        known: dict[str, int] = {}
        while True:
            self._has_written.clear()
            with contextlib.suppress(StoreUnreachable):
                tokens = await self._run(self._tokens)
                for group in [name for name in known if name not in tokens]:
                    del known[group]
                    yield RecordChange(group, None)
                for group, token in tokens.items():
                    if known.get(group) != token and (stored := await self.get(group)) is not None:
                        known[group] = int(stored.token)
                        yield RecordChange(group, stored)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_PERIOD_S):
                    await self._has_written.wait()

    # ------------------------------------------------------------ leases

    async def read_lease(self, name: str) -> LeaseSeen | None:
        """Return a lease; None: it was never held. Raises StoreUnreachable."""

        def read() -> LeaseSeen | None:
            row = self._open_connection.execute(
                "SELECT holder, renewals FROM leases WHERE name = ?", (name,)
            ).fetchone()
            return None if row is None else LeaseSeen(*row)

        return await self._run(read)

    async def write_lease(
        self, name: str, seen: LeaseSeen | None, holder: str
    ) -> LeaseSeen | WriteFailure:
        """Take, renew or (without a holder) release a lease if its state is still `seen`."""
        lease = LeaseSeen(holder, 1 if seen is None else seen.renewals + 1)

        def write(connection: sqlite3.Connection) -> LeaseSeen | WriteFailure:
            if seen is None:
                done = connection.execute(
                    "INSERT INTO leases SELECT ?, ?, ?"
                    " WHERE NOT EXISTS (SELECT 1 FROM leases WHERE name = ?)",
                    (name, *lease, name),
                )
            else:
                done = connection.execute(
                    "UPDATE leases SET holder = ?, renewals = ?"
                    " WHERE name = ? AND holder = ? AND renewals = ?",
                    (*lease, name, *seen),
                )
            return lease if done.rowcount else WriteFailure.CONFLICT

        return await self._write(write)

    # ------------------------------------------------------------ in the thread

    @property
    def _open_connection(self) -> sqlite3.Connection:
        assert self._connection is not None, "the store is open"
        return self._connection

    def _connect(self) -> None:
        make_private_folder(self._path.parent)
        connection = self._connection = _open(self._path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        finding = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if finding != "ok":
            raise _damage(f"{self._path} is damaged ({' '.join(finding.split())})")
        connection.execute("BEGIN IMMEDIATE")
        statements = [one.strip() for one in _SCHEMA.split(";") if one.strip()]
        tables = connection.execute("SELECT sql FROM sqlite_schema ORDER BY rowid").fetchall()
        if not tables:
            for statement in statements:
                connection.execute(statement)
        elif [sql for (sql,) in tables] != [one for one in statements if "TABLE" in one]:
            raise _damage(f"the tables in {self._path} are damaged, or another program's")
        _check_all(self._path, connection)
        connection.execute(_MEND_COUNTER)
        connection.execute("COMMIT")
        self._empty_log()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _get(self, group: str) -> StoredRecord | None:
        return _find(self._path, self._open_connection, group)

    def _tokens(self) -> dict[str, int]:
        rows = self._open_connection.execute("SELECT name, token FROM groups").fetchall()
        return dict(rows)

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise _failure(self._path, error) from error

    def _empty_log(self) -> None:
        """Move all commits from the write-ahead log into the file, unless others use it now."""
        connection = self._open_connection
        connection.execute("PRAGMA busy_timeout = 0")
        # The commit is done, whatever happens to the log.
        with contextlib.suppress(sqlite3.Error):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")

    async def _write(self, change: Callable[[sqlite3.Connection], T]) -> T | WriteFailure:
        """Make a change in a transaction. After a cancellation, its outcome is unknown."""

        def transact() -> T | WriteFailure:
            connection = self._open_connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = change(connection)
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            try:
                connection.execute("COMMIT")
            except sqlite3.Error:
                # Only a read shows whether the change is in the file.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                return WriteFailure.UNKNOWN
            self._empty_log()
            return result

        try:
            return await self._run(transact)
        finally:
            self._has_written.set()


def _next_token(connection: sqlite3.Connection) -> int:
    connection.execute("UPDATE tokens SET last = last + 1")
    row = connection.execute("SELECT last FROM tokens").fetchone()
    return int(row[0])
