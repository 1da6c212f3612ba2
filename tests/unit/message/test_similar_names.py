"""The search for an existing name that a new name misspells."""

from __future__ import annotations

import pytest

from tidemill.message.similar_names import find_similar

NAMES = {"orders", "orders-1", "billing-worker", "abc", "tenant-a%orders", "a%abc"}


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("order", "orders"),  # a missing letter
        ("orderrs", "orders"),  # an additional letter
        ("ordars", "orders"),  # a wrong letter
        ("odrers", "orders"),  # a transposition
        ("Orders", "orders"),
        ("billing_worker", "billing-worker"),
        ("billing-worker", None),  # the name itself
        ("orders-2", None),  # a series
        ("order-s1", "orders-1"),
        ("abd", None),  # too short
        ("payments", None),
        ("x" * 200, None),
        ("tenant-a%ordrs", "tenant-a%orders"),
        ("tenant-b%orders", None),  # another namespace
        ("tenant-b%ordrs", None),
        ("a%abd", None),  # too short without its namespace
    ],
)
def test_a_misspelt_name_is_found(name: str, similar: str | None) -> None:
    assert find_similar(name, NAMES) == similar
