"""The creator of a topic: a user, or the first use by a client (ADR 0103)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tidemill.broker.engine.layout.record import UnknownRecord

CREATOR_LEVEL: Final = 5  # feature level of the configuration item


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicCreator:
    """The creator of a topic."""

    user: str = ""  # empty without a verified user
    is_first_use: bool = False

    def as_item(self) -> dict[str, Any]:
        """Return the creator as a field of a configuration item, without defaults."""
        if self.is_first_use:
            return {"firstUse": True}
        return {"user": self.user} if self.user else {}


FIRST_USE: Final = TopicCreator(is_first_use=True)


def decode_creator(item: dict[str, Any] | None) -> TopicCreator | None:
    """Read the JSON form. Raises UnknownRecord for an unknown field."""
    if item is None:
        return None
    if item.keys() - {"user", "firstUse"}:
        raise UnknownRecord(f"creator of a topic: {item}")
    if item.get("firstUse", False):
        return FIRST_USE
    return TopicCreator(user=item.get("user", ""))
