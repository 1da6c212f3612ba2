"""What `create` says of a topic or group that was there before."""

from __future__ import annotations

import io
import sys
from typing import Any
from unittest import mock

import httpx
import pytest
from typer.testing import CliRunner, Result

from tidemill.cli.app import app
from tidemill.cli.groups import change_of
from tidemill.cli.topic_texts import is_kept_less
from tidemill.common.rest_client import PROBLEM

RETRY = {"customized": {"nextMs": [1000] * 16}}
GROUP = {
    "name": "billing",
    "deliveryOrder": "CONCURRENT",
    "maxAttempts": 17,
    "retry": RETRY,
    "startFrom": "earliest",
}
TOPIC = {"name": "orders", "messageType": "FIFO", "queues": 4}


class RestApi:
    """The REST API, with an answer for each method. It notes the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.asked: list[str] = []

        def request(_: httpx.Client, method: str, url: str, **sent: Any) -> httpx.Response:
            is_dry = (sent["params"] or {}).get("dryRun") == "true"
            self.asked.append(f"{method} dry" if is_dry else method)
            missing = {"title": "NotFound", "detail": "it is missing"}
            found = answers[method]
            return httpx.Response(
                200 if found else 404,
                json=found or missing,
                headers={"content-type": PROBLEM} if found is None else {},
                request=httpx.Request(method, url),
            )

        monkeypatch.setattr(httpx.Client, "request", request)


class TypedLines(io.StringIO):
    """A standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def run_on_terminal(typed: str, *arguments: str) -> int | str | None:
    """Run a command that reads `typed`; return the exit status."""
    with mock.patch.object(sys, "stdin", TypedLines(typed)), pytest.raises(SystemExit) as end:
        app(list(arguments))
    return end.value.code


def test_a_group_that_was_there_is_said_to_be_changed() -> None:
    assert change_of(None, GROUP) == "new: CONCURRENT, 17 attempts"
    assert change_of(GROUP, GROUP) == "is there, unchanged: CONCURRENT, 17 attempts"
    assert change_of(GROUP, GROUP | {"maxAttempts": 1}) == "changed: CONCURRENT, 17 -> 1 attempts"
    changed = change_of(GROUP, GROUP | {"retry": {"customized": {"nextMs": [5]}}})
    assert "retry 1000 ms, 1000 ms, 1000 ms, ... 1000 ms (16 waits) -> 5 ms" in changed


def test_fewer_attempts_are_not_taken_without_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    put = GROUP | {"maxAttempts": 1, "isNew": False, "before": GROUP}
    rest = RestApi(monkeypatch, GET=GROUP, PUT=put)
    refused = run("group", "set", "billing", "--max-attempts", "1")
    assert refused.exit_code != 0
    assert "--yes" in refused.output
    dry = run("group", "set", "billing", "--max-attempts", "1", "--dry-run")
    assert dry.output == "group billing would be changed: maxAttempts 17 -> 1\n"
    assert "PUT" not in rest.asked
    done = run("group", "set", "billing", "--max-attempts", "1", "--yes")
    assert done.output == "group billing: changed: CONCURRENT, 17 -> 1 attempts\n"


def test_a_missing_topic_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = RestApi(monkeypatch, GET=None, PUT=TOPIC | {"isNew": True})
    assert run("topic", "create", "orders").output == "topic orders: FIFO, 4 queues\n"
    assert rest.asked == ["GET", "PUT"]
    before = TOPIC | {"queues": 2}
    RestApi(monkeypatch, GET=before, PUT=TOPIC | {"isNew": False, "before": before})
    changed = run("topic", "set", "orders", "--queues=4").output
    assert "changed: FIFO, 2 -> 4 queues" in changed


@pytest.mark.parametrize(
    ("found", "line", "planned", "text"),
    [
        (None, "topic create a --queues=4", TOPIC, "created: queues 4"),
        (
            None,
            "group create a --order=fifo",
            {"deliveryOrder": "FIFO"},
            "created: deliveryOrder FIFO",
        ),
        (None, "group create a", GROUP, "created"),
        (TOPIC, "topic set a --queues=8", {"queues": 8, "before": TOPIC}, "changed: queues 4 -> 8"),
        (
            TOPIC,
            "topic set a --retention=1m",
            {"retention": {"ms": 60_000}, "before": TOPIC},
            "changed: retention.ms default -> 60000",
        ),
        (TOPIC, "topic set a --queues=4 --force", TOPIC, "unchanged"),
        (GROUP, "group set a --max-attempts=17", GROUP, "unchanged"),
        (
            None,
            "topic set %DLQ%g --retention=forever",
            {"retention": {"ms": -1}, "before": {}},
            "changed: retention.ms default -> -1",
        ),
    ],
)
def test_a_dry_run_shows_the_difference(
    monkeypatch: pytest.MonkeyPatch, found: Any, line: str, planned: dict[str, Any], text: str
) -> None:
    is_new = found is None and " create " in line
    rest = RestApi(monkeypatch, GET=found, PUT=planned | {"isNew": is_new})
    done = run(*line.split(), "--dry-run")
    noun, _, name = line.split()[:3]
    assert (done.exit_code, done.output) == (0, f"{noun} {name} would be {text}\n")
    assert rest.asked == ["GET", "PUT dry"]


