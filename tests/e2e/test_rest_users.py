"""The REST API of a standalone in the security mode `on`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone


def tidemill(running: Standalone, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tidemill", "--admin", running.admin, "-o", "json", *arguments]
    return subprocess.run(
        line, env={"HOME": str(home)}, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_mode_on_needs_users_and_rights(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        url = f"{running.admin}/api/v1"
        with httpx.Client(trust_env=False) as http:
            assert http.put(f"{url}/topics/orders", json={}).status_code == 200
            assert tidemill(running, tmp_path, "security", "enable").returncode == 0
            eventually(lambda: http.get(f"{url}/topics").status_code == 401, within_ms=1_500)
            made = tidemill(running, tmp_path, "user", "create", "eve", "--role", "viewer")
            assert made.returncode == 0, made.stderr
            secret = json.loads(made.stdout)["secret"]
            eve = ("eve", secret)
            assert http.get(f"{url}/topics", auth=eve).json()["topics"]
            assert http.get(f"{url}/topics/orders", auth=eve).status_code == 200
            assert http.delete(f"{url}/topics/orders", auth=eve).status_code == 403
            assert http.put(f"{url}/security", json={"mode": "off"}, auth=eve).status_code == 403
            assert http.get(f"{url}/topics", auth=("eve", "wrong")).status_code == 401
            assert http.get(f"{url}/topics").status_code == 401
            secret_file = tmp_path / "eve"
            secret_file.write_text(secret)
            named = ("--user", "eve", "--secret-file", str(secret_file))
            opened = tidemill(running, tmp_path, *named, "topic", "list")
            assert opened.returncode == 2, "others may read the file"
            secret_file.chmod(0o600)
            assert tidemill(running, tmp_path, *named, "topic", "list").returncode == 0
            refused = tidemill(running, tmp_path, *named, "user", "create", "mallory")
            assert refused.returncode == 1
            assert "super user" in refused.stderr
            audit = http.get(f"{url}/audit", auth=("eve", secret))
            assert audit.status_code == 403
            records = json.loads(tidemill(running, tmp_path, "audit", "list").stdout)
            assert "eve" in json.dumps(records)
            assert tidemill(running, tmp_path, "security", "disable").returncode == 0
            eventually(lambda: http.get(f"{url}/topics").status_code == 200, within_ms=1_500)
