"""The store in memory, which other tests use, passes the suite of all stores."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from tests.support.worlds.memory_meta_store import Contents, MemoryStore
from tests.support.worlds.meta_store_suite import MetaStoreSuite
from tidemill.controller.meta_store import MetaStore


class TestMemoryStore(MetaStoreSuite):
    @contextlib.asynccontextmanager
    async def stores(self) -> AsyncIterator[tuple[MetaStore, MetaStore]]:
        contents = Contents()
        yield MemoryStore(contents), MemoryStore(contents)
