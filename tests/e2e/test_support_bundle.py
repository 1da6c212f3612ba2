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
