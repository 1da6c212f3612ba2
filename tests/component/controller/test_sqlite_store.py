"""The store in a file passes the suite of all stores, and tests of its file."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.worlds.meta_store_suite import GROUP, MetaStoreSuite, done
from tests.support.worlds.replica_records import record_of_three
from tidemill.controller import sqlite_store
from tidemill.controller.election.swap import attempt_no_change
from tidemill.controller.meta_store import MetaStore, StoreDamaged, StoreUnreachable, WriteFailure
from tidemill.controller.sqlite_store import SqliteStore, read_record


class TestSqliteStore(MetaStoreSuite):
    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "groups.sqlite"

    @contextlib.asynccontextmanager
    async def stores(self) -> AsyncIterator[tuple[MetaStore, MetaStore]]:
        async with SqliteStore.open(self.path) as one, SqliteStore.open(self.path) as other:
            yield one, other

    def test_a_reopened_file_has_the_written_record(self) -> None:
        async def run() -> None:
            async with SqliteStore.open(self.path) as store:
                stored = done(await store.create(GROUP, record_of_three()))
                stored = done(await store.swap(GROUP, attempt_no_change(stored, "one")))
            async with SqliteStore.open(self.path) as store:
                assert await store.get(GROUP) == stored

        asyncio.run(run())

    def test_a_group_that_is_created_again_has_a_new_token(self) -> None:
        async def run() -> None:
            async with SqliteStore.open(self.path) as store:
                first = done(await store.create(GROUP, record_of_three()))
                moved = done(await store.swap(GROUP, attempt_no_change(first, "one")))
                assert await store.remove(GROUP, first.token) is WriteFailure.CONFLICT
                assert await store.remove(GROUP, moved.token) is None
                done(await store.create(GROUP, record_of_three()))
                assert (
                    await store.swap(GROUP, attempt_no_change(first, "late"))
                    is WriteFailure.CONFLICT
                )

        asyncio.run(run())

    def test_a_write_to_a_locked_file_times_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite_store, "BUSY_TIMEOUT_MS", 1)

        async def run() -> None:
            async with SqliteStore.open(self.path) as store:
                stored = done(await store.create(GROUP, record_of_three()))
                with contextlib.closing(sqlite3.connect(self.path)) as holder:
                    holder.execute("BEGIN EXCLUSIVE")
                    with pytest.raises(StoreUnreachable):
                        await store.swap(GROUP, attempt_no_change(stored, "one"))
                    # A writer does not block reads.
                    assert await store.get(GROUP) == stored
                    holder.rollback()
                done(await store.swap(GROUP, attempt_no_change(stored, "one")))

        asyncio.run(run())

    def test_a_file_with_foreign_content_is_an_error(self) -> None:
        self.path.write_bytes(b"no database " * 100)

        async def run() -> None:
            async with SqliteStore.open(self.path):
                pass

        with pytest.raises(StoreDamaged, match="move the file away"):
            asyncio.run(run())
        with pytest.raises(StoreDamaged):
            read_record(self.path, GROUP)

    def test_a_file_of_another_program_is_an_error_and_is_not_changed(self) -> None:
        with contextlib.closing(sqlite3.connect(self.path)) as file:
            file.execute("CREATE TABLE recipes (name TEXT)")

        async def run() -> None:
            async with SqliteStore.open(self.path):
                pass

        with pytest.raises(StoreDamaged, match="or another program's"):
            asyncio.run(run())
        with contextlib.closing(sqlite3.connect(self.path)) as file:
            assert file.execute("SELECT name FROM sqlite_schema").fetchall() == [("recipes",)]

    def test_a_flipped_bit_is_named_or_changes_nothing(self) -> None:
        """A bit of each third byte: of records, names, pages, tables and the header."""
        names = ["a", "b"]

        async def make() -> None:
            async with SqliteStore.open(self.path) as store:
                for name in names:
                    done(await store.create(name, record_of_three()))

        async def look() -> None:
            async with SqliteStore.open(self.path) as store:
                assert await store.groups() == names
                for name in names:
                    stored = await store.get(name)
                    assert stored is not None
                    assert stored.record == record_of_three()
                    assert await store.create(name, record_of_three()) is WriteFailure.CONFLICT

        asyncio.run(make())
        good, found = self.path.read_bytes(), 0
        assert len(good) > 1_000
        for at in (n for n, byte in enumerate(good) if n % 3 == 0 and (byte or n % 16 == 0)):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            self.path.write_bytes(bad)
            for ending in ("-wal", "-shm"):
                self.path.with_name(self.path.name + ending).unlink(missing_ok=True)
            try:
                asyncio.run(look())
            except StoreDamaged as error:
                found += 1
                assert "move the file away" in str(error)  # noqa: PT017  # Some bits do no harm.
        assert found > 400

    def test_the_newest_record_does_not_depend_on_the_write_ahead_log(self) -> None:
        """A flipped bit in the log hides all later frames of it, and so brings back a record."""

        async def run() -> None:
            copy = self.path.with_name("copy.sqlite")
            async with SqliteStore.open(self.path) as store:
                stored = done(await store.create(GROUP, record_of_three()))
                for write in range(3):
                    stored = done(await store.swap(GROUP, attempt_no_change(stored, f"{write}")))
                    copy.write_bytes(self.path.read_bytes())
                    assert read_record(copy, GROUP) == stored.record
                # A reader keeps the log in use until the next write.
                with contextlib.closing(sqlite3.connect(self.path)) as reader:
                    reader.execute("BEGIN")
                    reader.execute("SELECT name FROM groups").fetchall()
                    stored = done(await store.swap(GROUP, attempt_no_change(stored, "read")))
                stored = done(await store.swap(GROUP, attempt_no_change(stored, "again")))
                copy.write_bytes(self.path.read_bytes())
                assert read_record(copy, GROUP) == stored.record

        asyncio.run(run())

    def test_a_group_with_a_damaged_name_is_not_created_again(self) -> None:
        async def run() -> None:
            async with SqliteStore.open(self.path) as store:
                done(await store.create(GROUP, record_of_three()))
                with contextlib.closing(sqlite3.connect(self.path)) as file:
                    file.execute("UPDATE groups SET name = CAST(x'ff' AS TEXT)")
                    file.commit()
                with pytest.raises(StoreDamaged):
                    await store.get(GROUP)
                with pytest.raises(StoreDamaged):
                    await store.create(GROUP, record_of_three())

        asyncio.run(run())

    @pytest.mark.parametrize("column", ["name", "token", "record", "checksum"])
    def test_a_damaged_record_is_named_and_never_believed(self, column: str) -> None:
        changes = {
            "name": "name || 'x'",
            "token": "token + 1",
            "record": "replace(record, '\"epoch\":', '\"epoci\":')",  # one flipped bit: epoch 0
            "checksum": "checksum + 1",
        }

        async def damage() -> None:
            async with SqliteStore.open(self.path) as store:
                done(await store.create(GROUP, record_of_three()))
                with contextlib.closing(sqlite3.connect(self.path)) as file:
                    file.execute(f"UPDATE groups SET {column} = {changes[column]}")
                    file.commit()
                with pytest.raises(StoreDamaged, match=r"groups\.sqlite is damaged"):
                    await store.get(GROUP)

        async def reopen() -> None:
            async with SqliteStore.open(self.path):
                pass

        asyncio.run(damage())
        with pytest.raises(StoreDamaged, match="move the file away"):
            asyncio.run(reopen())

    def test_a_cut_record_is_named(self) -> None:
        async def run() -> None:
            async with SqliteStore.open(self.path) as store:
                done(await store.create(GROUP, record_of_three()))
                with contextlib.closing(sqlite3.connect(self.path)) as file:
                    file.execute("UPDATE groups SET record = '{}'")
                    file.commit()
                with pytest.raises(StoreDamaged):
                    await store.get(GROUP)

        asyncio.run(run())
        with pytest.raises(StoreDamaged):
            read_record(self.path, GROUP)

    def test_a_damaged_counter_never_repeats_a_token(self) -> None:
        async def run() -> None:
            async with SqliteStore.open(self.path) as store:
                stored = done(await store.create(GROUP, record_of_three()))
            with contextlib.closing(sqlite3.connect(self.path)) as file:
                file.execute("UPDATE tokens SET last = 0")
                file.commit()
            async with SqliteStore.open(self.path) as store:
                moved = done(await store.swap(GROUP, attempt_no_change(stored, "one")))
                assert int(moved.token) > int(stored.token)

        asyncio.run(run())
