"""The retention of a topic: when its messages die (ADR 0068)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.common.errors import BadRequest

RETENTION_LEVEL: Final = 2  # feature level of the configuration item
KEEP_FOREVER_MS: Final = -1
RETENTION_MS_MIN: Final = 60_000  # a look every 10 s must be short compared with it
RETENTION_MS_MAX: Final = 400 * 86_400_000  # the longest delay of a message
RETENTION_BYTES_MIN: Final = 1 << 20  # a TRIM record should free as much
RETENTION_BYTES_MAX: Final = 1 << 50  # more than a volume has


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRetention:
    """The retention of a topic; None is the default of the broker."""

    ms: int | None = None  # a message is kept at least as long; KEEP_FOREVER_MS: for ever
    bytes: int | None = None  # per broker group: the sum of the record sizes; None: no limit
    # Messages die when all consumer groups that have begun the topic have settled them.
    frees_acked: bool = False

    def check(self) -> None:
        """Raise BadRequest if a value is outside of its bounds."""
        ms, size_bytes = self.ms, self.bytes
        if ms not in {None, KEEP_FOREVER_MS} and not RETENTION_MS_MIN <= ms <= RETENTION_MS_MAX:
            raise BadRequest(
                f"the retention of a topic is {RETENTION_MS_MIN} to {RETENTION_MS_MAX} ms, or"
                f" {KEEP_FOREVER_MS} for ever, not {ms}"
            )
        if size_bytes is not None and not RETENTION_BYTES_MIN <= size_bytes <= RETENTION_BYTES_MAX:
            raise BadRequest(
                f"the retention of a topic is {RETENTION_BYTES_MIN} to {RETENTION_BYTES_MAX} bytes,"
                f" not {size_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionChange:
    """A change of the retention of a topic; None does not change a field."""

    ms: int | None = None  # 0: the default of the broker
    bytes: int | None = None  # 0: no limit
    frees_acked: bool | None = None

    def apply_to(self, old: TopicRetention) -> TopicRetention:
        """Return the retention after the change. Raises BadRequest."""
        new = TopicRetention(
            ms=old.ms if self.ms is None else self.ms or None,
            bytes=old.bytes if self.bytes is None else self.bytes or None,
            frees_acked=old.frees_acked if self.frees_acked is None else self.frees_acked,
        )
        new.check()
        return new


NO_CHANGE: Final = RetentionChange()
BROKER_DEFAULT: Final = TopicRetention()


def retention_item(retention: TopicRetention) -> dict[str, Any]:
    """Return the JSON form, without defaults."""
    found: dict[str, Any] = {"ms": retention.ms, "bytes": retention.bytes}
    if retention.frees_acked:
        found["acked"] = "free"
    return {key: value for key, value in found.items() if value is not None}


def decode_retention(item: dict[str, Any]) -> TopicRetention:
    """Read the JSON form. Raises UnknownRecord for an unknown field or value."""
    unknown = item.keys() - {"ms", "bytes", "acked"}
    if unknown or item.get("acked", "keep") not in {"keep", "free"}:
        raise UnknownRecord(f"retention of a topic: {item}")
    return TopicRetention(
        ms=item.get("ms"), bytes=item.get("bytes"), frees_acked=item.get("acked") == "free"
    )
