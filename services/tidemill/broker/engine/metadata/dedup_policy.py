"""The deduplication of a topic, and the broker groups that own its keys (ADR 0087)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.common.errors import BadRequest, Conflict

DEDUP_LEVEL: Final = 4  # feature level of dedup keys
WINDOW_MS_MIN: Final = 1_000
WINDOW_MS_MAX: Final = 86_400_000
MAX_WAIT_MS_MIN: Final = 1_000
MEMORY_BYTES_MIN: Final = 1 << 20


class DedupKeySource(StrEnum):
    """The origin of the dedup key of a message."""

    PROPERTY = "property"  # user property `dedup-key`; a message without it is not checked
    MESSAGE_ID = "messageId"
    PROPERTY_OR_MESSAGE_ID = "propertyOrMessageId"


class DedupMode(StrEnum):
    """The meaning of a repeated key."""

    FIRST = "first"  # the repeat is not stored
    REPLACE = "replace"  # the repeat replaces a pending delayed message


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupPolicy:
    """The deduplication of one topic."""

    window_ms: int = 120_000  # from the store time of the first message
    key_from: DedupKeySource = DedupKeySource.PROPERTY_OR_MESSAGE_ID
    mode: DedupMode = DedupMode.FIRST
    max_wait_ms: int | None = None  # of mode `replace`: from the first schedule to the delivery
    memory_bytes: int | None = None  # own share per broker group; None: topics share the rest

    def check(self, *, max_delay_ms: int, memory_bytes_max: int) -> None:
        """Raise BadRequest for a value outside of its bounds, and Conflict if two do not fit."""
        if not WINDOW_MS_MIN <= self.window_ms <= WINDOW_MS_MAX:
            raise BadRequest(
                f"windowMs (--dedup-window) of a deduplication is {WINDOW_MS_MIN} to"
                f" {WINDOW_MS_MAX} ms, not {self.window_ms}"
            )
        if self.mode is DedupMode.FIRST and self.max_wait_ms is not None:
            raise Conflict("maxWaitMs (--dedup-max-wait) of a deduplication needs the mode replace")
        if self.mode is DedupMode.REPLACE:
            if self.max_wait_ms is None:
                raise Conflict(
                    "a deduplication with the mode replace needs maxWaitMs (--dedup-max-wait)"
                )
            if not MAX_WAIT_MS_MIN <= self.max_wait_ms <= max_delay_ms:
                raise Conflict(
                    f"maxWaitMs (--dedup-max-wait) of a deduplication is {MAX_WAIT_MS_MIN} to"
                    f" {max_delay_ms} ms, the maximum delay, not {self.max_wait_ms}"
                )
        share = self.memory_bytes
        if share is not None and not MEMORY_BYTES_MIN <= share <= memory_bytes_max:
            raise Conflict(
                f"memoryBytes (--dedup-memory) of a deduplication is {MEMORY_BYTES_MIN} to"
                f" {memory_bytes_max} bytes (dedup_memory_bytes), not {share}"
            )

    def as_item(self) -> dict[str, Any]:
        """Return the policy as a field of a configuration item."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupChange:
    """A change of the deduplication of a topic; None does not change a field."""

    is_off: bool = False  # turn it off and forget all keys
    is_on: bool = False  # turn it on, also if no field is set
    window_ms: int | None = None
    key_from: DedupKeySource | None = None
    mode: DedupMode | None = None
    max_wait_ms: int | None = None
    memory_bytes: int | None = None  # 0: no own share

    def apply_to(
        self, old: DedupPolicy | None, *, max_delay_ms: int, memory_bytes_max: int
    ) -> DedupPolicy | None:
        """Return the policy after the change. Raises BadRequest."""
        if self.is_off:
            return None
        if not self.is_on:
            return old
        new = old or DedupPolicy()
        if self.window_ms is not None:
            new = replace(new, window_ms=self.window_ms)
        if self.key_from is not None:
            new = replace(new, key_from=self.key_from)
        if self.mode is not None:
            kept_ms = new.max_wait_ms if self.mode is DedupMode.REPLACE else None
            new = replace(new, mode=self.mode, max_wait_ms=kept_ms)
        if self.max_wait_ms is not None:
            new = replace(new, max_wait_ms=self.max_wait_ms)
        if self.memory_bytes is not None:
            new = replace(new, memory_bytes=self.memory_bytes or None)
        new.check(max_delay_ms=max_delay_ms, memory_bytes_max=memory_bytes_max)
        return new


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPlacement:
    """The broker groups that own the dedup keys of a topic.

    Without deduplication, no broker group owns keys. `before` then has the broker groups that may
    know some until they have recorded that.
    """

    groups: tuple[str, ...] = ()  # empty: only the home
    version: int = 0  # a higher version replaces a lower one
    # While a spread is open: the owners before it, which may know keys that they no longer own.
    before: tuple[str, ...] = ()
    # The version of the topic with which deduplication was turned on. A broker group forgets the
    # keys of another start. 0: by a broker without a cluster, or deduplication is off.
    since: int = 0
    # While a spread is open: when this broker group has recorded the list, by the clock of keys.
    fenced_at_ms: int = field(default=0, compare=False)


NO_DEDUP_CHANGE: Final = DedupChange()
NO_PLACEMENT: Final = KeyPlacement()


def decode_dedup(item: dict[str, Any] | None) -> DedupPolicy | None:
    """Read the JSON form. Raises UnknownRecord for an unknown field or value."""
    if item is None:
        return None
    try:
        return DedupPolicy(
            **{
                **item,
                "key_from": DedupKeySource(item["key_from"]),
                "mode": DedupMode(item["mode"]),
            }
        )
    except (TypeError, ValueError, KeyError):
        raise UnknownRecord(f"deduplication of a topic: {item}") from None


def placement_item(placement: KeyPlacement) -> dict[str, Any]:
    """Return the placement as a field of a configuration item."""
    item: dict[str, Any] = {"groups": list(placement.groups), "version": placement.version}
    if placement.before:
        item["before"] = list(placement.before)
        item["fenced_at_ms"] = placement.fenced_at_ms
    if placement.since:
        item["since"] = placement.since
    return item


def decode_placement(item: dict[str, Any] | None) -> KeyPlacement:
    """Read the JSON form. Raises UnknownRecord for an unknown field."""
    if item is None:
        return NO_PLACEMENT
    try:
        lists = {"groups": tuple(item["groups"]), "before": tuple(item.get("before", ()))}
        return KeyPlacement(**{**item, **lists})
    except (TypeError, KeyError):
        raise UnknownRecord(f"placement of a topic: {item}") from None
