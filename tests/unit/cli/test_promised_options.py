"""Options that the README promises of what changes something, and the words for lists."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from tidemill.cli.app import app

TIMER = {
    "timerId": 17,
    "state": "PENDING",
    "topic": "orders",
    "queueId": 0,
    "messageId": "01AC",
    "dueAtMs": 1_800_000_000_000,
    "keys": [],
    "broker": "broker-0",
}
LOCK = {
    "topic": "orders",
    "broker": "broker-0",
    "queue": 3,
    "messages": 2,
    "offset": 5,
    "clientId": "c",
    "waiting": 9,
}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the REST API answer these, by the end of a path, to reads and dry runs.

    All else fails the test. An answer of None is a conflict.
    """
    given: dict[str, Any] = {}

    def request(_: httpx.Client, method: str, url: str, **more: Any) -> httpx.Response:
        is_dry = (more.get("params") or {}).get("dryRun") == "true"
        assert method == "GET" or is_dry, f"{method} {url} changes something"
        answer = next(value for path, value in given.items() if url.endswith(path))
        if answer is None:
            problem = {"title": "Conflict", "detail": "it is not possible"}
            return httpx.Response(
                409,
                json=problem,
                headers={"content-type": "application/problem+json"},
                request=httpx.Request(method, url),
            )
        return httpx.Response(200, json=answer, request=httpx.Request(method, url))

    monkeypatch.setattr(httpx.Client, "request", request)
    return given


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_timer_is_looked_at_before_it_is_fired_or_moved(answers: dict[str, Any]) -> None:
    answers["/timers/17:fire"] = answers["/timers/17:reschedule"] = TIMER
    assert "would be fired: message 01AC" in run("timer", "fire", "17", "--dry-run").output
    dry = run("timer", "reschedule", "17", "--delay", "10m", "--dry-run")
    assert "would be due 10m from now: message 01AC" in dry.output
    assert "--yes" in run("timer", "reschedule", "17", "--delay", "10m").output
    answers["/timers/17:fire"] = None
    gone = run("timer", "fire", "17", "--dry-run")
    assert (gone.exit_code, "it is not possible" in gone.output) == (1, True)


def test_a_lock_is_looked_at_before_it_is_released(answers: dict[str, Any]) -> None:
    answers["/groups/g:releaseLock"] = {"released": LOCK}
    release = "group", "unlock", "g", "--topic", "orders", "--dry-run", "--queue"
    assert "would be unlocked: 2 messages from offset 5, held by c" in run(*release, "3").output
    answers["/groups/g:releaseLock"] = None
    assert run(*release, "4").exit_code == 1


TRANSACTION = {
    "transactionId": "AQABAAAAAAAAAGTnQzWbq2Vc9g",
    "state": "OPEN",
    "topic": "orders",
    "topicDeleted": False,
    "messageId": "01AC",
    "sentAtMs": 0,
    "checks": 2,
    "checksMax": 15,
    "nextCheckAtMs": 1,
    "broker": "broker-0",
}


def test_an_overdue_check_waits_for_a_producer(answers: dict[str, Any]) -> None:
    answers["/transactions"] = {"transactions": [TRANSACTION]}
    header, row = run("transaction", "list", "--older-than", "10m").output.splitlines()[:2]
    for column, value in (("STATE", "open"), ("CHECKS", "2/15"), ("NEXT", "waits for a producer")):
        assert row[header.index(column) :].startswith(value)


def test_a_change_of_a_transaction_needs_a_confirmation(answers: dict[str, Any]) -> None:
    id_ = TRANSACTION["transactionId"]
    for verb in ("commit", "rollback", "check", "recover"):
        refused = run("transaction", verb, str(id_))
        assert (refused.exit_code, "--yes" in refused.output) == (2, True)
    refused = run("transaction", "recover", "--topic", "orders")
    assert (refused.exit_code, "--yes" in refused.output) == (2, True)
    assert answers == {}


@pytest.mark.parametrize("arguments", [(), ("ID", "--topic", "t"), ("ID", "--older-than", "1h")])
def test_a_recovery_is_of_one_transaction_or_of_a_topic(arguments: tuple[str, ...]) -> None:
    refused = run("transaction", "recover", *arguments, "--yes")
    assert refused.exit_code == 2
    assert "--topic" in refused.output


def test_a_change_of_dead_letters_needs_a_confirmation(answers: dict[str, Any]) -> None:
    for verb in ("replay", "discard", "copy"):
        refused = run("dead-letter", verb, "billing", "broker-0:1")
        assert (refused.exit_code, "--yes" in refused.output) == (2, True)
    assert answers == {}


