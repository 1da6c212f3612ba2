"""The store of group records in one SQLite file: for a laptop, tests, and a single machine.

    groups   name, token, record    the token comes from one counter: it is never used twice, also
                                    when a group is removed and created again
    leases   name, holder, renewals

Several processes of one machine may share the file. Each commit is on the disk before its caller
continues (synchronous = FULL). All calls run in one thread, in their order. A call that waits
longer than BUSY_TIMEOUT_MS for the lock of another process raises StoreUnreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar, final

from tidemill.controller.election.leadership import LeaseSeen
from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.swap import StoredRecord, WriteAttempt
from tidemill.controller.meta_store import RecordChange, StoreUnreachable, WriteFailure
from tidemill.controller.record_json import from_text, to_text

BUSY_TIMEOUT_MS: Final = 1_000  # the time-out of each call of a store
# Between two looks for writes of other processes. A look without news reads a counter in shared
# memory.
WATCH_PERIOD_S: Final = 0.05

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS groups (
    name TEXT PRIMARY KEY, token INTEGER NOT NULL, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
    name TEXT PRIMARY KEY, holder TEXT NOT NULL, renewals INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (last INTEGER NOT NULL);
INSERT INTO tokens SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM tokens);
"""

T = TypeVar("T")


def read_record(path: Path, group: str) -> GroupRecord | None:
    """Return a group's record from a file while no controller runs; None: it has none.

    Raises StoreUnreachable.
    """
    if not path.exists():
        return None
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_MS / 1000)) as file:
            row = file.execute("SELECT record FROM groups WHERE name = ?", (group,)).fetchone()
    except sqlite3.Error as error:
        raise StoreUnreachable(f"{path}: {error}") from error
    return None if row is None else from_text(row[0])


@final
class SqliteStore:
    """One connection to the file, in its own thread."""

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
            token = _next_token(connection)
            done = connection.execute(
                "INSERT OR IGNORE INTO groups VALUES (?, ?, ?)", (group, token, to_text(record))
            )
            return StoredRecord(record, str(token)) if done.rowcount else WriteFailure.CONFLICT

        return await self._write(insert)

    async def swap(self, group: str, attempt: WriteAttempt) -> StoredRecord | WriteFailure:
        """Replace the record on which the attempt is based. Raises StoreUnreachable."""

        def update(connection: sqlite3.Connection) -> StoredRecord | WriteFailure:
            token = _next_token(connection)
            done = connection.execute(
                "UPDATE groups SET token = ?, record = ? WHERE name = ? AND token = ?",
                (token, to_text(attempt.record), group, int(attempt.base.token)),
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
                    "INSERT OR IGNORE INTO leases VALUES (?, ?, ?)", (name, *lease)
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
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self._path,
            timeout=BUSY_TIMEOUT_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
        )
        self._connection = connection
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        for statement in filter(str.strip, _SCHEMA.split(";")):
            connection.execute(statement)
        connection.execute("COMMIT")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _get(self, group: str) -> StoredRecord | None:
        row = self._open_connection.execute(
            "SELECT record, token FROM groups WHERE name = ?", (group,)
        ).fetchone()
        return None if row is None else StoredRecord(from_text(row[0]), str(row[1]))

    def _tokens(self) -> dict[str, int]:
        rows = self._open_connection.execute("SELECT name, token FROM groups").fetchall()
        return dict(rows)

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except (sqlite3.Error, OSError) as error:
            raise StoreUnreachable(f"{self._path}: {error}") from error

    async def _write(self, change: Callable[[sqlite3.Connection], T]) -> T | WriteFailure:
        """Make a change in a transaction. After a cancellation, its outcome is unknown."""

        def transact() -> T | WriteFailure:
            connection = self._open_connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = change(connection)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            try:
                connection.execute("COMMIT")
            except sqlite3.Error:
                # Only a read shows whether the change is in the file.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                return WriteFailure.UNKNOWN
            return result

        try:
            return await self._run(transact)
        finally:
            self._has_written.set()


def _next_token(connection: sqlite3.Connection) -> int:
    connection.execute("UPDATE tokens SET last = last + 1")
    row = connection.execute("SELECT last FROM tokens").fetchone()
    return int(row[0])
