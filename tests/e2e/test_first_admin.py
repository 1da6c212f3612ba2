"""The first administrator of a standalone that starts in the mode `on`."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone

FIRST, SECOND = "the-first-secret-of-root", "the-second-secret-of-root"


def status(running: Standalone, secret: str) -> int:
    with httpx.Client(trust_env=False, timeout=30) as http:
        return http.get(f"{running.admin}/api/v1/users", auth=("root", secret)).status_code


def changes(running: Standalone, secret: str) -> list[dict[str, object]]:
    with httpx.Client(trust_env=False, timeout=30) as http:
        answer = http.get(f"{running.admin}/api/v1/audit?kind=change", auth=("root", secret))
    found: list[dict[str, object]] = answer.json()["records"]
    return found


def test_a_cluster_that_starts_in_the_mode_on_gets_its_first_user(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    file.touch(0o600)
    file.write_text(f"root\n{FIRST}\n")
    flags = ("--security-floor=on", f"--security-bootstrap-file={file}")
    with standalone(tmp_path / "data", *flags) as running:
        eventually(lambda: status(running, FIRST) == 200)
        [record] = changes(running, FIRST)
        assert (record["via"], record["resource"]) == ("bootstrap", "User:root")
        assert FIRST not in json.dumps(record)
    file.write_text(f"root\n{SECOND}\n")
    with standalone(tmp_path / "data", *flags) as running:
        eventually(lambda: status(running, FIRST) == 200)
        eventually(lambda: "not needed" in running.log.read_text())
        assert status(running, SECOND) == 401
        assert len(changes(running, FIRST)) == 1
    with standalone(tmp_path / "data", *flags, "--security-bootstrap-policy=always") as running:
        eventually(lambda: status(running, SECOND) == 200)
        assert status(running, FIRST) == 401
        assert len(changes(running, SECOND)) == 2
        text = running.log.read_text()
        assert "security_bootstrap_policy is always" in text
        assert FIRST not in text
        assert SECOND not in text
