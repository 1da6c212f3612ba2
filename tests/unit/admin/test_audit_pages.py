"""Pages of the audit log over several sources, and actions of controllers without the home."""

from __future__ import annotations

import asyncio
import re
from random import Random
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests.support.seeds import seeds
from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.audit.author import Author
from tidemill.admin.audit.controller_actions import recorded
from tidemill.admin.audit.pages import (
    CURSOR_PATTERN,
    AuditCursor,
    SourceRecords,
    decode_cursor,
    encode_cursor,
    merged,
)
from tidemill.admin.http.actor import Actor
from tidemill.common.errors import BrokerUnreachable, Conflict
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

Log = list[tuple[int, dict[str, Any]]]


def page_at(logs: dict[str, Log], cursor: AuditCursor, size: int, answer_max: int) -> Any:
    """Return a page, as `find_page` makes it: a source answers with at most `answer_max`."""
    sources = []
    for name, log in logs.items():
        before = cursor.sequences.get(name, 0)
        to_ms = cursor.at_ms + 1 if cursor.at_ms and not before else 1 << 62
        found = [one for one in log if (not before or one[0] < before) and one[1]["atMs"] < to_ms]
        limit = min(size, answer_max)
        sources.append(SourceRecords(name, found[:limit], len(found) > limit))
    return merged(sources, cursor, size)


@pytest.mark.parametrize("seed", seeds("audit pages", 50))
def test_pages_have_each_record_once(seed: int) -> None:
    random = Random(seed)
    logs: dict[str, Log] = {}
    for name in "abc"[: random.randint(1, 3)]:
        at_ms, log = 1_000, []
        for number in range(random.randint(0, 30)):
            at_ms += random.choice([0, 1, 5, 40])
            log.append((number + 1, {"atMs": at_ms, "id": f"{name}:{number}"}))
        logs[name] = log[::-1]
    size, answer_max = random.randint(1, 8), random.randint(1, 8)
    shown: list[dict[str, Any]] = []
    cursor: AuditCursor | None = AuditCursor()
    while cursor is not None:
        page, cursor = page_at(logs, cursor, size, answer_max)
        assert len(page) <= size
        assert page or cursor is None
        shown += page
        if cursor is not None:
            assert decode_cursor(encode_cursor(cursor)) == cursor
    expected = [fields for log in logs.values() for _, fields in log]
    assert sorted(one["id"] for one in shown) == sorted(one["id"] for one in expected)
    times = [one["atMs"] for one in shown]
    assert times == sorted(times, reverse=True)


def test_no_record_is_skipped_if_a_clock_was_set_back() -> None:
    logs: dict[str, Log] = {
        "a": [(number, {"id": f"a:{number}", "atMs": 60 + 10 * number}) for number in (3, 2, 1)],
        "b": [(2, {"id": "b:2", "atMs": 50}), (1, {"id": "b:1", "atMs": 100})],
    }
    shown: list[str] = []
    cursor: AuditCursor | None = AuditCursor()
    while cursor is not None:
        page, cursor = page_at(logs, cursor, 2, 2)
        shown += [one["id"] for one in page]
    assert sorted(shown) == ["a:1", "a:2", "a:3", "b:1", "b:2"]


def test_a_page_token_has_its_pattern() -> None:
    cursor = AuditCursor(1_795_750_000_000, {"b~broker-0": 1, "p~a, b:~0011": 2**53, "admin": 7})
    token = encode_cursor(cursor)
    assert re.fullmatch(CURSOR_PATTERN, token)
    assert decode_cursor(token) == cursor


class Home(CallsByRequest):
    """The brokers of a cluster, whose home may be down."""

    def __init__(self, *, is_up: bool) -> None:
        self.is_up = is_up
        self.records: list[pb.RecordAuditRequest] = []

    async def home(self) -> Home:
        return self

    async def record_audit(self, request: pb.RecordAuditRequest) -> pb.RecordAuditReply:
        if not self.is_up:
            raise BrokerUnreachable("the home is down")
        self.records.append(request)
        return pb.RecordAuditReply()


AUTHOR = Author(Actor("ops", "token:ci", "", "10.1.2.3"), "admin-0", "POST /replicas/{name}:drain")


async def act(brokers: Home, *, fails: bool = False) -> str:
    async def do() -> str:
        if fails:
            raise Conflict("too few replicas in sync")
        return "done"

    author = AUTHOR.of("Replica:broker-0-1")
    return await recorded(cast("Any", brokers), author, do, after={"drained": True})


def test_an_action_has_a_record_before_and_after_it() -> None:
    home = Home(is_up=True)
    assert asyncio.run(act(home)) == "done"
    assert [one.result for one in home.records] == ["begun", "ok"]
    assert home.records[0].action_id == home.records[1].action_id != ""
    assert home.records[0].after == b'{"drained": true}'


def test_a_failed_action_is_recorded_with_its_reason() -> None:
    home = Home(is_up=True)
    with pytest.raises(Conflict):
        asyncio.run(act(home, fails=True))
    assert [one.result for one in home.records] == ["begun", "failed"]
    assert home.records[1].reason == "too few replicas in sync"
    assert home.records[1].code != 0


def test_an_action_goes_on_while_the_home_is_down() -> None:
    with capture_logs() as lines:
        assert asyncio.run(act(Home(is_up=False))) == "done"
    assert [(line["event"], line["result"], line["durable"]) for line in lines] == [
        ("audit", "begun", False),
        ("audit", "ok", False),
    ]
    assert (lines[0]["user"], lines[0]["resource"]) == ("ops", "Replica:broker-0-1")
    assert lines[0]["actionId"] == lines[1]["actionId"]
