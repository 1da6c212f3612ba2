"""Upgrades and rollbacks that `release check` rejects or allows."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support.worlds.memory_kubernetes import Answer, Json, KubernetesServer
from tidemill.cli.app import app
from tidemill.security.job_users import Job

WITHOUT_REST_API = ("release", "check", "--without-rest-api", "--kept=broker-0")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The ConfigMap of a release as a volume shows it."""
    (tmp_path / "store-format").write_text("1009")
    (tmp_path / "broker-groups").write_text("broker-0,broker-1")
    (tmp_path / "replicated").write_text("broker-1")
    (tmp_path / "volumes").write_text("broker-0=20Gi/default/ReadWriteOnce broker-1=none")
    return tmp_path


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--store-format=1008", "--kept=broker-0,broker-1"], "has format 1009"),
        (["--kept=broker-0,broker-1"], "broker-1: a broker group of several replicas cannot"),
        (["--kept=broker-0,broker-1", "--replicated=broker-0"], "cannot become a single broker"),
        (["--volumes=broker-0=10Gi/default/ReadWriteOnce"], "have 20Gi and would shrink to 10Gi"),
        (["--volumes=broker-0=20Gi/fast/ReadWriteOnce"], "broker-0: its claims change from 20Gi"),
        (["--volumes=broker-1=20Gi/fast/ReadWriteOnce"], "broker-1: its claims change from none"),
        (["--store-format=1009"], "broker-1: without a REST API the backlog is unknown"),
    ],
)
def test_a_rollback_is_refused_with_a_reason(installed: Path, more: list[str], reason: str) -> None:
    done = CliRunner().invoke(app, [*WITHOUT_REST_API, f"--installed={installed}", *more])
    assert done.exit_code == 1
    assert reason in done.output


def test_a_refusal_names_the_command_that_unlocks_the_release(installed: Path) -> None:
    """Helm leaves a rollback that a job rejects as `pending-rollback`, and rejects all others."""
    more = [f"--installed={installed}", "--store-format=1008", "--release=shop/tidemill"]
    done = CliRunner().invoke(app, [*WITHOUT_REST_API, *more])
    assert done.output.endswith(
        " kubectl delete secret --namespace=shop"
        " --selector=owner=helm,name=tidemill,status=pending-rollback\n"
    )


def test_a_rollback_to_the_same_format_and_groups_is_allowed(installed: Path) -> None:
    kept = ["--kept=broker-0,broker-1", "--replicated=broker-1"]
    kept.append("--volumes=broker-0=20480Mi/default/ReadWriteOnce broker-1=none")
    more = [*kept, f"--installed={installed}", "--store-format=1009"]
    assert CliRunner().invoke(app, [*WITHOUT_REST_API, *more]).exit_code == 0


def test_without_a_recorded_state_nothing_is_rejected(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, [*WITHOUT_REST_API, f"--installed={tmp_path}", "--store-format=1009"]
    )
    assert done.exit_code == 0


class LateLogins(KubernetesServer):
    """A REST API without broker groups that learns the secret of its caller late."""

    def __init__(self, *, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    def answer(self, method: str, path: str, body: Json) -> Answer:
        del method, path, body
        if self.refusals:
            self.refusals -= 1
            return Answer(HTTPStatus.UNAUTHORIZED, {"title": "Unauthorized", "detail": "not known"})
        return Answer(HTTPStatus.OK, {"items": []})


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    """The file with the secret of the user of the check."""
    file = tmp_path / "secret"
    file.write_text("a-new-secret-of-the-check\n")
    file.chmod(0o600)
    return file


def checked(server: LateLogins, secret_file: Path, *more: str) -> Result:
    """Run the check with a secret, and without patience for processes that start."""
    login = ("--admin", server.url, "--user", Job.CHECK.user, "--secret-file", str(secret_file))
    check = ("release", "check", "--kept=broker-0", "--patience-s=0")
    return CliRunner().invoke(app, [*login, *check, *more])


def test_a_removal_waits_until_the_new_secret_is_known(secret_file: Path) -> None:
    """Kubelet passes a changed Secret to the admin process up to a minute and a half later."""
    with LateLogins(refusals=2).serving() as server:
        done = checked(server, secret_file, "--gone=broker-1")
    assert done.output == "no broker group is lost\n"
    assert (done.exit_code, server.refusals) == (0, 0)


def test_an_upgrade_without_a_removal_does_not_wait_for_a_login(secret_file: Path) -> None:
    with LateLogins(refusals=2).serving() as server:
        done = checked(server, secret_file)
    assert "no broker group is removed, so the upgrade continues" in done.output
    assert (done.exit_code, server.refusals) == (0, 1)
