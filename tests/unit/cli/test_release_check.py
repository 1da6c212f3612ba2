"""Upgrades and rollbacks that `release check` rejects without a running admin process."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli.app import app

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
