"""Names of deleted topics and groups, as long as the log mentions them.

Records name an incarnation by its id. Only records before the deletion mention a deleted topic or
group. Therefore the name is needed until retention removes the deletion record. Until then it is
stated again, like every other item.

A recent deletion also keeps clients from creating the name again. Therefore the name is kept until
`recreate_block_ms` have passed, also if retention removes the deletion record earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple, final

# Topics and groups each; about 20 MiB. Beyond this limit the oldest deletions are forgotten, and
# events show ids instead of names.
NAMES_MAX: Final = 65_536
NAMES_AN_ITEM: Final = 1_024  # up to 150 KiB


class DeletedName(NamedTuple):
    """The name of a deleted topic or group."""

    name: str
    deleted_at: int  # log offset of the deletion
    deleted_at_ms: int
    stated_at: int  # log offset of the newest record with the name


@final
class DeletedNames:
    """Names of deleted topics and groups, by id."""

    def __init__(self) -> None:
        self.topics: dict[int, DeletedName] = {}
        self.groups: dict[int, DeletedName] = {}
        # When the last topic or group of a name was deleted.
        self._topic_times: dict[str, int] = {}
        self._group_times: dict[str, int] = {}
        # Of the last deletion. They also apply to the orphans that are forgotten after it.
        self._deleted_at = 0
        self._deleted_at_ms = 0

    def __bool__(self) -> bool:
        return bool(self.topics or self.groups)

    def note_deletion(self, log_offset: int, at_ms: int) -> None:
        """Set the offset and the time of the deletion for the following additions."""
        self._deleted_at = max(self._deleted_at, log_offset)
        self._deleted_at_ms = at_ms

    def add_topic(self, topic_id: int, name: str, stated_at: int) -> None:
        """Add a deleted topic."""
        self._add(self.topics, topic_id, name, stated_at)

    def add_group(self, group_id: int, name: str, stated_at: int) -> None:
        """Add a deleted group."""
        self._add(self.groups, group_id, name, stated_at)

    def topic_deleted_at_ms(self, name: str) -> int:
        """Return when a topic of this name was last deleted; 0 if that is unknown."""
        return self._topic_times.get(name, 0)

    def group_deleted_at_ms(self, name: str) -> int:
        """Return when a group of this name was last deleted; 0 if that is unknown."""
        return self._group_times.get(name, 0)

    def drop_before(self, log_offset: int, recent_since_ms: int) -> None:
        """Forget deletions before `log_offset`, the begin of the log, and not after that time."""
        for names in (self.topics, self.groups):
            for id_, one in list(names.items()):
                if one.deleted_at < log_offset and one.deleted_at_ms <= recent_since_ms:
                    self._drop(names, id_)

    def items(
        self, stated_before: int | None = None, recent_since_ms: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Yield the names as configuration items.

        With `stated_before`, yield the names that only records before this offset state, and that
        are needed after it: their deletion is later, or happened after `recent_since_ms`.
        """
        for of, names in (("topics", self.topics), ("groups", self.groups)):
            rows = iter(
                [
                    [id_, one.name, one.deleted_at, one.deleted_at_ms]
                    for id_, one in names.items()
                    if stated_before is None
                    or (
                        one.stated_at < stated_before
                        and (stated_before <= one.deleted_at or recent_since_ms < one.deleted_at_ms)
                    )
                ]
            )
            while part := list(islice(rows, NAMES_AN_ITEM)):
                yield {"op": "gone", of: part}

    def apply(self, item: dict[str, Any], log_offset: int) -> None:
        """Apply an item of the record at `log_offset`."""
        for of, names in (("topics", self.topics), ("groups", self.groups)):
            for id_, name, deleted_at, at_ms in item.get(of, ()):
                self.note_deletion(deleted_at, at_ms)
                names.pop(id_, None)
                self._add(names, id_, name, log_offset, deleted_at)

    def _add(
        self,
        names: dict[int, DeletedName],
        id_: int,
        name: str,
        stated_at: int,
        deleted_at: int | None = None,
    ) -> None:
        if id_ in names:
            return
        while len(names) >= NAMES_MAX:
            self._drop(names, next(iter(names)))
        at = self._deleted_at if deleted_at is None else deleted_at
        names[id_] = DeletedName(name, at, self._deleted_at_ms, stated_at)
        times = self._times_of(names)
        times[name] = max(self._deleted_at_ms, times.get(name, 0))

    def _drop(self, names: dict[int, DeletedName], id_: int) -> None:
        one, times = names.pop(id_), self._times_of(names)
        if times.get(one.name) == one.deleted_at_ms:
            del times[one.name]

    def _times_of(self, names: dict[int, DeletedName]) -> dict[str, int]:
        return self._topic_times if names is self.topics else self._group_times
