"""The users of release jobs run their jobs, and have no other rights."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, command, environment, standalone
from tidemill.admin.http.rights import ROWS
from tidemill.security.job_users import TRIAL, Job

ROOT = ("root", "the-secret-of-root")
# The operations of each job. The trial has those on its own topic and consumer group alone.
ALLOWED = {
    Job.CHECK: {"GET /broker-groups", "GET /broker-groups/{name}", "GET /storage"},
    Job.PROVISION: {
        "GET /broker-groups",
        "GET /broker-groups/{name}",
        "GET /storage",
        "PUT /broker-groups/{name}",
        "POST /broker-groups/{name}:drain",
        "PUT /topics/{topic}",
        "PUT /groups/{group}",
        # These need the right Update on a topic or a consumer group.
        "POST /groups/{group}:pause",
        "POST /groups/{group}:resume",
        "POST /groups/{group}:resetOffset",
        "POST /groups/{group}:forgetPullOffsets",
        "POST /groups/{group}:releaseLock",
        "POST /groups/{group}/deliveries:release",
        "POST /groups/{group}/dead-letters:replay",
        "POST /groups/{group}/dead-letters:discard",
        "POST /groups/{group}/dead-letters/{letter_id}:copy",
        "DELETE /topics/{topic}/dedup/{key}",
        "POST /topics/{topic}:spread",
    },
    Job.ROLL: {"GET /broker-groups", "GET /broker-groups/{name}", "GET /storage"},
    Job.VOLUMES: {
        "GET /replicas",
        "GET /replicas/{name}",
        "POST /replicas/{name}:transfer",
        # These need the right Update on replicas.
        "POST /replicas/{name}:drain",
        "POST /replicas/{name}:setMinInSync",
        "POST /replicas/{name}:replace",
    },
    Job.TRIAL: set[str](),
}


class JobWorld(NamedTuple):
    """A standalone in the mode `on`, with the secrets of all jobs."""

    running: Standalone
    folder: Path

    def auth(self, job: Job) -> tuple[str, str]:
        return job.user, (self.folder / job).read_text()

    def status(self, operation: str, auth: tuple[str, str]) -> int:
        """Return the status of a request for names that do not exist."""
        method, _, path = operation.partition(" ")
        path = re.sub(r"\{[a-z_]+\}", "unknown", path)
        body: dict[str, object] | None = {} if method in {"PUT", "POST"} else None
        url = f"{self.running.admin}/api/v1{path}"
        with httpx.Client(trust_env=False, timeout=30) as http:
            return http.request(method, url, json=body, auth=auth).status_code

    def admits(self, auth: tuple[str, str]) -> bool:
        """Return whether the REST API knows a user."""
        return self.status("GET /topics", auth) == HTTPStatus.OK

    def release(self, job: Job, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        line = ["--admin", self.running.admin, "--user", job.user]
        line += ["--secret-file", str(self.folder / job), "release", *map(str, arguments)]
        return subprocess.run(
            command(*line),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=environment(),
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobWorld]:
    folder = tmp_path_factory.mktemp("jobs")
    root = folder / "root.secret"
    secrets = folder / "secrets"
    secrets.mkdir()
    for file, text in [
        (root, "\n".join(ROOT)),
        *[(secrets / job, f"the-secret-of-the-job-{job}") for job in Job],
    ]:
        file.touch(0o600)
        file.write_text(text)
    flags = (
        "--security-floor=on",
        f"--security-bootstrap-file={root}",
        f"--security-job-users-dir={secrets}",
    )
    with standalone(folder / "data", *flags) as running:
        world = JobWorld(running, secrets)
        for auth in (ROOT, *map(world.auth, Job)):
            eventually(partial(world.admits, auth))
        yield world


def test_each_job_runs_with_its_user(world: JobWorld, tmp_path: Path) -> None:
    with httpx.Client(trust_env=False, timeout=30) as http:
        url = f"{world.running.admin}/api/v1/broker-groups"
        [member] = http.get(url, auth=ROOT).json()["items"]
    wanted = tmp_path / "wanted.json"
    values = {
        "brokerGroups": [{"name": member["name"], "address": member["address"]}],
        "topics": [{"name": "orders", "queues": 2}],
        "groups": [{"name": "billing"}],
    }
    wanted.write_text(json.dumps(values))
    for _ in range(2):
        done = world.release(Job.PROVISION, "provision", f"--file={wanted}")
        assert done.returncode == 0, done.stderr
    done = world.release(Job.CHECK, "check", f"--kept={member['name']}")
    assert (done.returncode, done.stdout) == (0, "no broker group is lost\n"), done.stderr
    for _ in range(2):
        done = world.release(Job.TRIAL, "trial", f"--endpoint={world.running.grpc}")
        assert done.returncode == 0, done.stderr
        assert "the trial passed" in done.stdout


@pytest.mark.parametrize("job", list(Job))
def test_a_job_is_refused_each_other_operation(world: JobWorld, job: Job) -> None:
    auth = world.auth(job)
    checked = {name for name, row in ROWS.items() if row.needed or row.is_super}
    assert ALLOWED[job] <= checked
    passed = {name for name in checked if world.status(name, auth) != HTTPStatus.FORBIDDEN}
    assert passed == ALLOWED[job]


def test_a_job_sees_no_topic_and_no_audit_record(world: JobWorld) -> None:
    with httpx.Client(trust_env=False, timeout=30) as http:
        url = f"{world.running.admin}/api/v1"
        http.put(f"{url}/topics/hidden", json={}, auth=ROOT).raise_for_status()
        for job in Job:
            for path in ("topics", "groups"):
                assert http.get(f"{url}/{path}", auth=world.auth(job)).json()[path] == []
            assert http.get(f"{url}/audit", auth=world.auth(job)).status_code == 403


def test_the_trial_has_no_topic_but_its_own(world: JobWorld) -> None:
    auth = world.auth(Job.TRIAL)
    with httpx.Client(trust_env=False, timeout=30) as http:
        url = f"{world.running.admin}/api/v1"
        for kind in ("topics", "groups"):
            assert http.put(f"{url}/{kind}/{TRIAL}", json={}, auth=auth).status_code == 200
            assert http.delete(f"{url}/{kind}/{TRIAL}", auth=auth).status_code == 403
            assert http.put(f"{url}/{kind}/{TRIAL}2", json={}, auth=auth).status_code == 403


def test_a_changed_secret_leaves_the_old_one_valid(world: JobWorld) -> None:
    old = world.auth(Job.ROLL)
    (world.folder / Job.ROLL).write_text("another-secret-of-the-job-roll")
    new = world.auth(Job.ROLL)
    done = world.release(Job.ROLL, "check", "--kept=broker-0", "--patience-s=60")
    assert done.stdout == "no broker group is lost\n", done.stderr
    for auth in (old, new):
        assert world.status("GET /broker-groups", auth) == HTTPStatus.OK
