"""Commands that other distributions add to the command line."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import typer
from typer.testing import CliRunner

from tidemill.cli.app import add_commands

RUNNER = CliRunner()
PIPELINE = EntryPoint("pipeline", "tidemill_pipeline.cli:app", "tidemill.commands")


def root(*found: EntryPoint) -> typer.Typer:
    app = typer.Typer()
    app.command("other")(lambda: None)  # one command alone would lose its name
    add_commands(app, found)
    return app


def test_an_entry_point_adds_its_commands() -> None:
    shown = RUNNER.invoke(root(PIPELINE), ["pipeline", "--help"])
    assert shown.exit_code == 0
    assert "archive-verify" in shown.output


def test_a_missing_distribution_is_named_with_exit_code_2() -> None:
    refused = RUNNER.invoke(root(), ["pipeline", "archive", "--to", "./archive"])
    assert refused.exit_code == 2
    assert "install tidemill-pipeline" in refused.stderr


def test_the_help_names_a_missing_distribution() -> None:
    shown = RUNNER.invoke(root(), ["--help"])
    assert "pip install tidemill-pipeline" in shown.output
