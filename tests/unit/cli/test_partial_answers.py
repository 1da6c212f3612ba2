"""The exit status of a command whose answer lacks the part of an unreachable broker group."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, refusal, scripted_api
from tidemill.cli.app import app

MISSING = {"unreachable": ["broker-1"]}


def status(answer: ApiAnswer, *arguments: str) -> int:
    with scripted_api(lambda _: answer) as address:
        return CliRunner().invoke(app, ["--admin", address, *arguments]).exit_code


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ({"topics": []}, ("topic", "list")),
        ({"groups": []}, ("group", "list")),
        ({"items": []}, ("process", "list")),
        ({"deadLetters": []}, ("dead-letter", "list")),
    ],
)
def test_a_missing_part_exits_with_5(body: dict[str, Any], arguments: tuple[str, ...]) -> None:
    assert status(ApiAnswer(body | MISSING), *arguments) == 5
    assert status(ApiAnswer(body), *arguments) == 0, "a later command starts anew"


def test_an_error_precedes_it() -> None:
    assert status(refusal("no right", 403), "topic", "list") == 1
