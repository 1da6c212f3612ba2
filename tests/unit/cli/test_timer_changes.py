"""`tidemill timer cancel|reschedule|fire` with ids, and with a filter."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app

PLANNED = {
    "dryRun": True,
    "count": 7,
    "asOfMs": 5,
    "topics": [{"name": "orders", "timers": 7}],
    "hours": [{"fromMs": 3_600_000, "timers": 7}],
    "sample": [],
}
OPERATION = {"id": "broker-0:5", "state": "DONE", "done": 6, "failed": 1, "total": 7, "brokers": []}


class FakeApi:
    """The REST API for changes of timers."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes = outcomes
        self.requests: list[ApiRequest] = []
        self.warnings: list[str] = []

    def answer(self, request: ApiRequest) -> ApiAnswer:
        self.requests.append(request)
        if request.path.startswith("/operations"):
            return ApiAnswer(OPERATION)
        body: dict[str, Any] = request.body
        is_dry = "dryRun=true" in request.path
        if "ids" in body:
            rows = [
                {"id": id_, "outcome": outcome}
                for id_, outcome in zip(body["ids"], self.outcomes, strict=True)
            ]
            return ApiAnswer({"count": self.outcomes.count("DONE"), "outcomes": rows})
        if is_dry:
            return ApiAnswer({**PLANNED, "warnings": self.warnings})
        return ApiAnswer({"count": 7, "operation": OPERATION})

    def run(self, *arguments: str) -> Result:
        with scripted_api(self.answer) as address:
            return CliRunner().invoke(app, ["--admin", address, "timer", *arguments])

    def bodies(self) -> list[Any]:
        return [one.body for one in self.requests if one.body]


def test_ids_are_changed_in_one_call() -> None:
    api = FakeApi("DONE", "ALREADY_DELIVERED")
    result = api.run("cancel", "broker-0:1", "broker-1:2", "--yes")
    assert result.exit_code == 0
    assert result.stdout == "1 timer: cancelled\n  broker-1:2  it was delivered before\n"
    assert api.bodies() == [{"ids": ["broker-0:1", "broker-1:2"]}]


def test_numbers_need_a_broker_group() -> None:
    api = FakeApi("DONE", "DONE")
    assert api.run("fire", "1", "2", "--yes").exit_code == 2
    assert api.run("fire", "1", "2", "--broker=b", "--yes").exit_code == 0
    assert api.bodies() == [{"ids": ["b:1", "b:2"]}]


def test_a_change_of_no_timer_exits_with_1() -> None:
    assert FakeApi("NOT_FOUND").run("cancel", "b:1", "--yes").exit_code == 1


def test_a_filter_begins_an_operation_after_a_count() -> None:
    api = FakeApi()
    arguments = ("--topic=orders", "--tag=red", "--from=1970-01-01T00:00:01Z", "--wait", "--yes")
    result = api.run("cancel", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == "operation broker-0:5: done, 6 of 7 items, 1 failed\n"
    wanted = {"topic": "orders", "tag": "red", "dueFromMs": 1_000}
    planned, begun = api.bodies()
    assert planned == {"filter": wanted}
    assert begun == {"filter": wanted, "asOfMs": 5, "maxCount": 7}


def test_a_dry_run_shows_topics_hours_and_warnings() -> None:
    api = FakeApi()
    api.warnings = ["about 9 timers would be due in the second"]
    result = api.run("reschedule", "--key=k", "--at=2027-01-01T08:00:00Z", "--dry-run")
    assert result.exit_code == 0
    assert "7 timers would be moved" in result.stdout
    assert "topic orders: 7" in result.stdout
    assert "due from 1970-01-01" in result.stdout
    assert "warning: about 9 timers" in result.stderr
    assert len(api.requests) == 1


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("--later=10m",), {"shiftMs": 600_000}),
        (("--earlier=10m",), {"shiftMs": -600_000}),
        (("--delay=1h", "--spread=1m"), {"delayMs": 3_600_000, "spreadMs": 60_000}),
    ],
)
def test_a_move_has_one_time(arguments: tuple[str, ...], fields: dict[str, int]) -> None:
    api = FakeApi("DONE")
    assert api.run("reschedule", "b:1", *arguments, "--yes").exit_code == 0
    assert api.bodies() == [{"ids": ["b:1"], **fields}]


def test_a_single_timer_can_be_shifted() -> None:
    api = FakeApi("DONE")
    assert api.run("reschedule", "1", "--broker=b", "--later=1m", "--yes").exit_code == 0
    assert api.bodies() == [{"ids": ["b:1"], "shiftMs": 60_000}]


@pytest.mark.parametrize(
    "arguments",
    [
        ("cancel",),
        ("cancel", "17", "--topic=orders"),
        ("cancel", "b:17", "--topic=orders"),
        ("cancel", "17", "--max=5"),
        ("fire", "--tag=red"),
        ("fire", "x", "y"),
        ("reschedule", "b:17"),
        ("reschedule", "b:17", "--later=1m", "--delay=1m"),
        ("reschedule", "b:17", "--later=1m", "--expect=2027-01-01T08:00:00Z"),
    ],
)
def test_options_that_do_not_fit_are_a_usage_error(arguments: tuple[str, ...]) -> None:
    api = FakeApi()
    assert api.run(*arguments, "--yes").exit_code == 2
    assert api.requests == []


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("timer cancel --topic orders", "--tag"),
        ("timer fire --topic orders", "--key"),
        ("timer cancel --key k", "--topic"),
        ("timer cancel --topic orders", "--from"),
        ("timer cancel --topic orders", "--to"),
        ("timer list", "--topic"),
        ("dead-letter discard billing", "--tag"),
        ("dead-letter replay billing --tag red", "--topic"),
        ("dead-letter replay billing", "--to"),
        ("delivery release billing", "--client"),
        ("delivery release billing", "--message"),
    ],
)
def test_an_empty_option_of_a_filter_is_a_usage_error(command: str, option: str) -> None:
    """A shell makes an empty text of an unset variable, which would match everything."""
    api = FakeApi()
    with scripted_api(api.answer) as address:
        arguments = ["--admin", address, *command.split(), f"{option}="]
        result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, api.requests) == (2, [])
    assert option in result.stderr
