"""Sends of operators to a missing topic, whose name may be misspelt; the first use by clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.support.clients.commands import tidemill
from tests.support.clients.pulling import METADATA, TIMEOUT_S, PullClient, message_of
from tests.support.eventually import eventually
from tests.support.processes.processes import ADMIN_S, Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service


@pytest.fixture
def rest(running: Standalone) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=f"{running.admin}/api/v1", trust_env=False, timeout=ADMIN_S
    ) as client:
        yield client


def refused_send(rest: httpx.Client, topic: str) -> dict[str, Any]:
    answer = rest.post(f"/topics/{topic}/messages", json={"body": "x"})
    assert answer.status_code == 404
    problem: dict[str, Any] = answer.json()
    return problem


def names_the_nearest(rest: httpx.Client) -> bool:
    detail = str(refused_send(rest, "deliverys")["detail"])
    return detail.endswith("; did you mean 'delivery'?")


def test_a_send_to_a_missing_topic_creates_none_and_names_the_nearest(
    running: Standalone, rest: httpx.Client
) -> None:
    running.put("topics/delivery")
    eventually(partial(names_the_nearest, rest))
    problem = refused_send(rest, "deliverys")
    assert problem["command"] == "tidemill topic create deliverys"
    assert "send with --create (REST: create=true)" in problem["detail"]
    refused = tidemill(running, "message", "send", "deliverys", "x")
    assert refused.returncode == 1
    assert "--create" in refused.stderr
    assert "did you mean 'delivery'?" in refused.stderr
    assert rest.get("/topics/deliverys").status_code == 404


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({}, "MIXED"), ({"delayMs": 3_600_000}, "MIXED"), ({"priority": 3}, "PRIORITY")],
)
def test_a_send_with_create_creates_a_topic_that_takes_the_message(
    rest: httpx.Client, fields: dict[str, Any], kind: str
) -> None:
    name = "created-" + "".join(fields or {"plain"})
    body = {"body": "x", **fields}
    for _ in range(2):
        sent = rest.post(f"/topics/{name}/messages", json=body, params={"create": "true"})
        assert sent.status_code == 200, sent.text
    assert rest.get(f"/topics/{name}").json()["messageType"] == kind


def test_the_command_line_creates_a_topic_with_create(running: Standalone) -> None:
    assert tidemill(running, "message", "send", "by-command", "x", "--create").returncode == 0
    lines = tidemill(running, "message", "send", "by-lines", "-", "--create", stdin=b"one\ntwo\n")
    assert lines.stdout == "2 messages sent, 0 failed\n"
    for name in ("by-command", "by-lines"):
        assert running.get(f"topics/{name}")["name"] == name


def test_the_first_use_by_a_client_is_one_warning_with_the_nearest_name(
    running: Standalone,
) -> None:
    running.put("topics/shipping")
    with grpc.insecure_channel(running.grpc) as channel:
        stub = PullClient(channel).stub
        for _ in range(2):
            request = service.SendMessageRequest(messages=[message_of("shippin", b"x")])
            sent = stub.SendMessage(request, metadata=METADATA, timeout=TIMEOUT_S)
            assert sent.status.code == v2.OK
    lines = [json.loads(line) for line in running.log.read_text().splitlines()]
    found = [line for line in lines if "shippin" in (line.get("topic"), line.get("name"))]
    assert [(line["event"], line["level"]) for line in found] == [
        ("topic created on first use", "warning")
    ]
    assert found[0]["nearest"] == "shipping"
    assert running.get("topics/shippin")["createdBy"] == "FIRST_USE"
    shown = tidemill(running, "topic", "show", "shippin").stdout
    assert "The first use by a client created it." in shown
    page = httpx.get(f"{running.admin}/ui/topics", trust_env=False, timeout=30)
    [row] = [row for row in page.text.split("<tr") if 'id="topic-shippin"' in row]
    assert ">first use<" in row


def test_create_also_creates_where_clients_create_no_topics(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", "--no-auto-create-topics") as running:
        refused = tidemill(running, "message", "send", "orders", "x")
        assert refused.returncode == 1
        assert tidemill(running, "message", "send", "orders", "x", "--create").returncode == 0
