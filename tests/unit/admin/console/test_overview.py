"""The problems of the overview."""

from __future__ import annotations

from typing import Any

from tidemill.admin.console.pages.overview import find_problems

GOOD: dict[str, Any] = {
    "name": "broker-0",
    "reachable": True,
    "replicas": [{"name": "broker-0-0", "inSync": True}],
}


def test_a_good_cluster_has_no_problem() -> None:
    storage = {"brokerGroups": [{"broker": "broker-0", "isFull": False}]}
    groups = {"groups": [{"name": "billing", "lag": 7, "consumers": 1}, {"name": "new"}]}
    assert find_problems({"items": [GOOD]}, storage, groups) == []


def test_each_problem_is_named_with_its_page() -> None:
    lost = {**GOOD, "name": "broker-1", "reachable": False, "reason": "refused", "replicas": []}
    behind = {**GOOD, "replicas": [{"name": "broker-0-1", "inSync": False}]}
    storage = {"brokerGroups": [{"broker": "broker-2", "isFull": True}]}
    groups = {"groups": [{"name": "a/b", "lag": 1_234, "consumers": 0}]}
    found = find_problems({"items": [lost, behind]}, storage, groups)
    assert [tuple(problem) for problem in found] == [
        ("broker-1", "unreachable: refused", "/cluster"),
        ("broker-0", "not in sync: broker-0-1", "/cluster"),
        ("broker-2", "the disk is full: sends fail", "/cluster"),
        ("a/b", "1,234 messages and no consumer", "/groups/a%2Fb"),
    ]


def test_a_caller_without_rights_sees_no_problem() -> None:
    assert find_problems(None, None, None) == []
