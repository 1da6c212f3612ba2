"""The configuration of a running cluster as one file: export, change, apply and convert it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone

OBJECTS = (
    ("/roles/sellers", {"entries": [{"resource": "Topic:orders", "actions": ["Pub"]}]}),
    ("/users/eve", {"roles": ["sellers"]}),
    ("/topics/orders", {"messageType": "FIFO", "queues": 3, "retention": {"ms": 3_600_000}}),
    ("/topics/bills", {"dedup": {"windowMs": 60_000}}),
    ("/groups/billing", {"maxAttempts": 5, "retry": {"customized": {"nextMs": [1_000]}}}),
    ("/quotas/user/eve", {"publishMessagesPerS": 5}),
)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Standalone]:
    with standalone(tmp_path / "data", "--groups=2") as started:
        yield started


def client_of(running: Standalone) -> httpx.Client:
    return httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=60)


def wait_until_done(http: httpx.Client, operation: dict[str, Any]) -> dict[str, Any]:
    found = eventually(
        lambda: (
            (one := http.get(f"/operations/{operation['id']}").json())["state"] != "RUNNING" and one
        )
    )
    assert isinstance(found, dict)
    return found


def apply(http: httpx.Client, file: Any, **query: str) -> dict[str, Any]:
    answer = http.post("/definitions:apply", json=file, params=query)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    if "operation" in found:
        assert answer.status_code == 202
        found["operation"] = wait_until_done(http, found["operation"])
    return found


def test_an_exported_file_restores_the_configuration(running: Standalone) -> None:
    with client_of(running) as http:
        for path, body in OBJECTS:
            http.put(path, json=body).raise_for_status()
        exported = http.get("/definitions")
        file = exported.json()
        assert http.get("/definitions").headers["ETag"] == exported.headers["ETag"]
        assert apply(http, file, prune="true")["changes"] == []
        # Every object differs, one is new, and one is missing.
        http.put("/topics/orders", json={"retention": {"ms": 60_000}}).raise_for_status()
        http.put("/topics/bills", json={"dedup": None}).raise_for_status()
        http.put("/groups/billing", json={"maxAttempts": 6}).raise_for_status()
        http.put("/roles/sellers", json={"entries": []}).raise_for_status()
        http.delete("/quotas/user/eve").raise_for_status()
        http.put("/topics/surplus", json={}).raise_for_status()
        http.post("/topics/surplus/messages", json={"body": "x"}).raise_for_status()
        planned = apply(http, file, prune="true", dryRun="true")
        changes = {(one["action"], one["kind"], one["name"]): one for one in planned["changes"]}
        assert set(changes) == {
            ("CHANGE", "role", "sellers"),
            ("CHANGE", "topic", "orders"),
            ("CHANGE", "topic", "bills"),
            ("CHANGE", "group", "billing"),
            ("CREATE", "quota", "user/eve"),
            ("DELETE", "topic", "surplus"),
        }
        assert changes["DELETE", "topic", "surplus"]["loss"]["messages"] == 1
        orders = changes["CHANGE", "topic", "orders"]
        assert orders["before"]["retention"]["ms"] == 60_000
        assert orders["after"]["retention"]["ms"] == 3_600_000
        assert http.get("/topics/surplus").status_code == 200
        # Dedup is on again as soon as the broker groups have recorded that it was off.
        eventually(lambda: apply(http, file, prune="true")["operation"]["state"] == "DONE")
        assert http.get("/definitions").json() == file
        assert http.get("/topics/surplus").status_code == 404


def test_a_refused_change_refuses_the_whole_file(running: Standalone) -> None:
    with client_of(running) as http:
        http.put("/topics/orders", json={"messageType": "FIFO", "queues": 4}).raise_for_status()
        file = {"topics": [{"name": "new"}, {"name": "orders", "queues": 2}]}
        refused = http.post("/definitions:apply", json=file)
        assert refused.status_code == 409
        assert "topic orders: " in refused.json()["detail"]
        assert http.get("/topics/new").status_code == 404
        wrong = http.post("/definitions:apply", json={"topics": [{"name": "a b"}]})
        assert wrong.status_code == 409
        strange = http.post("/definitions:apply", json={"roles": [{"name": "", "entries": []}]})
        assert strange.status_code == 409
        unknown = http.post("/definitions:apply", json={"topics": [{"name": "a", "queue": 5}]})
        assert "did you mean 'queues'?" in unknown.json()["detail"]


def test_a_file_is_not_applied_to_another_state_than_its_dry_run(running: Standalone) -> None:
    """Otherwise an object that was made since then would be deleted, unseen."""
    with client_of(running) as http:
        file = {"topics": [{"name": "kept"}]}
        query = {"prune": "true"}
        planned = http.post("/definitions:apply", json=file, params={**query, "dryRun": "true"})
        http.put("/topics/unseen", json={}).raise_for_status()
        tag = {"If-Match": planned.json()["etag"]}
        refused = http.post("/definitions:apply", json=file, params=query, headers=tag)
        assert (refused.status_code, refused.json()["title"]) == (412, "PreconditionFailed")
        assert http.get("/topics/unseen").status_code == 200
        planned = http.post("/definitions:apply", json=file, params={**query, "dryRun": "true"})
        assert planned.json()["etag"] == http.get("/definitions").headers["ETag"]
        tag = {"If-Match": planned.json()["etag"]}
        begun = http.post("/definitions:apply", json=file, params=query, headers=tag)
        assert begun.status_code == 202
        assert wait_until_done(http, begun.json()["operation"])["state"] == "DONE"
        assert http.get("/topics/unseen").status_code == 404


def test_a_new_user_may_have_a_quota_with_some_limits(running: Standalone) -> None:
    with client_of(running) as http:
        quota = {"kind": "user", "subject": "zoe", "publishMessagesPerS": 7}
        applied = apply(http, {"users": [{"name": "zoe"}], "quotas": [quota]})
        assert applied["operation"]["state"] == "DONE"
        assert http.get("/quotas/user/zoe").json()["publishMessagesPerS"] == 7


def test_a_file_with_many_refused_changes_makes_few_calls(running: Standalone) -> None:
    with client_of(running) as http:
        file = {"topics": [{"name": f"t{number}", "queues": 9_999} for number in range(200)]}
        assert http.post("/definitions:apply", json=file).status_code == 400
        wrong = [{"name": f"%RETRY%{number}"} for number in range(200)]
        refused = http.post("/definitions:apply", json={"topics": wrong})
        assert refused.status_code == 409
        assert refused.json()["detail"].count("topic %RETRY%") <= 13, "five, and those in progress"


def test_a_repeated_key_returns_the_operation_that_it_has_begun(running: Standalone) -> None:
    with client_of(running) as http:
        key = {"Idempotency-Key": "first"}
        file = {"topics": [{"name": f"t{number}"} for number in range(20)]}
        begun = http.post("/definitions:apply", json=file, headers=key).json()["operation"]
        again = http.post("/definitions:apply", json=file, headers=key)
        assert (again.status_code, again.json()["operation"]["id"]) == (202, begun["id"])
        other = http.post("/definitions:apply", json={"topics": [{"name": "u"}]}, headers=key)
        assert other.status_code == 422
        ended = wait_until_done(http, begun)
        assert (ended["state"], ended["done"], ended["total"]) == ("DONE", 20, 20)
        assert begun["id"] in [one["id"] for one in http.get("/operations").json()["operations"]]
        cancelled = http.post(f"/operations/{begun['id']}:cancel").json()["operation"]
        assert cancelled["state"] == "DONE"


def tidemill(
    running: Standalone, *arguments: str, sent: str | None = None
) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tidemill", "--admin", running.admin, *arguments]
    return subprocess.run(
        line, input=sent, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_command_line_moves_definitions_between_clusters(
    running: Standalone, tmp_path: Path
) -> None:
    with client_of(running) as http:
        for path, body in OBJECTS:
            http.put(path, json=body).raise_for_status()
        wanted = http.get("/definitions").json()
    exported = tidemill(running, "definitions", "export")
    assert yaml.safe_load(exported.stdout) == wanted
    as_json = tidemill(running, "-o", "json", "definitions", "export")
    assert json.loads(as_json.stdout) == wanted
    saved = tmp_path / "cluster.yaml"
    saved.write_text(exported.stdout)
    with standalone(tmp_path / "other") as other, client_of(other) as http:
        planned = tidemill(other, "definitions", "apply", str(saved), "--dry-run")
        assert planned.returncode == 0, planned.stderr
        assert "orders" in planned.stdout
        assert http.get("/topics").json()["topics"] == []
        applied = tidemill(other, "definitions", "apply", str(saved), "--yes")
        assert applied.returncode == 0, applied.stderr
        assert "tidemill user rotate eve" in applied.stdout
        assert http.get("/definitions").json() == wanted
        equal = tidemill(other, "definitions", "apply", str(saved))
        assert (equal.returncode, equal.stdout.strip()) == (0, "nothing to change")


def test_the_command_line_converts_a_foreign_file(running: Standalone, tmp_path: Path) -> None:
    foreign = {
        "vhosts": [{"name": "/"}],
        "exchanges": [{"vhost": "/", "name": "a.b", "type": "fanout"}],
    }
    exported = tmp_path / "rabbit.json"
    exported.write_text(json.dumps(foreign))
    converted = tidemill(running, "definitions", "convert", str(exported), "--from", "rabbitmq")
    assert converted.returncode == 0, converted.stderr
    assert yaml.safe_load(converted.stdout)["topics"] == [{"name": "a-b"}]
    assert "exchange / a.b" in converted.stderr
    assert "converted vhost / -> names without a namespace\n" in converted.stderr
    applied = tidemill(running, "definitions", "apply", "-", "--yes", sent=converted.stdout)
    assert applied.returncode == 0, applied.stderr
    with client_of(running) as http:
        assert http.get("/topics/a-b").status_code == 200
