"""`tidemill filter check`: canonical form, result and errors, without a broker."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from tidemill.cli.app import app
from tidemill.common.exit_codes import EXIT_PROBLEM

FILTER = "5 < price and region in ('us','eu')"
CANONICAL = "price > 5 AND region IN ('eu', 'us')"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_the_canonical_form_is_shown() -> None:
    shown = run("filter", "check", FILTER)
    assert (shown.exit_code, shown.output) == (0, f"{CANONICAL}\n")


@pytest.mark.parametrize(
    ("options", "result"),
    [
        (["--property", "price=5.5", "--property", "region=eu"], "TRUE: the message matches"),
        (["--property", "price=5.5"], "UNKNOWN: the message does not match"),
        (["--property", "price=4"], "FALSE: the message does not match"),
        (["--tag", "x"], "UNKNOWN: the message does not match"),
    ],
)
def test_a_message_is_compared(options: list[str], result: str) -> None:
    assert run("filter", "check", FILTER, *options).output == f"{CANONICAL}\n{result}\n"


def test_the_tag_and_the_keys_are_compared() -> None:
    options = ["--tag", "paid", "--key", "k1", "--key", "k2", "--property", "a=b=c"]
    expression = "TAGS = 'paid' AND KEYS = 'k1 k2' AND a = 'b=c'"
    found = json.loads(run("-o", "json", "filter", "check", expression, *options).output)
    assert found == {"expression": expression, "result": "TRUE"}


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("a LIKE 'x%'", "SQL filter, column 3: unexpected LIKE; use STARTSWITH"),
        (f"a = '{'x' * 4_096}'", "an SQL filter has at most 4096 bytes"),
    ],
)
def test_an_illegal_filter_is_a_problem_of_the_check(expression: str, error: str) -> None:
    failed = run("filter", "check", expression)
    assert (failed.exit_code, failed.stdout) == (EXIT_PROBLEM, "")
    assert error in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "error"), [(["a = 1", "--property", "a"], "--property a: write NAME=VALUE")]
)
def test_a_wrong_call_is_a_usage_error(arguments: list[str], error: str) -> None:
    failed = run("filter", "check", *arguments)
    assert failed.exit_code == 2
    assert error in failed.output
