"""Bans of users, client ids and addresses, as items of the home store them (ADR 0078).

The end of a ban is a time in its item. Each look-up compares it with the clock, so no record ends a
ban. A look-up of a user or a client is one step. A look-up of an address takes one step for each
length of a prefix that a ban has: at most 33 for IPv4, and 129 for IPv6.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, final

from tidemill.security.acl import SourceAddress, parse_address, parse_range
from tidemill.security.item_counts import ADDRESS, SLASH, ItemCounts
from tidemill.security.subjects import subject_name

BAN: Final = "ban"  # kind of the items
REASON_CHARS_MAX: Final = 512
DECODED_MAX: Final = 1_000  # bans that calls have met, about 500 bytes each
_BITS: Final = {4: 32, 6: 128}
_FAMILIES: Final = {4: socket.AF_INET, 6: socket.AF_INET6}


class BanKind(StrEnum):
    """The kind of a banned subject."""

    USER = "user"
    CLIENT = "client"
    ADDRESS = "address"


_ADDRESS_PREFIX: Final = f"{BanKind.ADDRESS}:"
assert BanKind.ADDRESS.value == ADDRESS, "the counts know the names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """A ban of one subject."""

    kind: BanKind
    value: str  # name of the user, id of the client, or a range of addresses
    user_id: int = 0  # of a user: one that is created again is another user
    until_ms: int = 0  # Unix time of its end; 0: it does not end
    reason: str = ""  # for operators
    created_at_ms: int = 0
    changed_at_ms: int = 0
    changed_by: str = ""
    version: int = 0  # of the security items with its last change; the home sets it

    @property
    def name(self) -> str:
        """The name of its item."""
        return subject_name(self.kind, self.value)

    @property
    def text(self) -> str:
        """The subject and the end, for a refused client. Only operators see the reason."""
        at = datetime.fromtimestamp(self.until_ms // 1_000, UTC)
        end = f" until {at:%Y-%m-%dT%H:%M:%SZ}" if self.until_ms else ""
        return f"{self.kind} {self.value} is banned{end}"

    def is_over(self, now_ms: int) -> bool:
        """Whether the ban has ended."""
        return 0 < self.until_ms <= now_ms

    def to_item(self) -> dict[str, Any]:
        """Return the configuration item that puts this ban."""
        fields: dict[str, Any] = {"kind": self.kind.value, "value": self.value}
        if self.user_id:
            fields["userId"] = self.user_id
        fields |= {
            "untilMs": self.until_ms,
            "reason": self.reason,
            "createdAtMs": self.created_at_ms,
            "changedAtMs": self.changed_at_ms,
            "changedBy": self.changed_by,
        }
        return {"op": BAN, "name": self.name, BAN: fields}


def ban_of(encoded: bytes) -> Ban:
    """Read the stored item of a ban."""
    item = json.loads(encoded)
    fields = item[BAN]
    return Ban(
        kind=BanKind(fields["kind"]),
        value=fields["value"],
        user_id=fields.get("userId", 0),
        until_ms=fields["untilMs"],
        reason=fields["reason"],
        created_at_ms=fields["createdAtMs"],
        changed_at_ms=fields["changedAtMs"],
        changed_by=fields["changedBy"],
        version=item.get("version", 0),
    )


def range_text(text: str) -> str:
    """Return an address or a range as its ban names it. Raises BadRequest.

    An IPv4-mapped IPv6 range is an IPv4 range.
    """
    found = parse_range(text)
    size = found.high - found.low + 1
    length = _BITS[found.version] - size.bit_length() + 1
    return _range_text(found.version, found.low, length)


def covers(ban: Ban, address: str) -> bool:
    """Whether a ban is about an address."""
    found = parse_address(address)
    return ban.kind is BanKind.ADDRESS and found is not None and parse_range(ban.value).has(found)


def _range_text(version: int, low: int, length: int) -> str:
    packed = low.to_bytes(_BITS[version] // 8)
    return f"{socket.inet_ntop(_FAMILIES[version], packed)}/{length}"


@final
class BanTable:
    """The bans of a process, read from encoded items when a call meets them."""

    def __init__(
        self, find_item: Callable[[str, str], bytes | None], find_counts: Callable[[], ItemCounts]
    ) -> None:
        """`find_item` returns an item by kind and name, and `find_counts` the counts of all items.

        The owner of the items calls `note_all_changed` when they have arrived, and `note_change`
        after each change of a ban. Both take constant time.
        """
        self._find_item = find_item
        self._find_counts = find_counts
        self._lengths: Mapping[int, Mapping[int, int]] = {4: {}, 6: {}}
        self._decoded: dict[str, Ban] = {}
        self.has_users = self.has_clients = self.has_addresses = False
        # Called after a ban of addresses was put or changed.
        self.on_addresses: Callable[[], None] = lambda: None

    def note_change(self, name: str) -> None:
        """Take over a ban that was put or deleted."""
        self._decoded.pop(name, None)
        self._read_counts()
        if name.startswith(_ADDRESS_PREFIX) and self._find_item(BAN, name) is not None:
            self.on_addresses()

    def note_all_changed(self) -> None:
        """Take over another table."""
        self._decoded.clear()
        self._read_counts()
        if self.has_addresses:
            self.on_addresses()

    def _read_counts(self) -> None:
        counts = self._find_counts()
        self.has_users = counts.count(BAN, BanKind.USER) > 0
        self.has_clients = counts.count(BAN, BanKind.CLIENT) > 0
        self.has_addresses = counts.count(BAN, BanKind.ADDRESS) > 0
        self._lengths = counts.lengths

    # ------------------------------------------------------------ look-ups

    def find_user(self, name: str, user_id: int, now_ms: int) -> Ban | None:
        """Return the ban of a user that is in force."""
        if not self.has_users:
            return None
        ban = self._find(subject_name(BanKind.USER, name), now_ms)
        return ban if ban is not None and ban.user_id == user_id else None

    def find_client(self, client_id: str, now_ms: int) -> Ban | None:
        """Return the ban of a client id that is in force."""
        if not self.has_clients:
            return None
        ban = self._find(subject_name(BanKind.CLIENT, client_id), now_ms)
        return ban if ban is not None and ban.value == client_id else None

    def find_host(self, host: str, now_ms: int) -> Ban | None:
        """Return a ban of the address of a peer that is in force."""
        if not self.has_addresses or (address := parse_address(host)) is None:
            return None
        return self._find_address(address, now_ms)

    def _find_address(self, address: SourceAddress, now_ms: int) -> Ban | None:
        version, number = address
        bits = _BITS[version]
        for length in self._lengths[version]:
            low = number >> (bits - length) << (bits - length)
            name = _ADDRESS_PREFIX + _range_text(version, low, length).replace("/", SLASH)
            if (ban := self._find(name, now_ms)) is not None:
                return ban
        return None

    def _find(self, name: str, now_ms: int) -> Ban | None:
        ban = self._decoded.get(name)
        if ban is None:
            encoded = self._find_item(BAN, name)
            if encoded is None:
                return None
            ban = ban_of(encoded)
            if len(self._decoded) >= DECODED_MAX:
                del self._decoded[next(iter(self._decoded))]  # the oldest one
            self._decoded[name] = ban
        return None if ban.is_over(now_ms) else ban
