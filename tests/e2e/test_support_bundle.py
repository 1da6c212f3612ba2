"""A support bundle of a running cluster."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone

BODY = "a-body-that-nobody-may-see"
SECRET, OTHER_SECRET = "a-secret-of-sixteen", "another-secret-of-sixteen"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("bundle") / "data", "--groups=2") as started:
        with client_of(started) as http:
            http.put("/topics/payments", json={}).raise_for_status()
            http.put("/groups/billing", json={}).raise_for_status()
            http.put("/users/eve", json={}).raise_for_status()
            http.post("/topics/payments/messages", json={"body": BODY}).raise_for_status()
        yield started


def client_of(running: Standalone) -> httpx.Client:
    return httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=60)


def files_of(content: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        return {
            entry.name.removeprefix("tidemill-support/"): file.read().decode()
            for entry in archive
            if (file := archive.extractfile(entry)) is not None
        }


def bundle(http: httpx.Client, **wanted: Any) -> dict[str, str]:
    begun = http.post("/support-bundles", json=wanted)
    assert begun.status_code == 202
    id_ = begun.json()["operation"]["id"]
    eventually(lambda: http.get(f"/operations/{id_}").json()["state"] == "DONE")
    answer = http.get(f"/support-bundles/{id_}")
    assert answer.headers["content-type"] == "application/gzip"
    return files_of(answer.content)


def test_a_bundle_has_the_documents_and_logs_of_all_processes(running: Standalone) -> None:
    with client_of(running) as http:
        secret = http.post("/users/eve:rotate", json={"retireAfterMs": 0}).json()["secret"]
        files = bundle(http)
    names = {"overview.json", "definitions.json", "audit.json", "slow-calls.json", "topics.json"}
    assert names <= set(files)
    processes = [one["name"] for one in json.loads(files["processes.json"])["items"]]
    assert len(processes) >= 4
    for process in processes:
        assert f"processes/{process}/settings.json" in files
        assert '"event"' in files[f"logs/{process}.log"]
    assert "payments" in files["definitions.json"]
    records = json.loads(files["audit.json"])["records"]
    assert "Topic:payments" in [one["resource"] for one in records]
    whole = "".join(files.values())
    assert BODY not in whole
    assert secret not in whole
    assert "problem" not in json.loads(files["broker-groups.json"])


def test_an_anonymous_bundle_has_no_names(running: Standalone) -> None:
    with client_of(running) as http:
        files = bundle(http, anonymize=True)
    whole = "".join(files.values())
    for name in ("payments", "billing", "127.0.0.1"):
        assert name not in whole, [file for file, text in files.items() if name in text]
    [topic] = json.loads(files["definitions.json"])["topics"]
    assert topic["name"].startswith("hidden-")
    assert f"Topic:{topic['name']}" in files["audit.json"], "equal names stay equal"
    assert '"messageType": "MIXED"' in files["definitions.json"], "other words stay"


def test_an_unknown_bundle_is_missing(running: Standalone) -> None:
    with client_of(running) as http:
        assert http.get("/support-bundles/admin:17").status_code == 404


def test_the_command_writes_a_file(running: Standalone, tmp_path: Path) -> None:
    target = tmp_path / "bundle.tar.gz"
    line = [sys.executable, "-m", "tidemill", "--admin", running.admin, "support-bundle"]
    done = subprocess.run(
        [*line, "--file", str(target)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, f"wrote {target}\n"), done.stderr
    assert "overview.json" in files_of(target.read_bytes())


def test_a_later_user_of_the_same_name_gets_no_bundle(tmp_path: Path) -> None:
    may_bundle = [
        {"resource": f"Cluster:{area}", "actions": ["Get"]} for area in ("processes", "audit")
    ]
    with standalone(tmp_path / "data") as started, client_of(started) as root:
        root.put("/users/root", json={"type": "SUPER", "secret": SECRET}).raise_for_status()
        root.put("/users/ann", json={"type": "SUPER", "secret": SECRET}).raise_for_status()
        root.put("/security", json={"mode": "on"}).raise_for_status()
        root.auth = ("root", SECRET)
        with client_of(started) as ann:
            ann.auth = ("ann", SECRET)
            eventually(lambda: ann.get("/users").status_code == 200)
            id_ = ann.post("/support-bundles", json={}).json()["operation"]["id"]
            eventually(lambda: ann.get(f"/support-bundles/{id_}").status_code == 200)
            root.delete("/users/ann").raise_for_status()
            again = {"secret": OTHER_SECRET, "entries": may_bundle}
            root.put("/users/ann", json=again).raise_for_status()
            ann.auth = ("ann", OTHER_SECRET)
            eventually(lambda: ann.get("/processes").status_code == 200)
            assert ann.get(f"/support-bundles/{id_}").status_code == 403
        assert root.get(f"/support-bundles/{id_}").status_code == 200
