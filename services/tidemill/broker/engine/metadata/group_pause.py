"""The pause of a consumer group: its pops find nothing until it ends (ADR 0095)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.common.errors import BadRequest, Conflict

PAUSE_LEVEL: Final = 5  # feature level
PAUSE_MS_MAX: Final = 30 * 86_400_000
REASON_CHARS_MAX: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPause:
    """A pause that an operator has begun."""

    until_ms: int  # wall time
    by: str  # the operator
    reason: str = ""

    def check(self, now_ms: int) -> None:
        """Raise Conflict if the pause is over already or too long, BadRequest for the reason."""
        if not now_ms < self.until_ms <= now_ms + PAUSE_MS_MAX:
            raise Conflict(
                f"a pause ends in the future, at most 30 days from now; {self.until_ms} (Unix, ms)"
                " does not"
            )
        if len(self.reason) > REASON_CHARS_MAX or not self.reason.isprintable():
            raise BadRequest(
                f"the reason of a pause is one line of at most {REASON_CHARS_MAX} characters"
            )

    def as_item(self) -> dict[str, Any]:
        """Return the pause as a field of a configuration item."""
        return asdict(self)


def decode_pause(item: dict[str, Any] | None) -> GroupPause | None:
    """Read the JSON form. Raises UnknownRecord for an unknown field."""
    try:
        return None if item is None else GroupPause(**item)
    except TypeError:
        raise UnknownRecord(f"pause of a consumer group: {item}") from None
