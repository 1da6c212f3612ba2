"""Rules of all REST paths, on a running cluster: ETags, dry runs, and errors that help."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("rules") / "data", "--groups=2") as started:
        yield started


@pytest.fixture
def http(running: Standalone) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=30) as client:
        yield client


RESOURCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/topics/bills": ({"deliverySpreadMs": 5}, {"deliverySpreadMs": 6}),
    "/groups/payers": ({"maxAttempts": 3}, {"maxAttempts": 4}),
    "/roles/sellers": ({"entries": []}, {"entries": [{"resource": "*", "actions": ["Get"]}]}),
    "/users/eve": ({"enabled": True}, {"enabled": False}),
    "/quotas/topic/bills": ({"publishMessagesPerS": 5}, {"publishMessagesPerS": 6}),
}


@pytest.mark.parametrize("path", RESOURCES)
def test_a_change_of_another_version_is_refused(http: httpx.Client, path: str) -> None:
    first, second = RESOURCES[path]
    made = http.put(path, json=first, headers={"If-None-Match": "*"})
    assert made.status_code == 200, made.text
    old = made.headers["ETag"]
    assert http.get(path).headers["ETag"] == old
    again = http.put(path, json=second, headers={"If-None-Match": "*"})
    assert (again.status_code, again.json()["title"]) == (412, "PreconditionFailed")
    changed = http.put(path, json=second, headers={"If-Match": old})
    assert changed.status_code == 200, changed.text
    new = changed.headers["ETag"]
    assert new != old
    refused = http.put(path, json=first, headers={"If-Match": old})
    assert refused.status_code == 412
    current, shown = refused.json()["current"], http.get(path).json()
    [field] = first
    assert current[field] == shown[field] != first[field]
    assert http.delete(path, headers={"If-Match": old}).status_code == 412
    assert http.get(path).headers["ETag"] == new
    assert http.delete(path, headers={"If-Match": new}).is_success
    assert http.put(path, json=first, headers={"If-Match": "*"}).status_code == 412
    assert http.get(path).status_code == 404
    # A new incarnation has another ETag, so an old one cannot match it.
    remade = http.put(path, json=first)
    assert remade.headers["ETag"] not in {old, new}
    http.delete(path).raise_for_status()


def test_a_page_token_belongs_to_its_list_filter_and_order(http: httpx.Client) -> None:
    for name in ("token-a", "token-b", "token-c"):
        http.put(f"/topics/{name}", json={}).raise_for_status()
        http.put(f"/groups/{name}", json={}).raise_for_status()
    query = {"prefix": "token-", "pageSize": "2"}
    first = http.get("/topics", params=query).json()
    token = first["nextPageToken"]
    rest = http.get("/topics", params={**query, "pageToken": token, "pageSize": "9"}).json()
    assert [one["name"] for one in rest["topics"]] == ["token-c"]
    for path, other in (
        ("/topics", {"prefix": "token"}),
        ("/topics", {}),
        ("/topics", {**query, "sort": "-bytes"}),
        ("/groups", query),
        ("/clients", {}),
        ("/audit", {}),
    ):
        refused = http.get(path, params={**other, "pageToken": token})
        assert (path, refused.status_code) == (path, 400), refused.text
    assert "another filter" in http.get("/topics", params={"pageToken": token}).json()["detail"]
    for name in ("token-a", "token-b", "token-c"):
        http.delete(f"/topics/{name}").raise_for_status()
        http.delete(f"/groups/{name}").raise_for_status()


@pytest.mark.parametrize("tag", ["7.1", 'W/"7.1"', '"7"', '"7.1", "7.2"', "x"])
def test_a_strange_etag_is_refused(http: httpx.Client, tag: str) -> None:
    refused = http.put("/topics/strange", json={}, headers={"If-Match": tag})
    assert (refused.status_code, refused.json()["title"]) == (400, "BadRequest")
    assert http.get("/topics/strange").status_code == 404


def test_an_action_compares_the_etag(http: httpx.Client) -> None:
    http.put("/groups/paused", json={}).raise_for_status()
    http.put("/topics/read", json={}).raise_for_status()
    for action, body in (
        ("/groups/paused:pause", {}),
        ("/groups/paused:resume", None),
        ("/groups/paused:resetOffset", {"topic": "read", "to": "latest"}),
        ("/topics/read:purge", {"all": True}),
    ):
        current = http.get(action.rpartition(":")[0]).headers["ETag"]
        refused = http.post(action, json=body, headers={"If-Match": '"1.99"'})
        assert (action, refused.status_code) == (action, 412)
        passed = http.post(action, json=body, headers={"If-Match": current})
        assert (action, passed.status_code) == (action, 200), passed.text


@pytest.mark.parametrize(
    ("kind", "field"), [("topics", "deliverySpreadMs"), ("groups", "maxAttempts")]
)
def test_a_dry_run_of_a_put_changes_nothing(http: httpx.Client, kind: str, field: str) -> None:
    path = f"/{kind}/planned"
    planned = http.put(path, json={field: 9}, params={"dryRun": "true"})
    assert (planned.json()["isNew"], planned.json()[field]) == (True, 9)
    assert http.get(path).status_code == 404
    http.put(path, json={field: 9}).raise_for_status()
    tag = http.get(path).headers["ETag"]
    changed = http.put(path, json={field: 11}, params={"dryRun": "true"}).json()
    assert (changed[field], changed["before"][field]) == (11, 9)
    shown = http.get(path)
    assert (shown.json()[field], shown.headers["ETag"]) == (9, tag)
    refused = http.put(path, json={field: 2**40}, params={"dryRun": "true"})
    assert refused.status_code == 400


def test_an_unknown_field_is_refused_with_the_nearest_and_all_known_names(
    http: httpx.Client,
) -> None:
    for word, near in (("order", "deliveryOrder"), ("max_attempt", "maxAttempts")):
        refused = http.put("/groups/g", json={word: "FIFO"})
        problem = refused.json()
        assert (refused.status_code, problem["field"]) == (400, word)
        assert f"did you mean {near!r}?" in problem["detail"]
        assert "startFrom" in problem["detail"]
    nested = http.put("/groups/g", json={"retry": {"exponential": {"initial": 1}}}).json()
    assert nested["field"] == "retry.exponential.initial"


def test_enum_values_match_in_any_case(http: httpx.Client) -> None:
    made = http.put("/topics/cases", json={"messageType": "fifo"})
    assert made.json()["messageType"] == "FIFO"
    made = http.put("/groups/cases", json={"deliveryOrder": "Fifo", "startFrom": "LATEST"})
    assert (made.json()["deliveryOrder"], made.json()["startFrom"]) == ("FIFO", "latest")
    assert http.get("/operations", params={"state": "running"}).status_code == 200
    assert http.put("/topics/cases", json={"messageType": "FIFI"}).status_code == 400


def is_named(http: httpx.Client, path: str, near: str) -> bool:
    return f"did you mean {near!r}?" in http.get(path).json()["detail"]


def test_an_error_about_a_missing_name_has_the_nearest_one(http: httpx.Client) -> None:
    http.put("/topics/invoices", json={}).raise_for_status()
    http.put("/groups/mailers", json={}).raise_for_status()
    for path, near in (("/topics/invoice", "invoices"), ("/groups/mailer", "mailers")):
        eventually(partial(is_named, http, path, near))
    assert "did you mean" not in http.get("/topics/zebra").json()["detail"]


def test_an_error_names_the_command_that_helps(http: httpx.Client) -> None:
    refused = http.delete("/quotas/topic/none").json()
    assert refused["command"] == "tidemill quota list"
