"""What topics and groups were called that were deleted, as long as the log speaks of them.

Records name an incarnation by its number. What was deleted is spoken of by records from before its
deletion alone, so when retention has taken that one nobody asks any more. Until then its name is
stated again, as everything is, before the record that states it goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple, final

# Of topics and of groups each; about 20 MiB. Beyond it the first that were deleted are forgotten,
# and told by their numbers.
NAMES_MAX: Final = 65_536
NAMES_AN_ITEM: Final = 1_024  # up to 150 KiB


class DeletedName(NamedTuple):
    """What something was called."""

    name: str
    gone_at: int  # log offset of the deletion
    stated_at: int  # log offset of the newest record that says the name


@final
class DeletedNames:
    """Names by number."""

    def __init__(self) -> None:
        self.topics: dict[int, DeletedName] = {}
        self.groups: dict[int, DeletedName] = {}
        # Of the last deletion: what dies with a topic or a group is forgotten behind it.
        self._gone_at = 0

    def __bool__(self) -> bool:
        return bool(self.topics or self.groups)

    def note_deletion(self, log_offset: int) -> None:
        """Note where the deletion is of what is added from here on."""
        self._gone_at = max(self._gone_at, log_offset)

    def add_topic(self, topic_id: int, name: str, stated_at: int) -> None:
        """Note a topic that is gone."""
        _add(self.topics, topic_id, DeletedName(name, self._gone_at, stated_at))

    def add_group(self, group_id: int, name: str, stated_at: int) -> None:
        """Note a group that is gone."""
        _add(self.groups, group_id, DeletedName(name, self._gone_at, stated_at))

    def drop_before(self, log_offset: int) -> None:
        """Forget whose deletion is before `log_offset`, where the log begins now."""
        for names in (self.topics, self.groups):
            for id_ in [id_ for id_, one in names.items() if one.gone_at < log_offset]:
                del names[id_]

    def items(self, stated_before: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the names as configuration items; those that no later record says, or all."""
        for of, names in (("topics", self.topics), ("groups", self.groups)):
            rows = iter(
                [
                    [id_, one.name, one.gone_at]
                    for id_, one in names.items()
                    if stated_before is None or one.stated_at < stated_before <= one.gone_at
                ]
            )
            while some := list(islice(rows, NAMES_AN_ITEM)):
                yield {"op": "gone", of: some}

    def apply(self, item: dict[str, Any], log_offset: int) -> None:
        """Take an item over that stands at `log_offset`."""
        for of, names in (("topics", self.topics), ("groups", self.groups)):
            for id_, name, gone_at in item.get(of, ()):
                self.note_deletion(gone_at)
                names.pop(id_, None)
                _add(names, id_, DeletedName(name, gone_at, log_offset))


def _add(names: dict[int, DeletedName], id_: int, one: DeletedName) -> None:
    if id_ in names:
        return
    while len(names) >= NAMES_MAX:
        del names[next(iter(names))]
    names[id_] = one
