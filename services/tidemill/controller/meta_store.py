"""The interface of the stores of group records. Each store passes one test suite.

Reads and swaps are linearizable. Each call has its own time-out and raises StoreUnreachable if
nothing was written. If the answer to a swap was lost, the result is UNKNOWN, and
`election.swap.outcome_of` finds the outcome.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from enum import Enum, auto
from typing import NamedTuple, Protocol

from tidemill.controller.election.leadership import LeaseSeen
from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.swap import StoredRecord, WriteAttempt


class StoreUnreachable(Exception):
    """The store does not answer, or rejects the call for now; nothing was written."""

    def describe(self) -> str:
        """Return the problem as an alarm or the answer to a request names it."""
        return f"the store is unreachable: {self}"


class StoreDamaged(StoreUnreachable):
    """The store, or a record of it, is damaged. The text names the file and the remedy."""

    def describe(self) -> str:
        """Return the problem as an alarm or the answer to a request names it."""
        return f"the store is damaged: {self}"


class WriteFailure(Enum):
    """The reason why a write was not done, or why its outcome is unknown."""

    CONFLICT = auto()  # the store has another version; read and validate again
    UNKNOWN = auto()  # the answer was lost


class RecordChange(NamedTuple):
    """A possible change of a group's record: for caches, not for decisions."""

    group: str
    stored: StoredRecord | None  # None: the group was removed


class MetaStore(Protocol):
    """Group records, and one lease."""

    @property
    def has_specs(self) -> bool:
        """Whether each group has a spec, which sets its replicas and min-in-sync."""

    async def get(self, group: str) -> StoredRecord | None:
        """Return a group's record; None: there is no such group. Raises StoreUnreachable."""

    async def create(self, group: str, record: GroupRecord) -> StoredRecord | WriteFailure:
        """Store the first record of a group. Raises StoreUnreachable."""

    async def swap(self, group: str, attempt: WriteAttempt) -> StoredRecord | WriteFailure:
        """Replace the record on which the attempt is based. Raises StoreUnreachable."""

    async def remove(self, group: str, token: str) -> WriteFailure | None:
        """Remove a group if its record still has `token`. Raises StoreUnreachable."""

    async def groups(self) -> list[str]:
        """Return the names of all groups, sorted. Raises StoreUnreachable."""

    def changes(self) -> AsyncGenerator[RecordChange, None]:
        """Yield all groups, then changes as they come. Of fast changes only the last is certain."""

    async def read_lease(self, name: str) -> LeaseSeen | None:
        """Return a lease; None: it was never held. Raises StoreUnreachable."""

    async def write_lease(
        self, name: str, seen: LeaseSeen | None, holder: str
    ) -> LeaseSeen | WriteFailure:
        """Take, renew or (without a holder) release a lease if its state is still `seen`."""
