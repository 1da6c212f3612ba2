"""The changes from the definitions of a cluster to those of a file."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidemill.admin.definitions.export import CurrentDefinitions
from tidemill.admin.definitions.plan import planned_changes
from tidemill.admin.json.definitions import Definitions
from tidemill.common.errors import Conflict

TOPIC: dict[str, Any] = {
    "name": "orders",
    "messageType": "FIFO",
    "queues": 8,
    "deliverySpreadMs": 0,
    "retention": {"ms": None, "bytes": None, "acked": "keep"},
    "transaction": {"firstCheckMs": 6_000, "periodMs": 30_000, "attempts": 15},
    "dedup": None,
}
TAGS = {("topics", "orders"): '"7.3"', ("topics", "gone"): '"8.1"'}
USER: dict[str, Any] = {
    "name": "eve",
    "type": "NORMAL",
    "enabled": True,
    "entries": [{"resource": "Topic:orders", "actions": ["Pub"]}],
    "roles": ["a", "b"],
    "serviceAccounts": [],
    "certificates": [],
}


def file(**kinds: Any) -> Definitions:
    return Definitions.model_validate(kinds)


def planned(current: Definitions, wanted: Definitions, *, prune: bool = False) -> list[Any]:
    changes = asyncio.run(planned_changes(CurrentDefinitions(current, TAGS), wanted, prune=prune))
    return [(one.action.value, one.title, one.body) for one in changes]


def test_an_equal_file_has_no_changes() -> None:
    current = file(topics=[TOPIC], users=[USER])
    assert planned(current, current, prune=True) == []
    other_order = {**USER, "roles": ["b", "a"]}
    assert planned(current, file(users=[other_order])) == []
    entry = {"resource": "Topic:orders", "actions": ["pub"], "sources": [], "decision": "ALLOW"}
    assert planned(current, file(users=[{**USER, "entries": [entry]}])) == []


def test_a_missing_field_does_not_change() -> None:
    current = file(topics=[TOPIC])
    assert planned(current, file(topics=[{"name": "orders"}])) == []
    part = {"name": "orders", "retention": {"acked": "free"}}
    change = ("CHANGE", "topic orders", {"retention": {"acked": "free"}})
    assert planned(current, file(topics=[part])) == [change]
    assert planned(current, file(topics=[{"name": "orders", "dedup": None}])) == []


def test_a_put_that_replaces_has_all_fields() -> None:
    limits = {"publishMessagesPerS": 5, "storedBytes": 7}
    quota = {"kind": "topic", "subject": "orders", **limits}
    wanted = {"kind": "topic", "subject": "orders", "publishMessagesPerS": 6}
    body = {"publishMessagesPerS": 6, "storedBytes": 7}
    found = planned(file(quotas=[quota]), file(quotas=[wanted]))
    assert found == [("CHANGE", "quota topic/orders", body)]


def test_objects_are_made_before_what_needs_them_and_deleted_after_it() -> None:
    full = file(
        roles=[{"name": "r", "entries": []}],
        users=[USER],
        topics=[TOPIC],
        groups=[{"name": "g"}],
        quotas=[{"kind": "user", "subject": "eve", "publishMessagesPerS": 5}],
    )
    titles = ["role r", "user eve", "topic orders", "group g", "quota user/eve"]
    empty = file(roles=[], users=[], topics=[], groups=[], quotas=[])
    assert [title for _, title, _ in planned(empty, full)] == titles
    assert planned(full, empty, prune=True) == [("DELETE", each, None) for each in titles[::-1]]
    assert planned(full, empty) == []


def test_a_kind_that_the_file_lacks_is_left_alone() -> None:
    current = file(topics=[TOPIC], users=[USER])
    assert planned(current, file(topics=[]), prune=True) == [("DELETE", "topic orders", None)]


def test_a_change_expects_the_version_that_was_compared() -> None:
    current = file(topics=[TOPIC, {**TOPIC, "name": "gone"}])
    wanted = file(topics=[{"name": "orders", "queues": 9}, {"name": "new"}])
    plan = planned_changes(CurrentDefinitions(current, TAGS), wanted, prune=True)
    changes = asyncio.run(plan)
    assert {one.name: one.headers for one in changes} == {
        "orders": {b"if-match": b'"7.3"'},
        "new": {b"if-none-match": b"*"},
        "gone": {b"if-match": b'"8.1"'},
    }


def test_an_object_twice_is_refused() -> None:
    with pytest.raises(Conflict, match="topic t twice"):
        planned(file(), file(topics=[{"name": "t"}, {"name": "t"}]))
