"""The exit status of a command without the answer of an unreachable broker group."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app

MISSING = {"unreachable": ["broker-1"]}
OPERATION: dict[str, Any] = {
    "id": "broker-0:5",
    "state": "RUNNING",
    "kind": "REPLAY_DEAD_LETTERS",
    "group": "g",
    "failed": 0,
    "done": 1,
    "total": 2,
    "ratePerSecond": 1,
    "createdAtMs": 1,
    "by": "me",
    "brokers": [],
}


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
        (OPERATION, ("operation", "show", "broker-0:5")),
        ({"operation": OPERATION}, ("operation", "cancel", "broker-0:5", "--yes")),
    ],
)
def test_a_missing_part_exits_with_5(body: dict[str, Any], arguments: tuple[str, ...]) -> None:
    assert status(ApiAnswer(body | MISSING), *arguments) == 5
    assert status(ApiAnswer(body), *arguments) == 0, "a later command starts anew"


def test_an_error_precedes_it() -> None:
    assert status(refusal("no right", 403), "topic", "list") == 1


def test_a_part_of_an_operation_that_is_not_cancelled_exits_with_5() -> None:
    body = {"operation": OPERATION, "warnings": ["broker-1: the disk is full"]}
    assert status(ApiAnswer(body), "operation", "cancel", "broker-0:5", "--yes") == 5


def test_a_part_of_an_operation_that_has_not_begun_exits_with_5() -> None:
    planned = {"count": 1, "asOfMs": 1, "sample": []}
    begun = {"operation": OPERATION, "warnings": ["broker-1: 16 operations run"]}

    def answer(request: ApiRequest) -> ApiAnswer:
        return ApiAnswer(planned if "dryRun=true" in request.path else begun)

    with scripted_api(answer) as address:
        command = ["--admin", address, "dead-letter", "replay", "g", "--all", "--yes"]
        assert CliRunner().invoke(app, command).exit_code == 5
