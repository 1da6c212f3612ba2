"""The REST API over a real broker."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients.api import api as messaging
from tests.support.processes.processes import Standalone

Client = httpx.Client
ROOT = Path(__file__).resolve().parents[2]
AT_BEGIN = {"queue": 0, "offset": 0}


@pytest.fixture
def api(running: Standalone) -> Iterator[Client]:
    with Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=10) as client:
        yield client


def problem(response: httpx.Response) -> tuple[int, int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["status"] == response.status_code
    assert document["type"] == "about:blank"
    return response.status_code, document["code"], document["detail"]


def test_a_topic_is_created_shown_changed_and_deleted(api: Client) -> None:
    created = api.put("/topics/life", json={"messageType": "NORMAL", "queues": 2})
    topic = {
        "name": "life",
        "messageType": "NORMAL",
        "queues": 2,
        "isSystem": False,
        "createdByUnknown": "created without a user",
    }
    assert created.json() == {**topic, "isNew": True}
    changed = api.put("/topics/life", json={"queues": 4}).json()
    assert (changed["messageType"], changed["before"]) == ("NORMAL", topic)
    shown = api.get("/topics/life").json()
    assert [queue["queueId"] for queue in shown["queueStatus"]] == [0, 1, 2, 3]
    assert api.delete("/topics/life").json()["dryRun"] is False
    assert problem(api.get("/topics/life"))[:2] == (404, 40402)
    assert problem(api.delete("/topics/life"))[:2] == (404, 40402)


def test_a_topic_may_let_deliveries_be_spread(api: Client) -> None:
    created = api.put("/topics/spread", json={"messageType": "DELAY", "deliverySpreadMs": 5000})
    assert created.json()["deliverySpreadMs"] == 5000
    assert api.put("/topics/spread", json={"queues": 9}).json()["deliverySpreadMs"] == 5000
    assert "deliverySpreadMs" not in api.put("/topics/spread", json={"deliverySpreadMs": 0}).json()
    for wrong in (-1, 3_600_001, "soon"):
        assert problem(api.put("/topics/spread", json={"deliverySpreadMs": wrong}))[:2] == (
            400,
            40000,
        )


def test_a_group_is_created_shown_changed_and_deleted(api: Client) -> None:
    body = {
        "deliveryOrder": "FIFO",
        "maxAttempts": 3,
        "retry": {"exponential": {"initialMs": 1000, "maxMs": 7_200_000, "multiplier": 2}},
    }
    expected = {"name": "life", "startFrom": "earliest", "priorityFactor": 90, **body}
    assert api.put("/groups/life", json=body).json() == {**expected, "isNew": True}
    found = api.get("/groups/life").json()
    assert {name: found[name] for name in expected} == expected
    changed = api.put("/groups/life", json={"retry": {"customized": {"nextMs": [1000, 5000]}}})
    assert changed.json()["retry"] == {"customized": {"nextMs": [1000, 5000]}}
    assert changed.json()["maxAttempts"] == 3
    assert api.delete("/groups/life").json()["dryRun"] is False
    assert problem(api.get("/groups/life"))[:2] == (404, 40403)


def test_the_start_of_a_group_changes_until_it_has_begun_to_read(
    api: Client, running: Standalone
) -> None:
    api.put("/topics/started", json={"queues": 1})
    assert api.put("/groups/started", json={}).json()["startFrom"] == "earliest"
    changed = api.put("/groups/started", json={"startFrom": "latest"}).json()
    assert (changed["startFrom"], changed["before"]["startFrom"]) == ("latest", "earliest")
    assert api.put("/groups/started", json={"maxAttempts": 5}).json()["startFrom"] == "latest"

    async def receive() -> None:
        async with messaging(running.grpc) as client:
            assert await client.receive("started", "started") == []

    asyncio.run(receive())
    status, _, detail = problem(api.put("/groups/started", json={"startFrom": "earliest"}))
    assert status == 409
    assert "tidemill group reset started" in detail
    assert api.get("/groups/started").json()["startFrom"] == "latest"
    assert api.put("/groups/started", json={"startFrom": "latest"}).status_code == 200


def test_lists_come_in_pages(api: Client) -> None:
    names = [f"page-{n}" for n in range(5)]
    for name in names:
        api.put(f"/topics/{name}", json={})
        api.put(f"/groups/{name}", json={})
    for kind in ("topics", "groups"):
        found: list[str] = []
        query = {"pageSize": "2"}
        while True:
            page = api.get(f"/{kind}", params=query).json()
            assert len(page[kind]) <= 2
            found.extend(item["name"] for item in page[kind])
            if "nextPageToken" not in page:
                break
            query["pageToken"] = page["nextPageToken"]
        assert found == sorted(found)
        assert set(names) <= set(found)


@pytest.mark.parametrize("name", ["%25RETRY%25billing", "a%7Cb", "%E4%B8%AD"])
def test_names_are_decoded_once(api: Client, name: str) -> None:
    status, _, detail = problem(api.get(f"/topics/{name}"))
    assert status == 404
    assert httpx.URL(f"http://h/{name}").path.removeprefix("/") in detail


@pytest.mark.parametrize(
    ("method", "path", "body", "reason"),
    [
        ("PUT", "/topics/t", {"queues": 0}, "queues"),
        ("PUT", "/topics/t", {"queues": 1025}, "queues"),
        ("PUT", "/topics/t", {"messageType": "ODD"}, "messageType"),
        ("PUT", "/topics/t", {"queus": 4}, "queus"),
        ("PUT", "/groups/g", {"maxAttempts": 0}, "maxAttempts"),
        ("PUT", "/groups/g", {"retry": {}}, "exponential and customized"),
        ("POST", "/groups/g:resetOffset", {"topic": "t"}, "exactly one"),
        ("POST", "/groups/g:resetOffset", {"topic": "t", "to": "middle"}, "to"),
        ("POST", "/groups/g:resetOffset", {"topic": "t", "to": "latest", "offset": 1}, "exactly"),
        ("POST", "/groups/g:resetOffset", {"topic": "t", "queues": []}, "queues"),
        ("POST", "/groups/g:resetOffset", {"topics": ["t"], "queues": [AT_BEGIN]}, "needs topic"),
        ("POST", "/groups/g:resetOffset", {"topic": "t", "queues": [AT_BEGIN], "offset": 1}, "one"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(
    api: Client, method: str, path: str, body: dict[str, object], reason: str
) -> None:
    status, code, detail = problem(api.request(method, path, json=body))
    assert (status, code) == (400, 40000)
    assert reason in detail


def test_a_body_that_is_not_declared_as_json_is_refused(api: Client) -> None:
    refused = api.put("/topics/t", content=b"{}", headers={"content-type": "text/plain"})
    assert problem(refused)[0] == 415


def test_a_wrong_query_of_a_post_without_a_body_is_named(api: Client) -> None:
    status, _, detail = problem(api.post("/clients/c:stack?timeoutMs=30000"))
    assert status == 400
    assert "timeoutMs" in detail
    assert "20000" in detail


@pytest.mark.parametrize("name", ["a%20b", "%25RETRY%25a", "%25DLQ%25a", "rmq_sys_a", "a" * 128])
def test_a_topic_that_clients_could_not_name_is_refused(api: Client, name: str) -> None:
    assert problem(api.put(f"/topics/{name}", json={}))[:2] == (400, 40002)


@pytest.mark.parametrize("name", ["a%20b", "CID_RMQ_SYS_TRANS", "a" * 121])
def test_a_group_that_clients_could_not_name_is_refused(api: Client, name: str) -> None:
    assert problem(api.put(f"/groups/{name}", json={}))[:2] == (400, 40003)


def test_an_unknown_path_and_method_are_problems_too(api: Client) -> None:
    assert problem(api.get("/nothing"))[0] == 404
    assert problem(api.patch("/topics/t"))[0] == 405


def test_queues_of_a_topic_never_shrink(api: Client) -> None:
    api.put("/topics/wide", json={"queues": 4})
    assert problem(api.put("/topics/wide", json={"queues": 2}))[:2] == (409, 42800)


def test_an_offset_is_reset_to_ends_times_and_numbers(api: Client) -> None:
    api.put("/topics/reset", json={"queues": 2})
    api.put("/groups/reset", json={})
    for target in ({"to": "earliest"}, {"to": "latest"}, {"timestampMs": 0}, {"offset": 7}):
        done = api.post("/groups/reset:resetOffset", json={"topic": "reset", **target})
        assert done.status_code == 200, done.text
        assert [queue["maxOffset"] for queue in done.json()["queues"]] == [0, 0]
    body = {"topic": "none", "to": "latest"}
    assert problem(api.post("/groups/reset:resetOffset", json=body))[:2] == (404, 40402)


def test_several_topics_are_reset_together_or_not_at_all(api: Client) -> None:
    for name in ("first", "second"):
        api.put(f"/topics/{name}", json={"queues": 2})
        api.post(f"/topics/{name}/messages", json={"body": "x"}).raise_for_status()
    api.put("/groups/both", json={})
    path = "/groups/both:resetOffset"
    missing = {"topics": ["first", "none"], "to": "latest"}
    assert problem(api.post(path, json=missing))[:2] == (404, 40402)
    wanted = {"topics": ["first", "second", "first"], "to": "latest"}
    planned = api.post(path, json=wanted, params={"dryRun": "true"}).json()
    done = api.post(path, json=wanted).json()
    for found in (planned, done):
        queues = [(one["topic"], one["queueId"]) for one in found["queues"]]
        assert queues == [("first", 0), ("first", 1), ("second", 0), ("second", 1)]
        # Neither the refused reset nor the dry run has moved the group.
        assert not [one for one in found["queues"] if "fromOffset" in one]
        assert sum(one["toOffset"] for one in found["queues"]) == 2
    assert "topic" not in done
    for body in ({"to": "latest"}, {"to": "latest", "topic": "first", "topics": ["second"]}):
        assert problem(api.post(path, json=body))[0] == 400


def test_single_queues_are_reset_to_exact_offsets_and_others_stay(api: Client) -> None:
    api.put("/topics/exact", json={"queues": 2})
    api.put("/groups/exact", json={})
    for _ in range(8):
        api.post("/topics/exact/messages", json={"body": "m"}).raise_for_status()
    [_, end] = [each["maxOffset"] for each in api.get("/topics/exact").json()["queueStatus"]]
    path = "/groups/exact:resetOffset"
    assert api.post(path, json={"topic": "exact", "to": "latest"}).status_code == 200

    def queue(offset: int, **fields: object) -> dict[str, object]:
        return {"topic": "exact", "queues": [{"queue": 1, "offset": offset, **fields}]}

    planned = api.post(path, json=queue(end - 1), params={"dryRun": "true"}).json()
    done = api.post(path, json=queue(end - 1, broker="broker-0")).json()
    for found in (planned, done):
        [row] = found["queues"]
        assert (row["queueId"], row["fromOffset"], row["toOffset"]) == (1, end, end - 1)
    detail = problem(api.post(path, json=queue(end + 1)))[2]
    assert detail == f"broker-0: queue 1 has the offsets 0 to {end}, and {end + 1} is outside"
    twice = {"topic": "exact", "queues": [{"queue": 1, "offset": each} for each in (0, 1)]}
    assert "each queue of the reset once" in problem(api.post(path, json=twice))[2]
    assert problem(api.post(path, json=queue(1, broker="none")))[0] == 404
    shown = api.get("/groups/exact/progress").json()
    assert shown["total"]["lag"] == 1, "the refused resets have changed nothing"
    tag = api.get("/groups/exact").headers["ETag"]
    other = api.post(path, json=queue(0), headers={"If-Match": '"1.99"'})
    assert other.status_code == 412
    assert api.post(path, json=queue(0), headers={"If-Match": tag}).status_code == 200


def test_a_missing_message_is_not_found(api: Client) -> None:
    api.put("/topics/empty", json={})
    assert problem(api.get("/topics/empty/messages/0102"))[:2] == (404, 40401)
    assert api.get("/topics/empty/messages", params={"key": "k"}).json() == {"messages": []}


def test_the_openapi_document_is_served(running: Standalone) -> None:
    document = httpx.get(f"{running.admin}/openapi.json", trust_env=False).json()
    assert "/api/v1/groups/{group}:resetOffset" in document["paths"]


def test_the_served_document_is_the_one_in_the_repository(running: Standalone) -> None:
    served = httpx.get(f"{running.admin}/openapi.json", trust_env=False).json()
    assert served == json.loads((ROOT / "docs" / "openapi.json").read_text("utf-8"))


def test_the_page_of_the_api_works_under_its_strict_policy(running: Standalone) -> None:
    with Client(base_url=running.admin, trust_env=False, timeout=10) as client:
        page = client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
        assert "unsafe" not in policy
        inline = r"<style|<script(?![^>]*src=)|<[^>]*\s(?:style|on\w+)\s*="
        assert not re.findall(inline, page.text)
        found = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text)
        assert found
        for link in found:
            assert link.startswith("/docs/files/"), link
            file = client.get(link)
            assert file.status_code == 200
            assert file.headers["x-content-type-options"] == "nosniff"
            # Browsers refuse a script or a style of another type.
            kind = {"js": "javascript", "css": "css", "png": "image"}[link.rpartition(".")[2]]
            assert kind in file.headers["content-type"]
        assert "://" not in page.text
        assert client.get("/redoc").status_code == 404


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/topics", "GET, HEAD"),
        ("/topics/t", "DELETE, GET, HEAD, PUT"),
        ("/topics/t/messages", "GET, HEAD, POST"),
        ("/groups/g:resetOffset", "POST"),
        ("/timers/7:cancel", "POST"),
    ],
)
def test_a_405_response_lists_the_allowed_methods(api: Client, path: str, methods: str) -> None:
    refused = api.patch(path)
    assert problem(refused)[0] == 405
    assert refused.headers["allow"] == methods


@pytest.mark.parametrize("path", ["/topics", "/topics/none", "/groups/none/progress"])
def test_head_is_answered_like_get_without_a_body(api: Client, path: str) -> None:
    got, head = api.get(path), api.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == got.headers[name]


def test_replicas_without_controllers_are_no_temporary_state(api: Client) -> None:
    refused = api.get("/replicas")
    assert problem(refused)[0] == 409
    assert "retry-after" not in refused.headers


def test_a_reset_names_the_end_of_each_queue_and_the_new_position(api: Client) -> None:
    api.put("/topics/reset-ends", json={"messageType": "NORMAL", "queues": 1})
    api.put("/groups/reset-ends", json={})
    for _ in range(3):
        api.post("/topics/reset-ends/messages", json={"body": "m"})
    reset = api.post("/groups/reset-ends:resetOffset", json={"topic": "reset-ends", "offset": 1})
    [queue] = reset.json()["queues"]
    assert (queue["minOffset"], queue["maxOffset"], queue["toOffset"]) == (0, 3, 1)


def test_a_dry_run_reports_the_loss_and_deletes_nothing(running: Standalone, api: Client) -> None:
    api.put("/topics/dry", json={"messageType": "NORMAL", "queues": 1})
    api.put("/groups/dry", json={})
    api.post("/topics/dry/messages", json={"body": "kept"})
    api.post("/groups/dry:resetOffset", json={"topic": "dry", "to": "earliest"})
    topic = api.delete("/topics/dry", params={"dryRun": "true"}).json()
    assert (topic["dryRun"], topic["messages"], topic["groups"]) == (True, 1, ["dry"])
    group = api.delete("/groups/dry", params={"dryRun": "true"}).json()
    assert (group["dryRun"], group["topics"], group["lag"]) == (True, ["dry"], 1)
    assert api.get("/topics/dry").json()["queueStatus"][0]["maxOffset"] == 1
    assert api.get("/groups/dry/progress").json()["total"]["lag"] == 1
    assert problem(api.delete("/topics/none", params={"dryRun": "true"}))[:2] == (404, 40402)


def test_a_reset_logs_the_old_and_new_offsets_and_the_caller(
    running: Standalone, api: Client
) -> None:
    api.put("/topics/moved", json={"messageType": "NORMAL", "queues": 1})
    api.put("/groups/moved", json={})
    for body in ("a", "b", "c"):
        api.post("/topics/moved/messages", json={"body": body})

    def reset(**target: object) -> dict[str, Any]:
        done = api.post(
            "/groups/moved:resetOffset",
            json={"topic": "moved", **target},
            headers={b"Tidemill-User": "alice\xe9".encode("latin-1")},
        )
        answer: dict[str, Any] = done.json()
        return answer

    first = reset(offset=2)
    assert "fromOffset" not in first["queues"][0]
    planned = reset(to="earliest", dryRun=True)
    assert (planned["dryRun"], planned["queues"][0]["fromOffset"]) == (True, 2)
    done = reset(timestamp="2000-01-01T00:00:00Z")
    assert done["queues"] == [
        {
            "topic": "moved",
            "broker": "broker-0",
            "queueId": 0,
            "minOffset": 0,
            "maxOffset": 3,
            "fromOffset": 2,
            "toOffset": 0,
        }
    ]
    assert (done["dryRun"], done["by"]) == (False, "alice? at 127.0.0.1")
    lines = [json.loads(line) for line in running.log.read_text().splitlines()]
    resets = [
        line for line in lines if line["event"] == "offsets reset" and line["group"] == "moved"
    ]
    assert [(each["from_offsets"], each["to_offsets"], each["by"]) for each in resets] == [
        ([-1], [2], "alice? at 127.0.0.1"),
        ([2], [0], "alice? at 127.0.0.1"),
    ]


def test_the_type_of_a_topic_in_use_changes_with_force_only(api: Client) -> None:
    api.put("/topics/typed", json={"messageType": "NORMAL", "queues": 1})
    assert api.put("/topics/typed", json={"messageType": "MIXED"}).status_code == 200
    api.post("/topics/typed/messages", json={"body": "one", "delayMs": 3_600_000})
    status, _, detail = problem(api.put("/topics/typed", json={"messageType": "FIFO"}))
    assert status == 409
    assert "from MIXED to FIFO" in detail
    forced = api.put("/topics/typed", json={"messageType": "FIFO", "force": True}).json()
    assert (forced["messageType"], forced["before"]["messageType"]) == ("FIFO", "MIXED")


def test_times_may_be_written_as_people_do(api: Client) -> None:
    api.put("/topics/timed", json={})
    at = "2027-01-01T09:00:00.5+01:00"
    sent = api.post("/topics/timed/messages", json={"body": "b", "deliverAt": at}).json()
    assert sent["deliverAtMs"] == 1_798_790_400_500
    query = {"topic": "timed", "dueFrom": at, "dueTo": "2027-01-01T08:00:00.501Z"}
    assert len(api.get("/timers", params=query).json()["timers"]) == 1
    query["dueTo"] = "1798790400500"
    assert api.get("/timers", params=query).json()["timers"] == []
    path = f"/timers/{sent['timerId']}:reschedule"
    moved = api.post(path, json={"dueAt": "2027-01-02T00:00:00Z", "expectedDueAt": at}).json()
    assert moved["dueAtMs"] == 1_798_848_000_000
    for wrong in ("2027-01-02T00:00:00", "soon", 1_798_848_000_000, "1798848000"):
        assert problem(api.post(path, json={"dueAt": wrong}))[:2] == (400, 40000)


def test_requests_are_counted_by_route(running: Standalone, api: Client) -> None:
    api.get("/topics/counted-1")
    api.get("/topics/counted-2")
    api.patch("/groups/x:resetOffset")
    text = httpx.get(running.processes["admin"].metrics, trust_env=False).text
    samples = [line for line in text.splitlines() if line.startswith("rocketmq_admin_http_")]
    assert not [line for line in samples if "counted" in line]
    for route, method, status in (
        ("/api/v1/topics/{topic}", "GET", "404"),
        ("/api/v1/groups/{group}:resetOffset", "PATCH", "405"),
    ):
        labels = (f'route="{route}"', f'method="{method}"', f'code="{status}"')
        assert [line for line in samples if all(label in line for label in labels)], labels
    assert [line for line in samples if "_seconds_bucket" in line]


def raw_answer(running: Standalone, head: str) -> bytes:
    """Send a raw request head, which no library would send, and return the answer."""
    host, _, port = running.admin.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(head.encode() + b"\r\n\r\n")
        return b"".join(iter(lambda: client.recv(65_536), b""))


def test_a_large_body_is_refused_before_it_is_sent(running: Standalone) -> None:
    answer = raw_answer(
        running,
        "POST /api/v1/topics/t/messages HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/json\r\nContent-Length: 209715200",
    )
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"application/problem+json" in answer


def test_a_name_that_was_bound_again_deletes_nothing(running: Standalone, api: Client) -> None:
    api.put("/topics/rebound", json={})
    answer = raw_answer(
        running,
        "DELETE /api/v1/topics/rebound HTTP/1.1\r\nHost: evil.example:8080\r\nConnection: close",
    )
    assert answer.startswith(b"HTTP/1.1 421 ")
    assert api.get("/topics/rebound").status_code == 200


def test_a_priority_chooses_the_queue_and_is_shown(api: Client) -> None:
    api.put("/topics/urgent", json={"messageType": "PRIORITY"})
    assert api.get("/topics/urgent").json()["queues"] == 8
    for priority, queue_id in ((0, 0), (5, 5), (100, 7)):
        sent = api.post("/topics/urgent/messages", json={"body": "b", "priority": priority}).json()
        assert sent["queueId"] == queue_id
        path = f"/topics/urgent/messages/{sent['messageId']}"
        [found] = api.get(path).json()["messages"]
        assert (found["priority"], found["messageType"]) == (priority, "PRIORITY")
    assert api.post("/topics/urgent/messages", json={"body": "b"}).json()["queueId"] == 0
    delayed = {"body": "b", "priority": 6, "delayMs": 3_600_000}
    assert api.post("/topics/urgent/messages", json=delayed).json()["queueId"] == 6
    api.put("/topics/plain", json={"messageType": "NORMAL"})
    for refused in ({"priority": 1}, {"priority": 1, "delayMs": 1_000}):
        answer = api.post("/topics/plain/messages", json={"body": "b", **refused})
        assert "tidemill topic set plain --type PRIORITY" in problem(answer)[2]


def test_a_group_has_a_priority_factor(api: Client) -> None:
    assert api.put("/groups/factor", json={}).json()["priorityFactor"] == 90
    changed = api.put("/groups/factor", json={"priorityFactor": 0}).json()
    assert (changed["priorityFactor"], changed["before"]["priorityFactor"]) == (0, 90)
    assert api.put("/groups/factor", json={"maxAttempts": 5}).json()["priorityFactor"] == 0
    assert api.get("/groups/factor").json()["priorityFactor"] == 0
