"""Dead letters through the real processes: list, replay, discard and copy them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients.api import api, message
from tests.support.clients.client_process import run_python_client
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

POLL_MS = 5_000
PAGE = Path(__file__).parents[2] / "docs/operations/dead-letters.md"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("dead-letters") / "data") as started:
        yield started


def letters(running: Standalone, **query: str) -> list[dict[str, Any]]:
    found = httpx.get(
        f"{running.admin}/api/v1/dead-letters", params=query, trust_env=False
    ).raise_for_status()
    page: list[dict[str, Any]] = found.json()["deadLetters"]
    return page


def all_letters(running: Standalone, *, page_size: int, **query: str) -> list[dict[str, Any]]:
    """Return the dead letters of all pages."""
    found: list[dict[str, Any]] = []
    token: dict[str, str] = {}
    while True:
        page = httpx.get(
            f"{running.admin}/api/v1/dead-letters",
            params={**query, "pageSize": page_size, **token},
            trust_env=False,
        )
        page.raise_for_status()
        found += page.json()["deadLetters"]
        if "nextPageToken" not in page.json():
            return found
        token = {"pageToken": page.json()["nextPageToken"]}


def brokers_of(running: Standalone, topic: str) -> set[str]:
    return {queue["broker"] for queue in running.get(f"topics/{topic}")["queueStatus"]}


def post(running: Standalone, path: str, body: object, **query: str) -> httpx.Response:
    return httpx.post(
        f"{running.admin}/api/v1/{path}", json=body, params=query, trust_env=False, timeout=20
    )


def begin(running: Standalone, path: str, body: object, *, key: str) -> httpx.Response:
    return httpx.post(
        f"{running.admin}/api/v1/{path}",
        json=body,
        headers={"Idempotency-Key": key},
        trust_env=False,
        timeout=20,
    )


def fail_all(running: Standalone, topic: str, group: str, *bodies: bytes) -> list[str]:
    """Send messages and let the group fail each of them once; return ids, the oldest first."""
    running.put(f"groups/{group}", maxAttempts=1)

    async def run() -> None:
        async with api(running.grpc) as client:
            assert await client.receive(topic, group) == []
            for body in bodies:
                await client.send(message(topic, body))
            held: list[v2.Message] = []
            while len(held) < len(bodies):
                held += await client.receive(topic, group, poll_ms=POLL_MS)
            for one in held:
                handle = one.system_properties.receipt_handle
                await client.change_invisible(topic, group, handle, 1_000)

    asyncio.run(run())
    eventually(lambda: len(letters(running, group=group)) == len(bodies), within_ms=30_000)
    return [one["id"] for one in reversed(letters(running, group=group))]


def receive(running: Standalone, topic: str, group: str) -> list[tuple[bytes, int]]:
    """Receive and ack what a group gets; return bodies and attempts."""

    async def run() -> list[tuple[bytes, int]]:
        found = []
        async with api(running.grpc) as client:
            while got := await client.receive(topic, group):
                found += [(one.body, one.system_properties.delivery_attempt) for one in got]
                handles = [one.system_properties.receipt_handle for one in got]
                await client.ack(topic, group, handles)
        return found

    return asyncio.run(run())


def test_only_the_group_of_an_official_client_gets_a_replayed_message(
    running: Standalone, tmp_path: Path
) -> None:
    running.put("groups/official", maxAttempts=2)
    names = {"topic": "official", "group": "official"}
    first = run_python_client(tmp_path, "dead_letter", running.grpc, attempts=2, **names)
    sent_id = first.the("sent")["id"]
    # The sampler reads every 5 s.
    numbers = {"open": 1, "lastHour": 1}
    eventually(lambda: running.get("groups/official")["deadLetters"] == numbers)
    assert running.get("overview")["deadLetters"]["lastHour"] >= 1
    listed = tidemill(running, "-o", "json", "dead-letter", "list", "--group", "official")
    (letter,) = json.loads(listed.stdout)
    assert (letter["messageId"], letter["reason"]) == (sent_id, "ATTEMPTS_EXHAUSTED")
    assert (letter["attempts"], letter["replays"], letter["state"]) == (2, 0, "OPEN")
    dry = tidemill(running, "dead-letter", "replay", "official", letter["id"], "--dry-run")
    assert "1 dead letter of group official would be replayed" in dry.stdout
    done = tidemill(running, "dead-letter", "replay", "official", letter["id"], "--yes")
    assert (done.returncode, "1 dead letter of group official: replayed" in done.stdout) == (
        0,
        True,
    )
    facts = run_python_client(tmp_path, "replayed", running.grpc, other="other", **names)
    received = [(fact["by"], fact["id"], fact["attempt"]) for fact in facts.of("received")]
    # The other group gets the original, and nothing of the replay.
    assert received == [("official", sent_id, 1), ("other", sent_id, 1)]
    again = tidemill(running, "dead-letter", "replay", "official", letter["id"], "--yes")
    assert (again.returncode, "it was replayed before" in again.stdout) == (1, True)
    events = tidemill(running, "-o", "json", "message", "trace", sent_id)
    kinds = [event["event"] for event in json.loads(events.stdout)["events"]]
    assert kinds[kinds.index("dead_lettered") + 1 :].count("replayed") == 1


def test_a_discarded_dead_letter_is_shown_and_never_replayed(running: Standalone) -> None:
    first, second = fail_all(running, "discarded", "discarded", b"one", b"two")
    done = tidemill(running, "dead-letter", "discard", "discarded", first, "--yes")
    assert (done.returncode, "1 dead letter" in done.stdout) == (0, True)
    outcomes = post(
        running, "groups/discarded/dead-letters:replay", {"ids": [first, second, "nowhere:1"]}
    ).json()["outcomes"]
    assert [one["outcome"] for one in outcomes] == ["DISCARDED", "REPLAYED", "NOT_FOUND"]
    body = running.get(f"groups/discarded/dead-letters/{first}")["bodyText"]
    assert receive(running, "discarded", "discarded") == [({"one": b"two", "two": b"one"}[body], 1)]
    shown = tidemill(running, "dead-letter", "show", "discarded", first)
    assert "discarded" in shown.stdout
    assert body in shown.stdout
    summary = tidemill(running, "-o", "json", "dead-letter", "summary")
    (counts,) = [one for one in json.loads(summary.stdout)["groups"] if one["group"] == "discarded"]
    assert (counts["open"], counts["replayed"], counts["discarded"]) == (0, 1, 1)


def test_a_copy_with_another_body_is_a_replay(running: Standalone) -> None:
    (letter,) = fail_all(running, "corrected", "corrected", b"poison")
    path = f"groups/corrected/dead-letters/{letter}:copy"
    planned = post(running, path, {"body": "good"}, dryRun="true").json()
    assert (planned["receivers"], planned["outcome"]) == (["corrected"], "REPLAYED")
    assert "messageId" not in planned
    done = tidemill(
        running, "dead-letter", "copy", "corrected", letter, "--body", "good", "--tag", "t", "--yes"
    )
    assert "the dead letter is replayed" in done.stdout
    assert receive(running, "corrected", "corrected") == [(b"good", 1)]
    assert receive(running, "corrected", "bystander") == [(b"poison", 1)]
    refused = post(running, path, {"body": "again"}).json()
    assert (refused["outcome"], "messageId" in refused) == ("ALREADY_REPLAYED", False)


def test_a_copy_to_a_topic_is_for_all_its_groups(running: Standalone) -> None:
    (letter,) = fail_all(running, "wide", "wide", b"poison")
    running.put("topics/target")
    assert receive(running, "target", "reader") == []
    path = f"groups/wide/dead-letters/{letter}:copy"
    changes = {"to": "topic", "topic": "target", "discard": True, "properties": {"a": "b"}}
    planned = post(running, path, changes, dryRun="true").json()
    assert (planned["receivers"], planned["outcome"]) == (["reader"], "DISCARDED")
    done = post(running, path, changes).json()
    assert done["outcome"] == "DISCARDED"
    assert receive(running, "target", "reader") == [(b"poison", 1)]
    found = running.get(f"topics/target/messages/{done['messageId']}")["messages"]
    assert (
        found[0]["properties"]["TIDEMILL_COPY_OF"] == letters(running, group="wide")[0]["messageId"]
    )
    assert letters(running, group="wide")[0]["state"] == "DISCARDED"


def test_a_copy_is_another_message_on_a_topic_with_deduplication(running: Standalone) -> None:
    running.put("topics/once", dedup={})
    running.put("groups/once", maxAttempts=1)
    url = f"{running.admin}/api/v1/topics/once/messages"
    sent = httpx.post(
        url, json={"body": "poison"}, headers={"Idempotency-Key": "order-17"}, trust_env=False
    )
    sent.raise_for_status()

    async def fail() -> None:
        async with api(running.grpc) as client:
            while not await client.receive("once", "once", invisible_ms=1_000):
                pass

    asyncio.run(fail())
    [letter] = eventually(lambda: letters(running, group="once"))
    path = f"groups/once/dead-letters/{letter['id']}:copy"
    with_key = {"to": "topic", "discard": True, "properties": {"dedup-key": "order-17"}}
    refused = post(running, path, with_key)
    assert (refused.status_code, letters(running, group="once")[0]["state"]) == (409, "OPEN")
    done = post(running, path, {"to": "topic", "discard": True}).json()
    assert done["outcome"] == "DISCARDED"
    assert running.get(f"topics/once/messages/{done['messageId']}")["messages"]
    assert receive(running, "once", "once") == [(b"poison", 1)]


def test_an_operation_settles_all_that_match_and_survives_a_kill(running: Standalone) -> None:
    bodies = [b"%d" % n for n in range(40)]
    fail_all(running, "many", "many", *bodies)
    path = "groups/many/dead-letters:discard"
    planned = post(running, path, {"filter": {"topic": "many"}}, dryRun="true").json()
    assert (planned["count"], len(planned["sample"])) == (40, 10)
    wanted = {"filter": {"topic": "many"}, "asOfMs": planned["asOfMs"], "maxCount": 40}
    refused = post(running, path, {**wanted, "maxCount": 39})
    assert (refused.status_code, "more than the 39" in refused.text) == (409, True)
    assert post(running, path, {"filter": {}}).status_code == 409
    slow = {**wanted, "ratePerSecond": 10}
    answers = [begin(running, path, slow, key="many") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    ids = {answer.json()["operation"]["id"] for answer in answers}
    [id_] = ids
    assert begin(running, path, wanted, key="many").status_code == 422
    eventually(lambda: running.get(f"operations/{id_}")["done"] > 0)
    # The supervisor starts the broker again.
    os.kill(running.processes["broker-0"].pid, signal.SIGKILL)

    def state() -> str:
        try:
            return str(running.get(f"operations/{id_}")["state"])
        except httpx.HTTPError:
            return "down"

    eventually(lambda: state() == "DONE", within_ms=60_000)
    ended = running.get(f"operations/{id_}")
    assert (ended["done"], ended["total"], ended["skipped"]) == (40, 40, 0)
    assert {one["state"] for one in letters(running, group="many")} == {"DISCARDED"}
    assert begin(running, path, slow, key="many").json()["operation"]["state"] == "DONE"
    listed = tidemill(running, "-o", "json", "operation", "list", "--state", "done")
    assert id_ in {one["id"] for one in json.loads(listed.stdout)}
    assert "done" in tidemill(running, "operation", "show", id_).stdout


def test_dead_letters_of_two_broker_groups_are_one_list_and_one_operation(tmp_path: Path) -> None:
    bodies = [b"%d" % n for n in range(40)]
    with standalone(tmp_path / "data", "--groups=2") as running:
        running.put("topics/spread", queues=2)
        eventually(lambda: len(brokers_of(running, "spread")) == 2)
        ids = fail_all(running, "spread", "spread", *bodies)
        assert {one.partition(":")[0] for one in ids} == {"broker-0", "broker-1"}
        paged = all_letters(running, page_size=7, group="spread")
        assert [one["id"] for one in reversed(paged)] == ids
        times = [one["deadAtMs"] for one in paged]
        assert times == sorted(times, reverse=True)
        path = "groups/spread/dead-letters:replay"
        planned = post(running, path, {"filter": {}}, dryRun="true").json()
        assert (planned["count"], len(planned["sample"])) == (40, 10)
        wanted = {"filter": {}, "asOfMs": planned["asOfMs"], "maxCount": 40}
        refused = post(running, path, {**wanted, "maxCount": 39})
        assert refused.status_code == 409
        assert running.get("operations")["operations"] == []  # Neither broker group has begun.
        id_ = begin(running, path, wanted, key="spread").json()["operation"]["id"]
        eventually(lambda: running.get(f"operations/{id_}")["state"] == "DONE", within_ms=30_000)
        ended = running.get(f"operations/{id_}")
        assert (ended["total"], ended["done"]) == (40, 40)
        assert {part["broker"] for part in ended["brokers"]} == {"broker-0", "broker-1"}
        received: list[tuple[bytes, int]] = []
        while len(received) < len(bodies):
            received += receive(running, "spread", "spread")
        assert sorted(received) == sorted((body, 1) for body in bodies)


def test_the_command_line_replays_by_filter_and_cancels(running: Standalone) -> None:
    bodies = [b"%d" % n for n in range(60)]  # a minute of replays at one per second
    fail_all(running, "bulk", "bulk", *bodies)
    dry = tidemill(running, "dead-letter", "replay", "bulk", "--all", "--dry-run")
    assert "60 dead letters of group bulk would be replayed" in dry.stdout
    slow = ("dead-letter", "replay", "bulk", "--topic", "bulk", "--rate", "1", "--yes")
    begun = json.loads(tidemill(running, "-o", "json", *slow).stdout)["operation"]["id"]
    assert tidemill(running, "operation", "cancel", begun, "--dry-run").returncode == 0
    assert tidemill(running, "operation", "cancel", begun, "--yes").returncode == 0
    waited = tidemill(running, "operation", "wait", begun)
    assert (waited.returncode, "cancelled" in waited.stdout) == (1, True)
    rest = tidemill(running, "dead-letter", "replay", "bulk", "--all", "--wait", "--yes")
    assert (rest.returncode, "done" in rest.stdout) == (0, True)
    assert sorted(receive(running, "bulk", "bulk")) == sorted((body, 1) for body in bodies)
    assert (
        "no open dead letter"
        in tidemill(running, "dead-letter", "replay", "bulk", "--all", "--yes").stdout
    )
    assert tidemill(running, "operation", "show", "broker-0:1").returncode == 1


def test_wrong_requests_say_what_is_wrong(running: Standalone) -> None:
    (letter,) = fail_all(running, "wrong", "wrong", b"x")
    path = "groups/wrong/dead-letters"
    for body, text in (
        ({"ids": []}, "1 to 1000"),
        ({"ids": ["17"]}, "BROKER:OFFSET"),
        ({"ids": [f"broker-0:{10**30}"]}, "BROKER:OFFSET"),
        ({"id": letter}, "did you mean 'ids'?"),
        ({"ids": [letter], "filter": {}}, "exactly one"),
        ({"ids": [letter], "maxCount": 5}, "belong to a filter"),
    ):
        refused = post(running, f"{path}:replay", body)
        assert (refused.status_code, text in refused.text) == (400, True), refused.text
    assert post(running, "groups/missing/dead-letters:replay", {"ids": [letter]}).status_code == 404
    refused = post(running, f"{path}/{letter}:copy", {"to": "group", "discard": True})
    assert (refused.status_code, "to: topic" in refused.text) == (400, True)
    assert post(running, f"{path}/{letter}:copy", {"body": "a", "bodyBase64": "YQ=="}).is_error
    assert letters(running, group="wrong")[0]["state"] == "OPEN"


def test_the_commands_of_the_page_work(running: Standalone) -> None:
    letters_of_page = fail_all(running, "page", "billing", b"first", b"second", b"third")
    running.put("topics/orders")
    commands = [
        shlex.split(line)[1:]
        for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(commands) == 10
    # The page has the ids of a new broker. The copy of a replayed dead letter needs an open one.
    ids = dict(zip(("broker-0:0", "broker-0:1", "copied"), letters_of_page, strict=True))
    for command in commands:
        own = [ids.get(word, word) for word in command]
        if command[1] == "copy":
            own = [ids["copied"] if word == ids["broker-0:0"] else word for word in own]
            own += [] if "--dry-run" in own else ["--yes"]
        done = tidemill(running, *own)
        assert done.returncode == 0, f"{own}: {done.stdout}{done.stderr}"
    states = [one["state"] for one in letters(running, group="billing")]
    assert sorted(states) == ["DISCARDED", "REPLAYED", "REPLAYED"]
