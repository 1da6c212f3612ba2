"""The store of group records: what is asked of it (failover.md 5). Each kind passes one suite.

Reads and swaps are linearizable. A call has a time-out of its own and raises StoreUnreachable when
nothing was done; a swap whose answer was lost is `Unknown`, and `election.swap.resolve` says what
became of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from enum import Enum, auto
from typing import NamedTuple, Protocol

from tidemill.controller.election.leadership import LeaseSeen
from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.swap import StoredRecord, WriteAttempt


class StoreUnreachable(Exception):
    """The store does not answer, or refuses to for now; nothing was written."""


class WriteFailure(Enum):
    """Why a swap has not, or not certainly, been done."""

    CONFLICT = auto()  # the version is another one: read again, and validate the request anew
    UNKNOWN = auto()  # the answer was lost


class RecordChange(NamedTuple):
    """A group's record has changed, or may have: for caches, not for decisions."""

    group: str
    stored: StoredRecord | None  # None: the group is gone


class MetaStore(Protocol):
    """Group records, and one lease."""

    async def get(self, group: str) -> StoredRecord | None:
        """Return a group's record; None: there is no such group. Raises StoreUnreachable."""

    async def create(self, group: str, record: GroupRecord) -> StoredRecord | WriteFailure:
        """Store the first record of a group. Raises StoreUnreachable."""

    async def swap(self, group: str, attempt: WriteAttempt) -> StoredRecord | WriteFailure:
        """Write a record in the place of the one that it was made from. Raises StoreUnreachable."""

    async def remove(self, group: str, token: str) -> WriteFailure | None:
        """Forget a group whose record is as it was read. Raises StoreUnreachable."""

    async def groups(self) -> list[str]:
        """Return the names of all groups, sorted. Raises StoreUnreachable."""

    def watch(self) -> AsyncGenerator[RecordChange, None]:
        """Yield changes as they come; gaps are possible, so who needs all of them reads again."""

    async def read_lease(self, name: str) -> LeaseSeen | None:
        """Return a lease; None: nobody has held it. Raises StoreUnreachable."""

    async def write_lease(
        self, name: str, seen: LeaseSeen | None, holder: str
    ) -> LeaseSeen | WriteFailure:
        """Take, renew or (with no holder) release a lease that was last `seen` so."""
