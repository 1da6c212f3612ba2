"""Delayed messages from outside: REST, command line and the public API over one standalone."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tests.support.clients.api import Api, api, message
from tests.support.clients.commands import tidemill
from tests.support.eventually import LOOK_EVERY_S, eventually
from tests.support.processes.processes import Standalone, is_running, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
LATE_MS_MAX = 1_500  # on the slowest machine
WAIT_S = 20.0


@pytest.fixture
def rest(running: Standalone) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=10) as client:
        yield client


def send(rest: httpx.Client, topic: str, **fields: Any) -> dict[str, Any]:
    fields = fields if "bodyBase64" in fields else {"body": "body", **fields}
    answer = rest.post(f"/topics/{topic}/messages", json=fields, params={"create": "true"})
    assert answer.status_code == 200, answer.text
    sent: dict[str, Any] = answer.json()
    return sent


def act(rest: httpx.Client, timer_id: int, verb: str, **fields: Any) -> httpx.Response:
    return rest.post(f"/timers/{timer_id}:{verb}", json=fields or None)


def timer(rest: httpx.Client, timer_id: int) -> dict[str, Any]:
    answer = rest.get(f"/timers/{timer_id}")
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def problem(answer: httpx.Response) -> tuple[int, int]:
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["detail"]
    return answer.status_code, document["code"]


def run(endpoint: str, scenario: Callable[[Api], Awaitable[None]]) -> None:
    async def main() -> None:
        async with api(endpoint) as client:
            await scenario(client)

    asyncio.run(main())


def received(endpoint: str, topic: str, wanted: int = 1) -> list[tuple[v2.Message, int]]:
    """Receive and ack `wanted` messages; return each with the time at which it came."""
    found: list[tuple[v2.Message, int]] = []

    async def scenario(client: Api) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(found) < wanted:
                messages = await client.receive(topic, topic, poll_ms=5_000)
                found.extend((each, now_ms()) for each in messages)
                handles = [each.system_properties.receipt_handle for each in messages]
                if handles:
                    await client.ack(topic, topic, handles)

    run(endpoint, scenario)
    return found


def is_empty(endpoint: str, topic: str) -> bool:
    found: list[v2.Message] = []

    async def scenario(client: Api) -> None:
        found.extend(await client.receive(topic, topic))

    run(endpoint, scenario)
    return not found


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# ------------------------------------------------------------ sending


def test_a_message_sent_over_rest_is_stored_like_any_other(
    running: Standalone, rest: httpx.Client
) -> None:
    sent = send(rest, "plain", body="grün", tag="tag", keys=["a", "b"], properties={"name": "wert"})
    assert set(sent) == {"messageId", "broker", "queueId", "queueOffset"}
    assert len(sent["messageId"]) == 34
    assert sent["messageId"].startswith("01")
    [(message_, _)] = received(running.grpc, "plain")
    properties = message_.system_properties
    assert message_.body.decode() == "grün"
    assert properties.message_id == sent["messageId"]
    assert (properties.tag, list(properties.keys)) == ("tag", ["a", "b"])
    assert dict(message_.user_properties) == {"name": "wert"}
    assert properties.message_type == v2.NORMAL
    assert not properties.HasField("delivery_timestamp")
    shown = rest.get(f"/topics/plain/messages/{sent['messageId']}").json()["messages"]
    assert [each["bodyText"] for each in shown] == ["grün"]


def test_bytes_and_message_groups_are_sent_too(running: Standalone, rest: httpx.Client) -> None:
    queues = set()
    for n in range(8):
        body = base64.b64encode(bytes([0xFF, n])).decode()
        queues.add(send(rest, "grouped", bodyBase64=body, messageGroup="group")["queueId"])
    assert len(queues) == 1
    bodies = [each.body for each, _ in received(running.grpc, "grouped", 8)]
    assert bodies == [bytes([0xFF, n]) for n in range(8)]


def test_messages_without_a_group_go_round_the_queues(rest: httpx.Client) -> None:
    queues = [send(rest, "round")["queueId"] for _ in range(8)]
    assert sorted(queues) == list(range(8))


@pytest.mark.parametrize("fields", [{"delayMs": 1_500}, {"delayLevel": 1}, {"deliverAtMs": 0}])
def test_a_delayed_message_comes_when_it_is_due(
    running: Standalone, rest: httpx.Client, fields: dict[str, int]
) -> None:
    [name] = fields
    before_ms = now_ms()
    if name == "deliverAtMs":
        fields = {name: before_ms + 1_234}
    sent = send(rest, name, **fields)
    assert set(sent) == {"messageId", "broker", "queueId", "timerId", "deliverAtMs", "recallHandle"}
    expected_ms = {"delayMs": before_ms + 1_500, "delayLevel": before_ms + 1_000}.get(
        name, before_ms + 1_234
    )
    assert 0 <= sent["deliverAtMs"] - expected_ms <= (0 if name == "deliverAtMs" else 1_000)
    assert timer(rest, sent["timerId"])["state"] == "PENDING"
    [(message_, at_ms)] = received(running.grpc, name)
    assert 0 <= at_ms - sent["deliverAtMs"] < LATE_MS_MAX
    properties = message_.system_properties
    assert properties.message_id == sent["messageId"]
    assert properties.delivery_timestamp.ToMilliseconds() == sent["deliverAtMs"]
    assert properties.message_type == v2.DELAY
    assert properties.delivery_attempt == 1
    assert timer(rest, sent["timerId"])["state"] == "DELIVERED"


@pytest.mark.parametrize(
    ("level", "delay_ms"),
    [(2, 5_000), (5, 60_000), (14, 600_000), (18, 7_200_000), (99, 7_200_000)],
)
def test_the_delay_levels_match_older_clients(
    rest: httpx.Client, level: int, delay_ms: int
) -> None:
    before_ms = now_ms()
    sent = send(rest, "levels", delayLevel=level)
    assert 0 <= sent["deliverAtMs"] - before_ms - delay_ms < 5_000
    assert act(rest, sent["timerId"], "cancel").status_code == 200


@pytest.mark.parametrize("fields", [{"deliverAtMs": 1}, {"delayMs": 0}])
def test_a_message_with_a_past_due_time_is_delivered_at_once(
    running: Standalone, rest: httpx.Client, fields: dict[str, int]
) -> None:
    topic = f"past-{next(iter(fields))}"
    sent = send(rest, topic, **fields)
    assert set(sent) == {"messageId", "broker", "queueId", "queueOffset"}
    [(message_, _)] = received(running.grpc, topic)
    assert message_.system_properties.HasField("delivery_timestamp")


def test_a_batch_of_plain_and_delayed_messages_is_answered_one_by_one(running: Standalone) -> None:
    async def scenario(client: Api) -> None:
        due = Timestamp(seconds=int(time.time()) + 3_600)
        batch = [message("mixed", str(n).encode()) for n in range(3)]
        batch[1].system_properties.delivery_timestamp.CopyFrom(due)
        answer = await client.send(*batch)
        assert answer.status.code == v2.OK
        assert [bool(entry.recall_handle) for entry in answer.entries] == [False, True, False]
        assert answer.entries[1].offset == 0
        recalled = await client.recall("mixed", answer.entries[1].recall_handle)
        assert (recalled.status.code, recalled.message_id) == (v2.OK, b"1".hex())

    run(running.grpc, scenario)
    assert sorted(each.body for each, _ in received(running.grpc, "mixed", 2)) == [b"0", b"2"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, 40000),
        ({"body": "a", "bodyBase64": "YQ=="}, 40000),
        ({"bodyBase64": "not base64!"}, 40000),
        ({"body": "a", "delayMs": 1, "delayLevel": 1}, 40000),
        ({"body": "a", "delayMs": -1}, 40000),
        ({"body": "a", "delayLevel": 0}, 40000),
        ({"body": "a", "deliverAtMs": 2**60}, 40000),
        ({"body": "a", "delay": 1}, 40000),
        ({"body": "\ud800"}, 40000),
        ({"body": "a", "properties": {"\ud800": ""}}, 40000),
        ({"body": "a", "keys": ["\ud800"]}, 40000),
        ({"body": "a", "deliverAtMs": -1}, 40012),
        ({"body": "a", "deliverAtMs": 2**53}, 40012),
        ({"body": "a", "delayMs": 401 * DAY_MS}, 40012),
        ({"body": "a", "delayMs": 2**53}, 40012),
        ({"body": "a", "delayMs": 1, "messageGroup": "g"}, 40014),
        ({"body": "a", "tag": "a|b"}, 40004),
        ({"body": "a", "keys": [" "]}, 40005),
        ({"body": "a", "properties": {"TIMER_DELIVER_MS": "1"}}, 40007),
        ({"body": ""}, 41302),
        ({"body": "x" * 4_194_305}, 41301),
    ],
)
def test_a_message_that_cannot_be_sent_is_refused(
    rest: httpx.Client, fields: dict[str, Any], code: int
) -> None:
    # In ASCII, as half a character has no other form.
    answer = rest.post(
        "/topics/refused/messages?create=true",
        content=json.dumps(fields),
        headers={"content-type": "application/json"},
    )
    assert problem(answer)[1] == code


def test_a_message_has_to_fit_its_topic(rest: httpx.Client) -> None:
    rest.put("/topics/only-normal", json={"messageType": "NORMAL"})
    rest.put("/topics/only-delay", json={"messageType": "DELAY"})
    delayed, plain = {"body": "a", "delayMs": HOUR_MS}, {"body": "a"}
    assert problem(rest.post("/topics/only-normal/messages", json=delayed)) == (409, 40014)
    assert problem(rest.post("/topics/only-delay/messages", json=plain)) == (409, 40014)
    sent = send(rest, "only-delay", delayMs=HOUR_MS)
    assert act(rest, sent["timerId"], "cancel").status_code == 200


def test_the_timer_topic_is_hidden_and_rejects_requests(rest: httpx.Client) -> None:
    hidden = "%25SYS%25TIMER"
    topics = rest.get("/topics", params={"includeSystem": True}).json()["topics"]
    assert not [topic for topic in topics if topic["name"].startswith("%SYS%")]
    assert problem(rest.post(f"/topics/{hidden}/messages", json={"body": "a"})) == (400, 40002)
    assert problem(rest.put(f"/topics/{hidden}", json={})) == (400, 40002)
    assert problem(rest.get(f"/topics/{hidden}")) == (404, 40402)
    assert problem(rest.delete(f"/topics/{hidden}")) == (404, 40402)


# ------------------------------------------------------------ timers over REST


def test_timers_are_listed_by_due_time_and_filtered(rest: httpx.Client) -> None:
    base_ms = now_ms() + DAY_MS
    sent = {
        n: send(rest, f"list-{n % 2}", deliverAtMs=base_ms + n * 1_000, keys=[f"key-{n}"])
        for n in (3, 0, 4, 1, 2)
    }

    def listed(**filters: Any) -> list[int]:
        query = {"dueFrom": base_ms, "dueTo": base_ms + 10_000, **filters}
        page = rest.get("/timers", params=query).json()
        return [each["timerId"] for each in page["timers"]]

    ids = [sent[n]["timerId"] for n in range(5)]
    assert listed() == ids
    assert listed(topic="list-1") == [ids[1], ids[3]]
    assert listed(key="key-4") == [ids[4]]
    assert listed(dueFrom=base_ms + 1_000, dueTo=base_ms + 3_000) == [ids[1], ids[2]]
    [first] = rest.get("/timers", params={"dueFrom": base_ms, "pageSize": 1}).json()["timers"]
    assert first == {
        "timerId": ids[0],
        "broker": "broker-0",
        "state": "PENDING",
        "topic": "list-0",
        "queueId": sent[0]["queueId"],
        "dueAtMs": base_ms,
        "scheduledAtMs": first["scheduledAtMs"],
        "size": first["size"],
        "messageId": sent[0]["messageId"],
        "keys": ["key-0"],
        "bornAtMs": first["bornAtMs"],
        "bornHost": first["bornHost"],
    }
    for timer_id in ids:
        act(rest, timer_id, "cancel")
    assert listed() == []


def test_pages_hold_every_timer_once(rest: httpx.Client) -> None:
    due_at_ms = now_ms() + 2 * DAY_MS  # The same of all: the id decides then.
    ids = [send(rest, "pages", deliverAtMs=due_at_ms)["timerId"] for _ in range(7)]
    query: dict[str, Any] = {"topic": "pages", "pageSize": 3}
    found = []
    while True:
        page = rest.get("/timers", params=query).json()
        found += [each["timerId"] for each in page["timers"]]
        if "nextPageToken" not in page:
            break
        query["pageToken"] = page["nextPageToken"]
    assert found == sorted(ids)
    for timer_id in ids:
        act(rest, timer_id, "cancel")


def test_a_cancelled_message_never_comes(running: Standalone, rest: httpx.Client) -> None:
    sent = send(rest, "cancelled", delayMs=1_500)
    for _ in range(2):
        answer = act(rest, sent["timerId"], "cancel")
        assert (answer.status_code, answer.json()["state"]) == (200, "CANCELLED")
    later = send(rest, "cancelled", delayMs=2_000)  # When it comes, the other one was due.
    came = [each.system_properties.message_id for each, _ in received(running.grpc, "cancelled")]
    assert came == [later["messageId"]]
    assert is_empty(running.grpc, "cancelled")
    assert problem(act(rest, sent["timerId"], "fire"))[0] in {404, 409}
    assert problem(act(rest, sent["timerId"], "reschedule", delayMs=1))[0] in {404, 409}


def test_a_timer_moves_earlier_and_later(running: Standalone, rest: httpx.Client) -> None:
    sent = send(rest, "rescheduled", delayMs=HOUR_MS)
    due_at_ms = sent["deliverAtMs"]
    refused = act(rest, sent["timerId"], "reschedule", delayMs=1_000, expectedDueAtMs=due_at_ms + 1)
    assert problem(refused) == (409, 42800)
    later = act(rest, sent["timerId"], "reschedule", dueAtMs=due_at_ms + DAY_MS)
    assert later.json()["dueAtMs"] == due_at_ms + DAY_MS
    sooner = act(
        rest, sent["timerId"], "reschedule", delayMs=1_500, expectedDueAtMs=due_at_ms + DAY_MS
    )
    moved_to_ms = sooner.json()["dueAtMs"]
    [(message_, at_ms)] = received(running.grpc, "rescheduled")
    assert 0 <= at_ms - moved_to_ms < LATE_MS_MAX
    assert message_.system_properties.message_id == sent["messageId"]
    assert problem(act(rest, sent["timerId"], "cancel")) == (404, 40401)


def test_a_fired_timer_comes_at_once(running: Standalone, rest: httpx.Client) -> None:
    sent = send(rest, "fired", delayMs=HOUR_MS)
    assert act(rest, sent["timerId"], "fire").status_code == 200
    [(message_, _)] = received(running.grpc, "fired")
    assert message_.system_properties.message_id == sent["messageId"]
    assert timer(rest, sent["timerId"])["state"] == "DELIVERED"


def test_a_client_recalls_a_message_sent_by_rest(running: Standalone, rest: httpx.Client) -> None:
    sent = send(rest, "recalled", delayMs=HOUR_MS)

    async def scenario(client: Api) -> None:
        answer = await client.recall("recalled", sent["recallHandle"])
        assert (answer.status.code, answer.message_id) == (v2.OK, sent["messageId"])

    run(running.grpc, scenario)
    assert timer(rest, sent["timerId"])["state"] == "CANCELLED"


def test_a_recall_after_delivery_is_too_late(running: Standalone, rest: httpx.Client) -> None:
    sent = send(rest, "late", delayMs=500)
    received(running.grpc, "late")

    async def scenario(client: Api) -> None:
        answer = await client.recall("late", sent["recallHandle"])
        assert answer.status.code == v2.MESSAGE_NOT_FOUND
        assert answer.status.message

    run(running.grpc, scenario)


def test_bad_requests_for_timers_are_refused(running: Standalone, rest: httpx.Client) -> None:
    assert problem(rest.get("/timers/123456789")) == (404, 40401)
    assert problem(rest.get("/timers/x")) == (400, 40000)
    assert problem(rest.get("/timers/-1")) == (400, 40000)
    for verb in ("cancel", "fire"):
        assert problem(act(rest, 123_456_789, verb)) == (404, 40401)
    assert problem(act(rest, 123_456_789, "reschedule", delayMs=1)) == (404, 40401)
    assert problem(act(rest, 1, "reschedule", delayMs=1, dueAtMs=1)) == (400, 40000)
    assert problem(act(rest, 1, "reschedule", expectedDueAtMs=1)) == (400, 40000)
    for query in ({"pageToken": "%%%"}, {"pageToken": "YQ"}, {"pageSize": 0}, {"dueFrom": -1}):
        assert problem(rest.get("/timers", params=query)) == (400, 40000)
    assert problem(rest.get("/timers", params={"topic": "none"})) == (404, 40402)
    sent = send(rest, "bad-move", delayMs=HOUR_MS)
    for due in ({"delayMs": 401 * DAY_MS}, {"dueAtMs": -1}):
        assert problem(act(rest, sent["timerId"], "reschedule", **due)) == (409, 40012)
    assert timer(rest, sent["timerId"])["dueAtMs"] == sent["deliverAtMs"]
    foreign = {"origin": "http://elsewhere.example"}
    refused = rest.post(f"/timers/{sent['timerId']}:cancel", headers=foreign)
    assert problem(refused) == (403, 40300)
    own = {"origin": running.admin}
    assert rest.post(f"/timers/{sent['timerId']}:cancel", headers=own).status_code == 200


# ------------------------------------------------------------ the command line


def test_the_command_line_sends_and_handles_timers(running: Standalone, rest: httpx.Client) -> None:
    sent = tidemill(
        running,
        "message",
        "send",
        "cli",
        "hello",
        "--create",
        "--delay=1h30m",
        "--tag=t",
        "--key=k1",
        "--key=k2",
        "--property=name=a=b",
        "-o",
        "json",
    )
    assert sent.returncode == 0, sent.stderr
    answer = json.loads(sent.stdout)
    timer_id = str(answer["timerId"])
    assert 0 <= now_ms() + 5_400_000 - answer["deliverAtMs"] < 20_000

    listed = tidemill(running, "timer", "list", "--topic=cli").stdout.splitlines()
    assert listed[0].split()[:3] == ["TIMER", "DUE", "IN"]
    assert listed[1].split()[0] == timer_id
    assert "1 h 29 m" in listed[1]
    assert answer["messageId"] in listed[1]
    shown = tidemill(running, "timer", "show", timer_id).stdout
    assert "PENDING" in shown
    assert "k1 k2" in shown

    moved = tidemill(running, "timer", "reschedule", timer_id, "--at=2027-01-01T08:00:00Z", "-y")
    if moved.returncode:  # The date is past, or more than 400 days off.
        assert "IllegalDeliveryTime" in moved.stderr
    moved = tidemill(running, "timer", "reschedule", timer_id, "--delay=2h", "-y", "-o", "json")
    due_at_ms = json.loads(moved.stdout)["dueAtMs"]
    assert 0 <= now_ms() + 7_200_000 - due_at_ms < 20_000
    dry = tidemill(running, "timer", "cancel", timer_id, "--dry-run").stdout
    assert dry.startswith(f"timer {timer_id} would be cancelled: message {answer['messageId']} of")
    for verb in ("cancel", "fire"):
        unsure = tidemill(running, "timer", verb, timer_id)
        assert (unsure.returncode, unsure.stdout) == (2, "")
        assert "add --yes" in unsure.stderr
    assert timer(rest, int(timer_id))["state"] == "PENDING"
    cancelled = tidemill(running, "timer", "cancel", timer_id, "--yes")
    assert cancelled.stdout == f"timer {timer_id} is cancelled\n"
    refused = tidemill(running, "timer", "fire", timer_id, "--yes")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")


def test_the_command_line_changes_all_timers_of_a_topic(
    running: Standalone, rest: httpx.Client
) -> None:
    running.put("topics/bulk", messageType="DELAY")
    for n in range(30):
        body = {"body": "x", "delayMs": 3_600_000, "tag": "odd" if n % 2 else "even"}
        rest.post("/topics/bulk/messages", json=body).raise_for_status()

    def dues() -> dict[int, int]:
        found = rest.get("/timers", params={"topic": "bulk"}).json()["timers"]
        return {one["timerId"]: one["dueAtMs"] for one in found}

    before = dues()
    dry = tidemill(running, "timer", "cancel", "--topic=bulk", "--tag=odd", "--dry-run").stdout
    assert dry.startswith("15 timers would be cancelled\n  topic bulk: 15\n")
    moved = tidemill(running, "timer", "reschedule", "--topic=bulk", "--later=1h", "--wait", "-y")
    assert moved.returncode == 0, moved.stderr
    assert moved.stdout.endswith(": done, 30 of 30 items\n")
    assert dues() == {timer_id: due_ms + 3_600_000 for timer_id, due_ms in before.items()}
    few = tidemill(running, "timer", "cancel", "--topic=bulk", "--max=5", "-y")
    assert (few.returncode, dues().keys()) == (1, before.keys())
    ended = tidemill(running, "timer", "cancel", "--topic=bulk", "--tag=odd", "--wait", "-y")
    assert ended.returncode == 0, ended.stderr
    assert len(dues()) == 15
    listed = tidemill(running, "operation", "list").stdout
    assert "cancel timers" in listed
    assert "reschedule timers" in listed


def test_the_command_line_takes_a_body_from_standard_input(
    running: Standalone, rest: httpx.Client
) -> None:
    sent = tidemill(
        running,
        "message",
        "send",
        "stdin",
        "--body-file=-",
        "--level=3",
        "--create",
        stdin=b"\xff\0raw",
    )
    assert sent.returncode == 0, sent.stderr
    [waiting] = rest.get("/timers", params={"topic": "stdin"}).json()["timers"]
    fired = tidemill(running, "timer", "fire", str(waiting["timerId"]), "-y")
    assert fired.stdout == f"timer {waiting['timerId']} is fired\n"
    [(message_, _)] = received(running.grpc, "stdin")
    assert message_.body == b"\xff\0raw"


@pytest.mark.parametrize(
    "arguments",
    [
        "message send t",
        "message send t body --body-file=-",
        "message send t body --delay=1h --level=3",
        "message send t body --delay=soon",
        "message send t body --at=2027-01-01T08:00:00",
        "message send t body --property=novalue",
        "message send t --body-file=/no/such/file",
        "timer show x",
        "timer reschedule 1",
        "timer reschedule 1 --delay=1h --at=2027-01-01T08:00:00Z",
    ],
)
def test_wrong_usage_has_status_2(running: Standalone, arguments: str) -> None:
    refused = tidemill(running, *arguments.split())
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_limited_list_warns_about_more_items(running: Standalone, rest: httpx.Client) -> None:
    ids = [send(rest, "cut", delayMs=HOUR_MS + n)["timerId"] for n in range(3)]
    listed = tidemill(running, "timer", "list", "--topic=cut", "--limit=2", "-o", "json")
    assert [each["timerId"] for each in json.loads(listed.stdout)] == ids[:2]
    assert "more than these 2" in listed.stderr
    for timer_id in ids:
        act(rest, timer_id, "cancel")


# ------------------------------------------------------------ a crash


def test_a_delayed_message_outlives_a_killed_broker(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=10) as rest:
            sent = send(rest, "crash", delayMs=3_000)
            cancelled = send(rest, "crash", delayMs=3_000)
            assert act(rest, cancelled["timerId"], "cancel").status_code == 200
        pid = running.processes["broker-0"].pid
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_running(pid))
        found: list[v2.Message] = []

        async def scenario(client: Api) -> None:
            async with asyncio.timeout(WAIT_S):
                while not found:
                    try:
                        found.extend(await client.receive("crash", "crash", poll_ms=5_000))
                    except AssertionError:  # The broker is not back yet.
                        await asyncio.sleep(LOOK_EVERY_S)
            assert now_ms() >= sent["deliverAtMs"]
            found.extend(await client.receive("crash", "crash"))

        run(running.grpc, scenario)
        assert [each.system_properties.message_id for each in found] == [sent["messageId"]]
