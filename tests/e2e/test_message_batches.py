"""Batches of messages by the REST API: an outcome per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.processes.processes import Standalone, standalone

NDJSON = {"Content-Type": "application/x-ndjson"}
PATH = "/topics/orders/messages:batch"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("batches") / "data") as started:
        yield started


@pytest.fixture
def http(running: Standalone) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=f"{running.admin}/api/v1", trust_env=False, timeout=60, headers=NDJSON
    ) as client:
        yield client


def put_topic(http: httpx.Client, name: str, **settings: Any) -> None:
    body = json.dumps({"queues": 1, **settings}).encode()
    kind = {"Content-Type": "application/json"}
    http.put(f"/topics/{name}", content=body, headers=kind).raise_for_status()


def lines(*messages: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in messages)


def outcomes(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [one["outcome"] for one in answer.json()["outcomes"]]


def test_each_line_has_its_own_outcome_in_the_order_of_the_lines(http: httpx.Client) -> None:
    put_topic(http, "orders", dedup={"windowMs": 3_600_000})
    body = lines(
        {"body": "one", "tag": "a"},
        {"body": "two", "idempotencyKey": "k"},
        {"tag": "no body"},
        {"body": "two", "idempotencyKey": "k"},
        {"body": "other", "idempotencyKey": "k"},
        {"body": "x", "bodi": "y"},
    )
    answer = http.post(PATH, content=body + b"no json\n" + lines({"body": "last"}))
    refused = "REFUSED"
    assert outcomes(answer) == [
        *("STORED", "STORED", refused, "DUPLICATE"),
        *(refused, refused, refused, "STORED"),
    ]
    found = answer.json()
    assert found["sent"] == 4
    details = [one.get("detail", "") for one in found["outcomes"]]
    assert "exactly one of body and bodyBase64" in details[2]
    assert "another body" in details[4]
    assert "did you mean 'body'?" in details[5]
    assert "JSON" in details[6]
    stored = http.get("/topics/orders/queues/0/messages").json()["messages"]
    ids = [one["message"]["messageId"] for one in found["outcomes"] if one["outcome"] == "STORED"]
    assert [one["messageId"] for one in stored] == ids


def test_a_batch_outside_the_limits_is_refused_as_a_whole(http: httpx.Client) -> None:
    put_topic(http, "orders")
    before = http.get("/topics/orders/queues/0/messages").json()["maxOffset"]
    one = lines({"body": "x"})
    for content, headers, status in (
        (b"", NDJSON, 400),
        (b"\n\n", NDJSON, 400),
        (one * 257, NDJSON, 400),
        (one, {"Content-Type": "application/json"}, 415),
        (one, {"Content-Type": "text/plain"}, 415),
        (b" " * ((8 << 20) + 1), NDJSON, 413),
    ):
        refused = http.post(PATH, content=content, headers=headers)
        assert refused.status_code == status, refused.text
    too_long = http.post(f"/topics/{'x' * 128}/messages:batch", content=one)
    assert (too_long.status_code, too_long.json()["code"]) == (400, 40_002)
    assert http.get("/topics/orders/queues/0/messages").json()["maxOffset"] == before
    assert outcomes(http.post(PATH, content=one * 256)) == ["STORED"] * 256


def test_a_batch_creates_a_missing_topic_only_with_create(http: httpx.Client) -> None:
    path, body = "/topics/missing/messages:batch", lines({"body": "one"}, {"body": "two"})
    refused = http.post(path, content=body)
    assert outcomes(refused) == ["REFUSED"] * 2
    assert "REST: create=true" in refused.json()["outcomes"][0]["detail"]
    assert outcomes(http.post(path, content=body, params={"create": "true"})) == ["STORED"] * 2
