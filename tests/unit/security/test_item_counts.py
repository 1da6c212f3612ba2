"""The numbers of security items, kept while items change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.security.bans import BAN, Ban, BanKind
from tidemill.security.item_counts import ItemCounts
from tidemill.security.quotas import QUOTA, QuotaKind, TrafficQuota

NAMES = [
    (BAN, Ban(kind=kind, value=value).name)
    for kind, value in (
        (BanKind.USER, "orders"),
        (BanKind.USER, "billing"),
        (BanKind.CLIENT, "10.0.0.1@x/24"),
        (BanKind.ADDRESS, "10.0.0.0/8"),
        (BanKind.ADDRESS, "11.0.0.0/8"),
        (BanKind.ADDRESS, "10.1.2.3/32"),
        (BanKind.ADDRESS, "2001:db8::/32"),
        (BanKind.ADDRESS, "::/0"),
    )
] + [
    (QUOTA, TrafficQuota(kind=QuotaKind.PREFIX, value="shop%").name),
    (QUOTA, TrafficQuota(kind=QuotaKind.TOPIC, value="address:1/8").name),
    ("user", "orders"),
    ("security", ""),
]


def test_bans_and_quotas_are_counted_by_subject_and_addresses_by_prefix() -> None:
    counts = ItemCounts()
    for key in NAMES:
        counts.add(*key)
    assert (counts.count(BAN), counts.count(QUOTA), counts.count("user")) == (8, 2, 1)
    assert [counts.count(BAN, kind) for kind in BanKind] == [2, 1, 5]
    assert counts.count(QUOTA, QuotaKind.PREFIX) == 1
    assert counts.lengths == {4: {8: 2, 32: 1}, 6: {32: 1, 0: 1}}


@given(st.lists(st.sampled_from(NAMES), max_size=60))
def test_changes_give_the_counts_of_the_items(changes: list[tuple[str, str]]) -> None:
    counts, items = ItemCounts(), set[tuple[str, str]]()
    for key in changes:
        if key in items:
            items.remove(key)
            counts.remove(*key)
        else:
            items.add(key)
            counts.add(*key)
    again = ItemCounts()
    for key in items:
        again.add(*key)
    kinds = {kind for kind, _ in NAMES}
    assert [counts.count(kind) for kind in kinds] == [again.count(kind) for kind in kinds]
    assert all(counts.count(BAN, kind) == again.count(BAN, kind) for kind in BanKind)
    assert counts.lengths == again.lengths
    assert all(count > 0 for lengths in counts.lengths.values() for count in lengths.values())
