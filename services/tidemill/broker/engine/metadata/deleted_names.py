"""Names of deleted topics and groups, as long as the log mentions them.

Records name an incarnation by its id. Only records before the deletion mention a deleted topic or
group. Therefore the name is needed until retention removes the deletion record. Until then it is
stated again, like every other item.
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
    stated_at: int  # log offset of the newest record with the name


@final
class DeletedNames:
    """Names of deleted topics and groups, by id."""

    def __init__(self) -> None:
        self.topics: dict[int, DeletedName] = {}
        self.groups: dict[int, DeletedName] = {}
        # Offset of the last deletion. It also applies to the orphans that are forgotten after it.
        self._deleted_at = 0

    def __bool__(self) -> bool:
        return bool(self.topics or self.groups)

    def note_deletion(self, log_offset: int) -> None:
        """Set the offset of the deletion for the following additions."""
        self._deleted_at = max(self._deleted_at, log_offset)

    def add_topic(self, topic_id: int, name: str, stated_at: int) -> None:
        """Add a deleted topic."""
        _add(self.topics, topic_id, DeletedName(name, self._deleted_at, stated_at))

    def add_group(self, group_id: int, name: str, stated_at: int) -> None:
        """Add a deleted group."""
        _add(self.groups, group_id, DeletedName(name, self._deleted_at, stated_at))

    def drop_before(self, log_offset: int) -> None:
        """Forget deletions before `log_offset`, the begin of the log."""
        for names in (self.topics, self.groups):
            for id_ in [id_ for id_, one in names.items() if one.deleted_at < log_offset]:
                del names[id_]

    def items(self, stated_before: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the names as configuration items: all, or those without a later record."""
        for of, names in (("topics", self.topics), ("groups", self.groups)):
            rows = iter(
                [
                    [id_, one.name, one.deleted_at]
                    for id_, one in names.items()
                    if stated_before is None or one.stated_at < stated_before <= one.deleted_at
                ]
            )
            while part := list(islice(rows, NAMES_AN_ITEM)):
                yield {"op": "gone", of: part}

    def apply(self, item: dict[str, Any], log_offset: int) -> None:
        """Apply an item of the record at `log_offset`."""
        for of, names in (("topics", self.topics), ("groups", self.groups)):
            for id_, name, deleted_at in item.get(of, ()):
                self.note_deletion(deleted_at)
                names.pop(id_, None)
                _add(names, id_, DeletedName(name, deleted_at, log_offset))


def _add(names: dict[int, DeletedName], id_: int, one: DeletedName) -> None:
    if id_ in names:
        return
    while len(names) >= NAMES_MAX:
        del names[next(iter(names))]
    names[id_] = one
