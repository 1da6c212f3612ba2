"""Groups whose old receipt handles have ended: a part of the catalog.

There is one item per group, which is deleted with it. Why handles end: `pop/delivery_limits.py`.
"""

from __future__ import annotations

from typing import Any, Final, final

from tidemill.broker.engine.layout.numbers import GroupId

ITEM_PREFIX: Final = "handles "  # of the keys of these items


@final
class EndedHandles:
    """The log offset before which the handles of each group have ended."""

    def __init__(self) -> None:
        self.of_group: dict[GroupId, int] = {}

    def have_ended(self, group_id: GroupId, delivery_id: int) -> bool:
        """Return whether the handles of a delivery that is not in the table have ended."""
        return delivery_id < self.of_group.get(group_id, 0)

    def apply(self, item: dict[str, Any]) -> str:
        """Apply an item, and return its key."""
        self.of_group[item["group"]] = item["before"]
        return f"{ITEM_PREFIX}{item['group']}"

    def forget(self, group_id: GroupId) -> str:
        """Forget the item of a deleted group, and return its key."""
        self.of_group.pop(group_id, None)
        return f"{ITEM_PREFIX}{group_id}"

    def keys(self) -> list[str]:
        """Return the keys of all items."""
        return [f"{ITEM_PREFIX}{group_id}" for group_id in self.of_group]

    def item(self, key: str) -> dict[str, Any]:
        """Return the item of a key."""
        group_id = GroupId(int(key.removeprefix(ITEM_PREFIX)))
        return handles_item(group_id, self.of_group[group_id])


def handles_item(group_id: GroupId, before: int) -> dict[str, Any]:
    """Return the item that ends the handles of a group's deliveries before a log offset."""
    return {"op": "endHandles", "group": group_id, "before": before}
