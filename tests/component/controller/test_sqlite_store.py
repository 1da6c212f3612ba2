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
from tidemill.controller.meta_store import MetaStore, StoreUnreachable, WriteFailure
from tidemill.controller.sqlite_store import SqliteStore


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

        with pytest.raises(StoreUnreachable):
            asyncio.run(run())
