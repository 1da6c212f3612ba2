"""Whom the command line believes where a Secret has no authority in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli.app import app

NOBODY = ("--admin", "https://127.0.0.1:1")


def test_a_file_that_the_environment_names_need_not_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIDEMILL_ADMIN_CA_FILE", str(tmp_path / "ca.crt"))
    done = CliRunner().invoke(app, [*NOBODY, "topic", "list"])
    assert "cannot reach the admin API" in done.output


def test_a_file_that_is_typed_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    done = CliRunner().invoke(app, [*NOBODY, f"--admin-ca-file={file}", "topic", "list"])
    assert done.exit_code == 2
    assert "Error" in done.output