@pytest.mark.parametrize(
    "arguments",
    [(), ("b:1", "--all"), ("b:1", "--tag", "t"), ("b:1", "--wait"), ("b:1", "--rate=2")],
)
def test_a_settlement_is_of_ids_or_of_a_filter(arguments: tuple[str, ...]) -> None:
    for verb in ("replay", "discard"):
        refused = run("dead-letter", verb, "billing", *arguments, "--yes")
        assert refused.exit_code == 2, refused.output


@pytest.mark.parametrize(
    "arguments", [("--body", "a", "--body-file", "-"), ("--discard",), ("--property", "a")]
)
def test_a_copy_of_a_dead_letter_has_consistent_options(arguments: tuple[str, ...]) -> None:
    refused = run("dead-letter", "copy", "billing", "broker-0:1", *arguments, "--yes")
    assert refused.exit_code == 2


def test_the_broker_group_of_a_message_is_shown_while_another_is_down(
    answers: dict[str, Any],
) -> None:
    message = {
        "messageId": "01AC",
        "storedAtMs": 0,
        "storedTopic": "orders",
        "queueId": 0,
        "queueOffset": 0,
        "deliveryAttempt": 1,
        "bodyText": "b",
        "broker": "broker-1",
    }
    answers["/topics/orders/messages"] = {"messages": [message], "unreachable": ["broker-0"]}
    assert "broker-1" in run("message", "find", "orders", "--key", "k").output
    answers["/topics/orders/messages"] = {"messages": [message]}
    assert "broker-1" not in run("message", "find", "orders", "--key", "k").output


def test_a_json_list_equals_the_api_response(answers: dict[str, Any]) -> None:
    answers["/broker-groups"] = {"items": []}
    assert json.loads(run("-o", "json", "broker-group", "list").output) == {"items": []}


def test_all_and_a_part_of_it_are_not_asked_for_together() -> None:
    refused = run("delivery", "release", "g", "--all", "--client", "c", "-y")
    assert refused.exit_code == 2
    assert "cannot be combined" in refused.output


def test_the_list_of_broker_groups_shows_how_long_one_is_silent(answers: dict[str, Any]) -> None:
    group = {
        "name": "broker-1",
        "state": "active",
        "isHome": False,
        "address": "b:1",
        "reachable": False,
        "reason": "unreachable from the admin process: it does not answer",
        "unreachableMs": 83_500,
    }
    answers["/broker-groups"] = {"items": [group]}
    shown = run("broker-group", "list").output
    assert "SILENT" in shown
    assert "1 m 23 s" in shown


def test_a_dead_letter_is_shown_with_its_origin_and_reason(answers: dict[str, Any]) -> None:
    message = {
        "messageId": "01AC",
        "storedAtMs": 1_800_000_000_000,
        "storedTopic": "%DLQ%billing",
        "queueId": 0,
        "queueOffset": 7,
        "deliveryAttempt": 17,
        "originTopic": "orders",
        "reason": "attempts",
        "bodySize": 1,
        "bodyText": "b",
        "broker": "broker-0",
        "properties": {},
    }
    answers["/messages"] = {"messages": [message]}
    header, row = run("message", "find", "%DLQ%billing", "--key", "k").output.splitlines()[:2]
    for column, value in (("ORIGIN", "orders"), ("REASON", "attempts")):
        assert row[header.index(column) :].startswith(value)


def test_an_active_broker_group_states_when_its_backlog_is_counted(answers: dict[str, Any]) -> None:
    answers["/broker-groups/broker-0"] = {
        "name": "broker-0",
        "state": "active",
        "isHome": True,
        "address": "a:1",
        "reachable": True,
        "master": "broker-0",
    }
    assert "only while it drains" in run("broker-group", "show", "broker-0").output


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ("learner", "is a full replica again when it has caught up"),
        ("in-sync", "is a full replica in sync"),
        ("master", "is a full replica in sync"),
    ],
)
def test_the_end_of_a_drain_depends_on_the_role(
    monkeypatch: pytest.MonkeyPatch, role: str, text: str
) -> None:
    def request(_: httpx.Client, method: str, url: str, **__: Any) -> httpx.Response:
        answer = {"name": "broker-0", "replicas": [{"replica": 1, "role": role}]}
        return httpx.Response(200, json=answer, request=httpx.Request(method, url))

    monkeypatch.setattr(httpx.Client, "request", request)
    assert text in run("replica", "undrain", "broker-0-1").output
