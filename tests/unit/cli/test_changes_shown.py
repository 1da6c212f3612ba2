"""What `create` says of a topic or group that was there before."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from tidemill.cli.app import app
from tidemill.cli.groups import change_of

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
    """The REST API: what it answers to a method, and what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.asked: list[str] = []

        def request(_: httpx.Client, method: str, url: str, **__: Any) -> httpx.Response:
            self.asked.append(method)
            return httpx.Response(200, json=answers[method], request=httpx.Request(method, url))

        monkeypatch.setattr(httpx.Client, "request", request)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_group_that_was_there_is_said_to_be_changed() -> None:
    assert change_of(None, GROUP) == "new: CONCURRENT, 17 attempts"
    assert change_of(GROUP, GROUP) == "is there, unchanged: CONCURRENT, 17 attempts"
    assert change_of(GROUP, GROUP | {"maxAttempts": 1}) == "changed: CONCURRENT, 17 -> 1 attempts"
    changed = change_of(GROUP, GROUP | {"retry": {"customized": {"nextMs": [5]}}})
    assert "retry 1000 ms, 1000 ms, 1000 ms, ... 1000 ms (16 waits) -> 5 ms" in changed


def test_fewer_attempts_are_not_taken_without_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    put = GROUP | {"maxAttempts": 1, "isNew": False, "before": GROUP}
    rest = RestApi(monkeypatch, GET=GROUP, PUT=put)
    refused = run("group", "create", "billing", "--max-attempts", "1")
    assert refused.exit_code != 0
    assert "--yes" in refused.output
    dry = run("group", "create", "billing", "--max-attempts", "1", "--dry-run")
    assert "would be: changed: CONCURRENT, 17 -> 1 attempts" in dry.output
    assert "PUT" not in rest.asked
    done = run("group", "create", "billing", "--max-attempts", "1", "--yes")
    assert done.output == "group billing: changed: CONCURRENT, 17 -> 1 attempts\n"


def test_a_topic_is_created_by_one_call_to_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = RestApi(monkeypatch, PUT=TOPIC | {"isNew": True})
    assert run("topic", "create", "orders").output == "topic orders: FIFO, 4 queues\n"
    RestApi(monkeypatch, PUT=TOPIC | {"isNew": False, "before": TOPIC | {"queues": 2}})
    assert "changed: FIFO, 2 -> 4 queues" in run("topic", "create", "orders").output
    assert rest.asked == ["PUT"]
