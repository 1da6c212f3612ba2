"""Quotas and entries of names that no topic and no consumer group can have."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.unit.admin.test_token_routes import TokenWorld
from tidemill.security.acl import parse_entry

BAD_ENTRIES = ["Topic:a b", "Topic:a!*", "Group:%RETRY%g", "Topic:" + "x" * 128, "Group:é"]


@pytest.mark.parametrize(
    ("kind", "subject", "status"),
    [
        ("topic", "bad topic!", 409),
        ("topic", "%RETRY%g", 409),
        ("topic", "x" * 127, 200),
        ("topic", "x" * 128, 409),
        ("group", "%DLQ%g", 409),
        ("group", "billing", 200),
        ("prefix", "shop%", 200),
        ("prefix", "%RET", 409),
        ("prefix", "two words", 409),
        ("client", "any id / at all", 200),
    ],
)
def test_a_quota_can_match_something(kind: str, subject: str, status: int) -> None:
    world = TokenWorld()
    field = "dispatchMessagesPerS" if kind == "group" else "publishMessagesPerS"
    answer = world.ask(f"PUT /quotas/{kind}/{quote(subject, safe='')}", "root", **{field: 1})
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize("resource", BAD_ENTRIES)
@pytest.mark.parametrize("path", ["/users/new", "/roles/new"])
def test_a_new_entry_can_match_something(path: str, resource: str) -> None:
    entries = [{"resource": resource, "actions": ["Sub"]}]
    answer = TokenWorld().ask(f"PUT {path}", "root", entries=entries)
    assert answer.status_code == 400, answer.text
    assert "would never decide" in answer.json()["detail"]


def test_an_entry_of_an_earlier_release_does_not_block_changes() -> None:
    world = TokenWorld(*[parse_entry(resource, ["Sub"]) for resource in BAD_ENTRIES])
    kept = [{"resource": resource, "actions": ["Sub"]} for resource in BAD_ENTRIES[1:]]
    added = {"resource": "Topic:orders", "actions": ["Pub"]}
    assert world.ask("PUT /users/ops", "root", entries=[*kept, added]).status_code == 200


@pytest.mark.parametrize("resource", ["Topic:shop%orders", "Topic:shop%*", "Group:*", "Topic:a|b*"])
def test_names_of_namespaces_and_prefixes_stay_legal(resource: str) -> None:
    entries = [{"resource": resource, "actions": ["Sub"]}]
    assert TokenWorld().ask("PUT /roles/new", "root", entries=entries).status_code == 200
