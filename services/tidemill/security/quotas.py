"""Quotas, as items of the home store them (ADR 0078).

A prefix is the begin of a full topic name, so `shop%` is the namespace `shop`. All matching quotas
apply to a send. The quota of a consumer group applies to its deliveries.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias, final

from tidemill.security.item_counts import ItemCounts
from tidemill.security.subjects import subject_name, subject_of, uncached_name

QUOTA: Final = "quota"  # kind of the items
LIMIT_MAX: Final = 1_000_000_000_000  # per second
STOCK_MAX: Final = 1 << 50  # bytes, or timers: a petabyte
# Matches of each kind that are kept, about 500 bytes each. Beyond it all are forgotten and found
# again.
MATCHES_MAX: Final = 10_000


class QuotaKind(StrEnum):
    """The kind of a subject with a quota."""

    USER = "user"
    CLIENT = "client"
    TOPIC = "topic"
    PREFIX = "prefix"
    GROUP = "group"


class QuotaLimit(StrEnum):
    """A limited rate or stock. The value is the name in JSON and in metrics."""

    PUBLISH_MESSAGES = "publishMessagesPerS"
    PUBLISH_BYTES = "publishBytesPerS"
    DISPATCH_MESSAGES = "dispatchMessagesPerS"
    DISPATCH_BYTES = "dispatchBytesPerS"
    STORED_BYTES = "storedBytes"
    PENDING_TIMERS = "pendingTimers"


DISPATCH_LIMITS: Final = frozenset({QuotaLimit.DISPATCH_MESSAGES, QuotaLimit.DISPATCH_BYTES})
# Limits of the messages that are stored now. They have no time.
STOCK_LIMITS: Final = frozenset({QuotaLimit.STORED_BYTES, QuotaLimit.PENDING_TIMERS})
# Texts of refusals. A limit of deliveries refuses nothing.
LIMIT_TEXTS: Final[Mapping[QuotaLimit, str]] = {
    QuotaLimit.PUBLISH_MESSAGES: "publish messages/s",
    QuotaLimit.PUBLISH_BYTES: "publish bytes/s",
    QuotaLimit.STORED_BYTES: "stored bytes",
    QuotaLimit.PENDING_TIMERS: "pending timers",
}
_TITLES: Final = {
    QuotaKind.USER: "User",
    QuotaKind.CLIENT: "Client",
    QuotaKind.TOPIC: "Topic",
    QuotaKind.PREFIX: "Prefix",
    QuotaKind.GROUP: "Group",
}


class LimitKey(NamedTuple):
    """One limit of one quota: the key of its permit bucket."""

    quota: str  # name of the item
    limit: QuotaLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficQuota:
    """The limits of one subject."""

    kind: QuotaKind
    value: str  # name of the user, topic or consumer group, id of the client, or a prefix
    user_id: int = 0  # of a user: one that is created again is another user
    limits: Mapping[QuotaLimit, int] = field(default_factory=dict)  # per second, or of a stock
    created_at_ms: int = 0
    changed_at_ms: int = 0
    changed_by: str = ""
    version: int = 0  # of the security items with its last change; the home sets it

    @property
    def name(self) -> str:
        """The name of its item."""
        return subject_name(self.kind, self.value)

    @property
    def subject(self) -> str:
        """The subject, for errors."""
        return f"{_TITLES[self.kind]}:{self.value}"

    def to_item(self) -> dict[str, Any]:
        """Return the configuration item that puts this quota."""
        fields: dict[str, Any] = {"kind": self.kind.value, "value": self.value}
        if self.user_id:
            fields["userId"] = self.user_id
        fields |= {
            "limits": {limit.value: amount for limit, amount in self.limits.items()},
            "createdAtMs": self.created_at_ms,
            "changedAtMs": self.changed_at_ms,
            "changedBy": self.changed_by,
        }
        return {"op": QUOTA, "name": self.name, QUOTA: fields}


def has_stock_limit(encoded: bytes) -> bool:
    """Whether a stored item may have a limit of a stock. It costs less than to read the item."""
    return any(limit.value.encode() in encoded for limit in STOCK_LIMITS)


def quota_of(encoded: bytes) -> TrafficQuota:
    """Read the stored item of a quota."""
    item = json.loads(encoded)
    fields = item[QUOTA]
    # A later version may know more limits.
    limits = {limit: fields["limits"][limit] for limit in QuotaLimit if limit in fields["limits"]}
    return TrafficQuota(
        kind=QuotaKind(fields["kind"]),
        value=fields["value"],
        user_id=fields.get("userId", 0),
        limits=limits,
        created_at_ms=fields["createdAtMs"],
        changed_at_ms=fields["changedAtMs"],
        changed_by=fields["changedBy"],
        version=item.get("version", 0),
    )


class MatchedLimit(NamedTuple):
    """A limit that applies to a send or a delivery."""

    key: LimitKey
    amount: int  # per second, or of a stock
    subject: str

    def cost(self, *, messages: int, size_bytes: int, timers: int) -> int:
        """Return the permits that a send needs."""
        match self.key.limit:
            case QuotaLimit.PUBLISH_MESSAGES | QuotaLimit.DISPATCH_MESSAGES:
                return messages
            case QuotaLimit.PENDING_TIMERS:
                return timers
            case _:
                return size_bytes

    @property
    def stock_text(self) -> str:
        """The refusal of a send for which the stock has no room."""
        text = LIMIT_TEXTS[self.key.limit]
        return (
            f"{self.subject} has reached its limit of {self.amount} {text}; retry when there is"
            " room again"
        )


MatchedLimits: TypeAlias = tuple[MatchedLimit, ...]


@final
class _LimitCache:
    """The limits of subjects of one kind, found by an argument of calls."""

    def __init__(self, find: Callable[[str], MatchedLimits]) -> None:
        self._find = find
        self._known: dict[str, MatchedLimits] = {}

    def get(self, value: str) -> MatchedLimits:
        """Return the limits that apply to a user, a client, a topic or a consumer group."""
        limits = self._known.get(value)
        if limits is None:
            if len(self._known) >= MATCHES_MAX:
                self._known.clear()
            limits = self._known[value] = self._find(value)
        return limits

    def forget(self, value: str | None) -> None:
        """Forget the limits of one value; None: of all."""
        if value is None:
            self._known.clear()
        else:
            self._known.pop(value, None)


@final
class QuotaTable:
    """The quotas of a process, and the limits of each sender, topic and consumer group.

    Limits are found by user, by client, by topic with its prefixes, and by consumer group. So a new
    client id costs one look-up, and a change forgets only the limits of its subject.
    """

    def __init__(
        self, find_item: Callable[[str, str], bytes | None], find_counts: Callable[[], ItemCounts]
    ) -> None:
        """`find_item` returns an item by kind and name, and `find_counts` the counts of all items.

        The owner of the items calls `note_change` after each change of a quota.
        """
        self._find_item = find_item
        self._find_counts = find_counts
        self._matches: dict[tuple[str, int, str, str], MatchedLimits] = {}
        self._caches = {
            QuotaKind.CLIENT: _LimitCache(functools.partial(self._limits_of, QuotaKind.CLIENT)),
            QuotaKind.GROUP: _LimitCache(functools.partial(self._limits_of, QuotaKind.GROUP)),
            QuotaKind.TOPIC: _LimitCache(self._topic_limits),
        }
        self._counts = ItemCounts()
        self.is_empty = True
        self._listeners: list[Callable[[], None]] = []

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of a quota."""
        self._listeners.append(listener)

    def note_change(self, name: str | None = None) -> None:
        """Forget what was read from the item of a quota; None: from all."""
        self._matches.clear()
        kind, value = (None, None) if name is None else subject_of(name)
        if kind == QuotaKind.PREFIX:
            kind, value = QuotaKind.TOPIC, None  # Many topics have the prefix.
        for of_kind, cache in self._caches.items():
            if kind is None or of_kind == kind:
                cache.forget(value)
        self._counts = self._find_counts()
        self.is_empty = not self._counts.count(QUOTA)
        for listener in self._listeners:
            listener()

    def limits_of(self, user: str, user_id: int, client_id: str, topic: str) -> MatchedLimits:
        """Return the limits of a send. An empty user has none."""
        key = user, user_id, client_id, topic
        matched = self._matches.get(key)
        if matched is None:
            if len(self._matches) >= MATCHES_MAX:
                self._matches.clear()
            clients, topics = self._caches[QuotaKind.CLIENT], self._caches[QuotaKind.TOPIC]
            matched = clients.get(client_id) if self._has(QuotaKind.CLIENT) else ()
            matched += topics.get(topic)
            if user and self._has(QuotaKind.USER):
                matched += self._user_rates(user, user_id)
            self._matches[key] = matched
        return matched

    def group_limits(self, group: str) -> MatchedLimits:
        """Return the limits of the deliveries of a consumer group."""
        return self._caches[QuotaKind.GROUP].get(group)

    def _has(self, kind: QuotaKind) -> bool:
        return self._counts.count(QUOTA, kind) > 0

    def _limits_of(self, kind: QuotaKind, value: str) -> MatchedLimits:
        return tuple(self._limits_of_item(uncached_name(kind, value)))

    def _user_rates(self, user: str, user_id: int) -> MatchedLimits:
        """Return the limits of a user. Those of a deleted user with its name do not apply."""
        return tuple(self._limits_of_item(subject_name(QuotaKind.USER, user), user_id))

    def _topic_limits(self, topic: str) -> MatchedLimits:
        """Return the limits of a topic and of all its prefixes."""
        names = [uncached_name(QuotaKind.TOPIC, topic)]
        if self._has(QuotaKind.PREFIX):
            ends = range(1, len(topic) + 1)  # of a name of up to 127 characters
            names += [uncached_name(QuotaKind.PREFIX, topic[:end]) for end in ends]
        return tuple([limit for name in names for limit in self._limits_of_item(name)])

    def _limits_of_item(self, name: str, user_id: int = 0) -> Iterator[MatchedLimit]:
        if (encoded := self._find_item(QUOTA, name)) is not None:
            quota = quota_of(encoded)
            if quota.user_id != user_id:
                return
            for limit, amount in quota.limits.items():
                yield MatchedLimit(LimitKey(name, limit), amount, quota.subject)
