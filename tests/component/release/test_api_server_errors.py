"""The jobs report an API server that is unreachable or refuses them, with the remedy."""

from __future__ import annotations

import json
import subprocess
from http import HTTPStatus
from pathlib import Path

import pytest
import yaml

from tests.support.processes.processes import command, environment
from tests.support.worlds.memory_kubernetes import MemoryKubernetes
from tidemill.common.exit_codes import EXIT_UNREACHABLE

COMMAND_S = 60.0
PLAN = {
    "authority": "mill-ca",
    "certificates": {"mill-proxy-tls": ["mill-proxy"]},
    "tokens": {},
    "keyFiles": {},
    "administrators": [],
    "jobUsers": {},
    "labels": {},
    "days": 90,
    "authorityDays": 3650,
}


def run(folder: Path, server: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a job against an API server."""
    file = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "current-context": "c",
    }
    file.write_text(yaml.safe_dump(config), "utf-8")
    return subprocess.run(
        command("release", *arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
        env={**environment(), "KUBECONFIG": str(file)},
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("certificates", f"--plan={json.dumps(PLAN)}"),
        (
            "grow",
            '--plan=[{"group": "a", "statefulSet": "mill-a", "size": "2Gi"}]',
            "--installed=mill-claims-stay",
            "--patience-s=1",
        ),
        ("roll", "--stateful-sets=mill-a", "--patience-s=1"),
    ],
)
def test_an_unreachable_api_server_is_an_error_with_a_remedy(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = run(tmp_path, "http://127.0.0.1:1", *arguments)
    assert done.returncode == EXIT_UNREACHABLE
    assert "the Kubernetes API server cannot be reached" in done.stderr
    assert "NetworkPolicy" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_right_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    server = MemoryKubernetes()
    server.failure = HTTPStatus.FORBIDDEN
    with server.serving():
        done = run(tmp_path, server.url, "certificates", f"--plan={json.dumps(PLAN)}")
    assert done.returncode == EXIT_UNREACHABLE
    assert "refused a call: 403" in done.stderr
    assert "the rights of the chart's Role" in done.stderr
