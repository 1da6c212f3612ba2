"""A message's journey over several calls: what a cursor keeps, and who is asked."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.cluster.brokers import BrokerAnswer, BrokerAnswers, Brokers
from tidemill.admin.json.messages import MessageTraceView
from tidemill.admin.messages.trace import LOG_BYTES_MAX, LOG_BYTES_PER_REQUEST, trace
from tidemill.common.errors import BadRequest, BrokerGroupUnreachable, MessageNotFound
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

MIB = 1 << 20


@dataclass
class Log(CallsByRequest):
    """A broker group's log: positions of the message's events, and where it ends."""

    name: str
    positions: list[int]
    end: int
    is_away: bool = False
    damaged: int = 0  # bytes, of its first page
    is_stuck: bool = False  # reads nothing
    asked: list[pb.ReadEventsRequest] = field(default_factory=list)

    async def read_events(self, request: pb.ReadEventsRequest) -> pb.ReadEventsReply:
        self.asked.append(request)
        begin = request.from_position
        if request.from_message:
            begin = self.positions[0] if self.positions else self.end
        until = min(request.until_position or self.end, self.end, begin + request.log_bytes_max)
        if self.is_stuck:
            until = begin
        found = [at for at in self.positions if begin <= at < until]
        return pb.ReadEventsReply(
            events=[
                pb.Event(position=at, kind=pb.EVENT_KIND_STORED, topic="orders") for at in found
            ],
            next_position=until,
            log_end=self.end,
            log_id="the log",
            damaged_bytes=self.damaged if len(self.asked) == 1 else 0,
        )


class Cluster:
    """Asks the logs one behind the other."""

    def __init__(self, *logs: Log) -> None:
        self._logs = logs

    async def ask_all(self, ask: Any) -> BrokerAnswers[Any]:
        answers, away = [], []
        for log in self._logs:
            if log.is_away:
                away.append(log.name)
            else:
                member = SimpleNamespace(name=log.name, client=log)
                answers.append(BrokerAnswer(log.name, await ask(member)))
        return BrokerAnswers(answers, away)


def traced(*logs: Log, cursor: str = "", is_gone: bool = False) -> MessageTraceView:
    async def look() -> bool:
        return is_gone

    cluster = cast("Brokers", Cluster(*logs))
    return asyncio.run(trace(cluster, "m", cursor, is_gone=look))


def cursor_of(places: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(places).encode()).decode()


def positions(found: MessageTraceView) -> list[int]:
    return [event.position for event in found.events]


def test_a_call_reads_so_much_and_the_next_goes_on() -> None:
    far = 3 * LOG_BYTES_MAX
    log = Log("broker-0", [MIB, 2 * MIB, far], far + MIB)
    first = traced(log)
    assert positions(first) == [MIB, 2 * MIB]
    assert LOG_BYTES_MAX <= first.read_bytes < LOG_BYTES_MAX + 9 * MIB
    assert first.read_bytes + first.left_bytes == log.end - MIB
    log.end += LOG_BYTES_MAX  # What is written meanwhile is not looked at.
    found, cursor, calls = positions(first), first.cursor, 1
    while cursor:
        page = traced(log, cursor=cursor)
        found, cursor, calls = found + positions(page), page.cursor, calls + 1
    assert (found, calls) == ([MIB, 2 * MIB, far], 3)
    assert {request.log_id for request in log.asked[1:]} == {"the log"}


def test_who_has_been_read_to_the_end_is_not_asked_again() -> None:
    long, short = Log("broker-0", [0], 2 * LOG_BYTES_MAX), Log("broker-1", [], 100)
    cursor = traced(long, short).cursor
    assert cursor
    assert len(short.asked) == 1
    assert traced(long, short, cursor=cursor).cursor is None
    assert len(short.asked) == 1


def test_who_cannot_be_asked_is_named_and_the_others_are_read() -> None:
    away = Log("broker-1", [], 0, is_away=True)
    found = traced(Log("broker-0", [5], 10), away)
    assert (positions(found), found.unreachable, found.cursor) == ([5], ["broker-1"], None)
    with pytest.raises(BrokerGroupUnreachable, match="broker-1"):
        traced(Log("broker-0", [], 10), away)
    with pytest.raises(MessageNotFound):
        traced(Log("broker-0", [], 10))


@pytest.mark.parametrize(
    "cursor",
    [
        "x",
        "e30",
        "é",
        cursor_of({}),
        cursor_of([]),
        cursor_of({"a": 1}),
        cursor_of({"a": [-1, 0, 10, "x"]}),
        cursor_of({"a": [0, -1, 10, "x"]}),
        cursor_of({"a": [0, 1 << 32, 10, "x"]}),
        cursor_of({"a": [0, 0, 1 << 63, "x"]}),
        cursor_of({"a": [10, 0, 10, "x"]}),
        cursor_of({"a": [0, 0, 10, 7]}),
        cursor_of({"a": [0, 0, 10]}),
        cursor_of({"a": "0123"}),
        cursor_of({"a": [1.5, 0, 10, "x"]}),
        cursor_of({"a": [0, 0, float("inf"), "x"]}),
        cursor_of({"a": [float("nan"), 0, 10, "x"]}),
        cursor_of({"a": [False, 0, True, "x"]}),
        cursor_of({"a": [0, 0, 10, "\ud800"]}),
        cursor_of({"\ud800": [0, 0, 10, "x"]}),
        base64.urlsafe_b64encode(b"[" * 12_000).decode(),
    ],
)
def test_a_cursor_of_somebody_elses_is_refused(cursor: str) -> None:
    with pytest.raises(BadRequest):
        traced(Log("broker-0", [5], 10), cursor=cursor)


def test_a_broker_group_that_is_none_is_named_and_the_others_are_read() -> None:
    log = Log("broker-0", [5], 10)
    places = {"removed": [0, 0, 10, "x"], "broker-0": [0, 0, 10, "the log"]}
    found = traced(log, cursor=cursor_of(places))
    assert (positions(found), found.unreachable, found.cursor) == ([5], ["removed"], None)
    found = traced(log, cursor=cursor_of({"removed": [0, 0, 10, "x"]}))
    assert (positions(found), found.unreachable, found.cursor) == ([], ["removed"], None)


def test_a_broker_group_that_is_removed_between_two_pages_is_named() -> None:
    log = Log("broker-0", [5], 10)
    cursor = traced(log, Log("broker-1", [0], 2 * LOG_BYTES_MAX)).cursor
    assert cursor
    found = traced(log, cursor=cursor)
    assert (found.unreachable, found.cursor) == (["broker-1"], None)


def test_a_log_is_read_to_its_end_whatever_end_a_cursor_has() -> None:
    log = Log("broker-0", [5], 10)
    found = traced(log, cursor=cursor_of({"broker-0": [0, 0, 1 << 40, "the log"]}))
    assert (positions(found), found.cursor, len(log.asked)) == ([5], None, 1)


def test_a_call_ends_with_a_page_of_which_nothing_was_read() -> None:
    log = Log("broker-0", [], 10, is_stuck=True)
    cursor = cursor_of({"broker-0": [3, 0, 10, "the log"]})
    assert traced(log, cursor=cursor).left_bytes == 7
    assert len(log.asked) == 1


def test_for_who_has_gone_no_other_page_is_read() -> None:
    log = Log("broker-0", [0], LOG_BYTES_MAX)
    assert traced(log, is_gone=True).left_bytes == LOG_BYTES_MAX - LOG_BYTES_PER_REQUEST
    assert len(log.asked) == 1


def test_what_is_damaged_is_told_with_the_journey() -> None:
    ill = Log("broker-0", [MIB], 20 * MIB, damaged=700)
    sound = Log("broker-1", [MIB], 2 * MIB)
    assert traced(ill, sound).damaged_bytes == {"broker-0": 700}
    assert traced(sound).damaged_bytes is None


def test_a_message_whose_own_record_is_damaged_is_not_one_that_never_was() -> None:
    found = traced(Log("broker-0", [], 2 * MIB, damaged=700))
    assert (found.events, found.damaged_bytes) == ([], {"broker-0": 700})
