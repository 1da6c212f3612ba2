"""`tidemill group create` and `group set` of a group that exists."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app
from tidemill.cli.equal_objects import CREATE_ONLY
from tidemill.common.exit_codes import EXIT_REFUSED

GROUP: dict[str, Any] = {
    "name": "billing",
    "deliveryOrder": "CONCURRENT",
    "maxAttempts": 17,
    "retry": {"customized": {"nextMs": [10_000]}},
    "startFrom": "earliest",
}


def run(line: str) -> Result:
    """Run a command with an API that has the group and stores its changes."""

    def answer(request: ApiRequest) -> ApiAnswer:
        if request.method == "GET":
            return ApiAnswer(GROUP)
        return ApiAnswer(GROUP | request.body | {"isNew": False, "before": GROUP})

    with scripted_api(answer) as address:
        return CliRunner().invoke(app, ["--admin", address, *shlex.split(line)])


def test_the_error_of_a_different_group_has_the_command_that_changes_it() -> None:
    options = "--order FIFO --max-attempts 3 --retry-ms 1000 --retry-ms 2000"
    refused = run(f"group create billing {options}")
    assert refused.exit_code == EXIT_REFUSED
    command = refused.output.split("`")[1]
    assert command == f"tidemill group set billing {options}"


@pytest.mark.parametrize("noun", ["group", "topic"])
def test_set_takes_each_option_of_create(noun: str) -> None:
    commands = get_command(app).commands[noun].commands  # type: ignore[attr-defined]  # a group
    options = [{each.opts[0] for each in commands[verb].params} for verb in ("create", "set")]
    assert options[0] - options[1] <= CREATE_ONLY


@pytest.mark.parametrize(
    ("options", "is_warned"), [("--retry-ms 1000", True), ("--max-attempts 20", False)]
)
def test_a_change_of_the_retry_warns_about_running_consumers(
    options: str, *, is_warned: bool
) -> None:
    changed = run(f"group set billing {options}")
    assert changed.exit_code == 0, changed.output
    assert ("running push consumers may keep" in changed.output) is is_warned
