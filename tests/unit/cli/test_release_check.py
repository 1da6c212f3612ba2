"""Upgrades and rollbacks that `release check` rejects without a running admin process."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli.app import app

NOBODY = ("release", "check", "--nobody-to-ask", "--kept=broker-0")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The ConfigMap of a release as a volume shows it."""
    (tmp_path / "store-format").write_text("1009")
    (tmp_path / "broker-groups").write_text("broker-0,broker-1")
    return tmp_path


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--store-format=1008", "--kept=broker-0,broker-1"], "has format 1009"),
        (["--store-format=1009"], "broker-1: without a REST API the backlog is unknown"),
    ],
)
def test_a_rollback_is_refused_with_a_reason(installed: Path, more: list[str], reason: str) -> None:
    done = CliRunner().invoke(app, [*NOBODY, f"--installed={installed}", *more])
    assert done.exit_code == 1
    assert reason in done.output


def test_a_rollback_to_the_same_format_and_groups_may_be(installed: Path) -> None:
    more = ["--kept=broker-0,broker-1", f"--installed={installed}", "--store-format=1009"]
    assert CliRunner().invoke(app, [*NOBODY, *more]).exit_code == 0


def test_where_nobody_says_what_was_nothing_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*NOBODY, f"--installed={tmp_path}", "--store-format=1009"])
    assert done.exit_code == 0
