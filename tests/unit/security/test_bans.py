"""Bans of users, client ids and addresses: look-ups, ends and names."""

from __future__ import annotations

import ipaddress
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.security_items import counts_of
from tidemill.common.errors import BadRequest
from tidemill.security.bans import (
    BAN,
    DECODED_MAX,
    Ban,
    BanKind,
    BanTable,
    ban_of,
    covers,
    range_text,
)
from tidemill.security.subjects import ENCODED_BYTES_MAX, subject_name

NOW_MS = 1_000_000


class Bans:
    """A table of bans over items in memory."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}
        self.table = BanTable(
            lambda _kind, name: self.items.get(name), lambda: counts_of(BAN, self.items)
        )
        self.address_changes = 0
        self.table.on_addresses = self._count

    def _count(self) -> None:
        self.address_changes += 1

    def put(self, kind: BanKind, value: str, *, user_id: int = 0, until_ms: int = 0) -> str:
        ban = Ban(kind=kind, value=value, user_id=user_id, until_ms=until_ms)
        self.items[ban.name] = json.dumps(ban.to_item()).encode()
        self.table.note_change(ban.name)
        return ban.name

    def delete(self, name: str) -> None:
        del self.items[name]
        self.table.note_change(name)

    def bans_host(self, host: str, now_ms: int = NOW_MS) -> bool:
        return self.table.find_host(host, now_ms) is not None


def test_a_ban_is_stored_and_read_with_all_its_fields() -> None:
    ban = Ban(
        kind=BanKind.USER,
        value="orders",
        user_id=7,
        until_ms=NOW_MS,
        reason="a loop",
        created_at_ms=1,
        changed_at_ms=2,
        changed_by="ops",
    )
    item = ban.to_item()
    assert (item["op"], item["name"]) == ("ban", "user:orders")
    assert ban_of(json.dumps(item).encode()) == ban


def test_a_ban_of_a_user_is_about_one_id() -> None:
    bans = Bans()
    assert bans.table.find_user("orders", 7, NOW_MS) is None
    name = bans.put(BanKind.USER, "orders", user_id=7)
    found = bans.table.find_user("orders", 7, NOW_MS)
    assert found is not None
    assert found.text == "user orders is banned"
    assert bans.table.find_user("orders", 8, NOW_MS) is None, "a later user of this name"
    assert bans.table.find_user("other", 7, NOW_MS) is None
    assert not bans.table.has_clients
    bans.delete(name)
    assert bans.table.find_user("orders", 7, NOW_MS) is None
    assert not bans.table.has_users


def test_a_ban_ends_at_its_time_without_a_change() -> None:
    bans = Bans()
    bans.put(BanKind.CLIENT, "c", until_ms=NOW_MS)
    found = bans.table.find_client("c", NOW_MS - 1)
    assert found is not None
    assert found.text == "client c is banned until 1970-01-01T00:16:40Z"
    assert bans.table.find_client("c", NOW_MS) is None
    bans.put(BanKind.CLIENT, "c", until_ms=NOW_MS + 1)
    assert bans.table.find_client("c", NOW_MS) is not None, "a longer ban replaces it"


def test_client_ids_of_any_form_have_a_name_that_the_home_stores() -> None:
    bans = Bans()
    ids = ["host@4711@0@abc", "a/b%2F ü", "/" * 255, "x" * ENCODED_BYTES_MAX, "x" * 255]
    names = [bans.put(BanKind.CLIENT, client_id) for client_id in ids]
    assert len(set(names)) == len(ids)
    assert all(len(name) <= 255 and "/" not in name for name in names)
    for client_id in ids:
        assert bans.table.find_client(client_id, NOW_MS) is not None
        assert bans.table.find_client(client_id + "x", NOW_MS) is None
    hashed = subject_name(BanKind.CLIENT, "x" * 255).removeprefix("client:")
    assert bans.table.find_client(hashed, NOW_MS) is None, "the name of another ban"


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("10.1.0.0/16", "10.1.0.0/16"),
        ("10.1.2.3", "10.1.2.3/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("2001:db8:0::/48", "2001:db8::/48"),
        ("::ffff:10.1.0.0/112", "10.1.0.0/16"),
        ("::/0", "::/0"),
    ],
)
def test_a_range_has_one_text(given_: str, expected: str) -> None:
    assert range_text(given_) == expected


@pytest.mark.parametrize("text", ["10.1.0.1/16", "10.1.0.0/33", "orders", ""])
def test_a_malformed_range_is_rejected(text: str) -> None:
    with pytest.raises(BadRequest, match="neither an address nor a range"):
        range_text(text)


def test_an_address_is_banned_by_each_range_that_has_it() -> None:
    bans = Bans()
    assert not bans.bans_host("10.1.2.3")
    wide = bans.put(BanKind.ADDRESS, "10.0.0.0/8")
    narrow = bans.put(BanKind.ADDRESS, "10.1.2.3/32", until_ms=NOW_MS)
    six = bans.put(BanKind.ADDRESS, "2001:db8::/48")
    assert bans.bans_host("10.1.2.3")
    assert bans.bans_host("::ffff:10.1.2.3")
    assert bans.bans_host("2001:db8:0:1::7%eth0")
    assert not bans.bans_host("2001:db8:1::7")
    assert not bans.bans_host("11.0.0.1")
    assert not bans.bans_host("an unknown address")
    bans.delete(wide)
    assert bans.bans_host("10.1.2.3", NOW_MS - 1)
    assert not bans.bans_host("10.1.2.3"), "the narrow ban has ended"
    bans.delete(narrow)
    bans.delete(six)
    assert not bans.table.has_addresses
    assert bans.address_changes == 3, "a deletion closes no connection"


def test_another_table_replaces_all_bans() -> None:
    bans = Bans()
    bans.put(BanKind.ADDRESS, "10.0.0.0/8")
    bans.put(BanKind.CLIENT, "c")
    bans.items.clear()
    bans.table.note_all_changed()
    assert not bans.table.has_addresses
    assert not bans.table.has_clients
    assert not bans.bans_host("10.0.0.1")
    assert bans.address_changes == 1
    ban = Ban(kind=BanKind.ADDRESS, value="11.0.0.0/8")
    bans.items[ban.name] = json.dumps(ban.to_item()).encode()
    bans.table.note_all_changed()
    assert bans.bans_host("11.0.0.1")
    assert bans.address_changes == 2


def test_the_table_keeps_a_bounded_number_of_decoded_bans() -> None:
    bans = Bans()
    for n in range(DECODED_MAX + 5):
        bans.put(BanKind.CLIENT, f"c{n}")
        assert bans.table.find_client(f"c{n}", NOW_MS) is not None
    assert len(bans.table._decoded) == DECODED_MAX
    assert bans.table.find_client("c0", NOW_MS) is not None


def test_a_change_takes_as_many_steps_with_many_bans() -> None:
    """A change of one ban, and another table, hold no turn of the event loop."""
    items = {
        ban.name: b""
        for number in range(10_000)
        if (ban := Ban(kind=BanKind.CLIENT, value=f"c{number}"))
    }
    counts, read = counts_of(BAN, items), list[str]()

    def find(_kind: str, name: str) -> bytes | None:
        read.append(name)
        return items.get(name)

    table = BanTable(find, lambda: counts)
    table.note_all_changed()
    assert table.has_clients
    assert read == []
    table.note_change("address:10.0.0.0%2F8")
    assert read == ["address:10.0.0.0%2F8"]


ADDRESSES = st.one_of(
    st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address),
    st.integers(0, 255).map(ipaddress.IPv4Address),
    st.integers(0, 2**128 - 1).map(ipaddress.IPv6Address),
    st.integers(0, 255).map(lambda low: ipaddress.IPv6Address(0x20010DB8 << 96 | low)),
)


@given(st.lists(st.tuples(ADDRESSES, st.integers(0, 128)), max_size=8), ADDRESSES)
def test_a_look_up_equals_a_search_of_all_ranges(
    ranges: list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]],
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    bans = Bans()
    networks = [
        ipaddress.ip_network((one, min(length, one.max_prefixlen)), strict=False)
        for one, length in ranges
    ]
    values = {range_text(str(network)) for network in networks}
    for value in values:
        bans.put(BanKind.ADDRESS, value)
    found = any(covers(Ban(kind=BanKind.ADDRESS, value=value), str(address)) for value in values)
    assert bans.bans_host(str(address)) is found