@pytest.mark.parametrize(
    ("noun", "found", "equal", "different"),
    [
        ("topic", TOPIC, ("--type=fifo", "--queues=4"), ("--type=normal",)),
        ("topic", TOPIC | {"retention": {"ms": 60_000}}, ("--retention=1m",), ("--retention=2m",)),
        ("topic", TOPIC, ("--retention=default",), ("--retention=forever",)),
        ("group", GROUP, ("--max-attempts=17",), ("--max-attempts=3",)),
    ],
)
def test_create_of_an_equal_object_is_a_success(
    monkeypatch: pytest.MonkeyPatch,
    noun: str,
    found: dict[str, Any],
    equal: tuple[str, ...],
    different: tuple[str, ...],
) -> None:
    rest = RestApi(monkeypatch, GET=found)
    done = run(noun, "create", "billing", *equal)
    assert (done.exit_code, done.output) == (0, f"{noun} billing: exists already, unchanged\n")
    refused = run(noun, "create", "billing", *different)
    assert (refused.exit_code, f"tidemill {noun} set billing" in refused.output) == (1, True)
    assert set(rest.asked) == {"GET"}


DAY_MS = 86_400_000
Kept = dict[str, Any]


def kept_topic(kept: Kept) -> dict[str, Any]:
    return TOPIC | {"retention": kept}


@pytest.mark.parametrize(
    ("before", "after", "is_less"),
    [
        ({}, {}, False),
        ({"ms": DAY_MS}, {"ms": 2 * DAY_MS}, False),
        ({"ms": DAY_MS}, {"ms": -1}, False),
        ({}, {"ms": -1}, False),
        ({"ms": 2 * DAY_MS}, {"ms": DAY_MS}, True),
        ({"ms": -1}, {"ms": DAY_MS}, True),
        ({"ms": DAY_MS}, {}, True),
        ({}, {"ms": DAY_MS}, True),
        ({"bytes": 2}, {"bytes": 3}, False),
        ({"bytes": 2}, {}, False),
        ({"bytes": 2}, {"bytes": 1}, True),
        ({}, {"bytes": 9}, True),
        ({"acked": "free"}, {}, False),
        ({}, {"acked": "free"}, True),
    ],
)
def test_a_change_that_may_remove_messages_is_known(
    before: Kept, after: Kept, is_less: bool
) -> None:
    assert is_kept_less(kept_topic(before), kept_topic(after)) is is_less


def test_a_shorter_retention_is_not_taken_without_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept_topic({"ms": 2 * DAY_MS})
    planned = kept_topic({"ms": DAY_MS}) | {"isNew": False, "before": before}
    rest = RestApi(monkeypatch, GET=before, PUT=planned | {"expiredMessages": 7})
    line = "topic", "set", "orders", "--retention=1d"
    refused = run(*line)
    assert refused.exit_code == 2
    assert "add --yes" in refused.output
    assert "PUT" not in rest.asked
    assert run(*line, "--yes").exit_code == 0
    assert rest.asked[-1] == "PUT"


def test_a_longer_retention_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept_topic({"ms": DAY_MS})
    put = kept_topic({"ms": 2 * DAY_MS}) | {"isNew": False, "before": before}
    rest = RestApi(monkeypatch, GET=before, PUT=put)
    assert run("topic", "set", "orders", "--retention=2d").exit_code == 0
    assert rest.asked == ["GET", "PUT dry", "PUT"]


def test_a_terminal_shows_how_many_messages_a_shorter_retention_removes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = kept_topic({"ms": 2 * DAY_MS})
    planned = kept_topic({"ms": DAY_MS}) | {"isNew": False, "before": before}
    rest = RestApi(monkeypatch, GET=before, PUT=planned | {"expiredMessages": 7})
    assert run_on_terminal("n\n", "topic", "set", "orders", "--retention=1d") == 1
    assert "7 stored messages are older" in capsys.readouterr().err
    assert "PUT" not in rest.asked
    assert run_on_terminal("y\n", "topic", "set", "orders", "--retention=1d") == 0


@pytest.mark.parametrize(
    ("kept", "is_said"), [({"ms": DAY_MS}, True), ({"ms": 2 * DAY_MS, "bytes": 2}, False)]
)
def test_a_terminal_asks_when_the_number_of_expired_messages_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kept: Kept,
    *,
    is_said: bool,
) -> None:
    before = kept_topic({"ms": 2 * DAY_MS})
    rest = RestApi(
        monkeypatch, GET=before, PUT=kept_topic(kept) | {"isNew": False, "before": before}
    )
    assert run_on_terminal("n\n", "topic", "set", "orders", "--retention=1d") == 1
    shown = capsys.readouterr().err
    assert "Keep messages of topic orders" in shown
    assert ("The number of older messages is unknown." in shown) is is_said
    assert "PUT" not in rest.asked
