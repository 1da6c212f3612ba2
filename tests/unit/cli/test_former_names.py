"""Names of v0.1.0: each runs the present command, with a warning."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app
from tidemill.cli.former_names import FORMER, present_command

# Commands of v0.1.0 without a present command of the same name.
FORMER_CALLS = [
    ("topic ls --system", "topic list --system"),
    ("group ls", "group list"),
    ("timer ls --topic a", "timer list --topic a"),
    ("delivery ls g", "delivery list g"),
    ("client ls", "client list"),
    ("broker-group ls", "broker-group list"),
    ("broker-group status b", "broker-group show b"),
    ("cluster status b", "replica list b"),
    ("cluster history", "broker-group history"),
    ("cluster transfer b --to 1 --wait", "broker-group transfer b --to 1 --wait"),
    ("cluster drain b-1 --dry-run", "replica drain b-1 --dry-run"),
    ("cluster drain b-1 --undo", "replica undrain b-1"),
    ("cluster min-in-sync b 1 --yes", "broker-group set b --min-in-sync=1 --yes"),
    ("cluster forget b --yes", "broker-group remove --record-only b --yes"),
    (
        "cluster replace b --with=2 --reason r",
        "broker-group transfer --unclean b --to=2 --reason r",
    ),
    ("cluster replace b --with 2", "broker-group transfer --unclean b --to 2"),
    ("group progress g", "group show g"),
    ("group scale-hint g --horizon 9", "group show --scaling g --horizon 9"),
    ("group release g --topic t --queue 1", "group unlock g --topic t --queue 1"),
    ("group forget g --topic t", "pull-offset delete g --topic t"),
    ("store rebuild data --dry-run", "store mend data --dry-run"),
]


@pytest.mark.parametrize(("former", "present"), FORMER_CALLS)
def test_a_former_name_is_the_present_command(
    capsys: pytest.CaptureFixture[str], former: str, present: str
) -> None:
    assert present_command(former.split()) == present.split()
    warning = capsys.readouterr().err
    noun, verb = present.split()[:2]
    assert warning.startswith(f"warning: `tidemill {' '.join(former.split()[:2])}` is now")
    assert f"`tidemill {noun} {verb}`" in warning


def test_each_former_name_has_a_case() -> None:
    assert {" ".join(former.split()[:2]) for former, _ in FORMER_CALLS} == set(FORMER)


def test_no_former_name_is_a_command() -> None:
    root: Any = typer.main.get_command(app)
    for former in FORMER:
        noun, verb = former.split()
        assert verb not in root.commands[noun].commands


def test_a_present_name_has_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert present_command(["topic", "list"]) == ["topic", "list"]
    assert present_command(["top"]) == ["top"]
    assert capsys.readouterr().err == ""


def test_a_former_name_prints_its_warning_on_standard_error() -> None:
    def answer(_request: ApiRequest) -> ApiAnswer:
        return ApiAnswer({"items": []})

    with scripted_api(answer) as address:
        line = ["broker-group", "ls", "--admin", address, "-o", "json"]
        ended = CliRunner().invoke(app, line)
    assert (ended.exit_code, ended.stdout) == (0, '{\n  "items": []\n}\n')
    assert "is now `tidemill broker-group list`" in ended.stderr
