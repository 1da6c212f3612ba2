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


def run(line: str, found: dict[str, Any] = GROUP) -> Result:
    """Run a command with an API that has the object and stores its changes."""

    def answer(request: ApiRequest) -> ApiAnswer:
        if request.method == "GET":
            return ApiAnswer(found)
        return ApiAnswer(found | request.body | {"isNew": False, "before": found})

    with scripted_api(answer) as address:
        return CliRunner().invoke(app, ["--admin", address, *shlex.split(line)])


def test_the_error_of_a_different_group_has_the_command_that_changes_it() -> None:
    options = "--order CONCURRENT --max-attempts 3 --retry-ms 1000 --retry-ms 2000"
    refused = run(f"group create billing {options}")
    assert refused.exit_code == EXIT_REFUSED
    command = refused.output.split("`")[1]
    assert command == f"tidemill group set billing {options}"


def test_the_error_of_a_group_with_another_order_names_its_deletion() -> None:
    refused = run("group create billing --order FIFO --max-attempts 3")
    assert refused.exit_code == EXIT_REFUSED
    assert "exists with another deliveryOrder, maxAttempts; deliveryOrder of a" in refused.output
    assert refused.output.split("`")[1] == "tidemill group delete billing"
    assert "create it again" in refused.output


@pytest.mark.parametrize(
    ("kind", "options", "verb"),
    [
        ("NORMAL", "--queues 4", "delete"),
        ("NORMAL", "--queues 16", "set"),
        ("NORMAL", "--queues 16 --type MIXED", "delete"),
        ("NORMAL", "--queues 8 --type FIFO", "set"),
        ("FIFO", "--queues 16", "delete"),
        ("FIFO", "--type NORMAL", "set"),
    ],
)
def test_the_error_of_a_different_topic_names_its_change_or_deletion(
    kind: str, options: str, verb: str
) -> None:
    topic = {"name": "orders", "messageType": kind, "queues": 8}
    refused = run(f"topic create orders {options}", topic)
    assert refused.exit_code == EXIT_REFUSED
    assert refused.output.split("`")[1].startswith(f"tidemill topic {verb} orders")


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
