"""The trace of a message over several calls: the cursor, and the calls to brokers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.cluster.brokers import BrokerAnswer, BrokerAnswers, Brokers
from tidemill.admin.http.request_access import OPEN
from tidemill.admin.json.messages import MessageTraceView
from tidemill.admin.messages.trace import LOG_BYTES_MAX, LOG_BYTES_PER_REQUEST, trace
from tidemill.common.errors import BrokerGroupUnreachable, MessageNotFound
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

MIB = 1 << 20


@dataclass
class Log(CallsByRequest):
    """The log of a broker group: positions of the events of the message, and its end."""

    name: str
    positions: list[int]
    end: int
    is_down: bool = False
    damaged: int = 0  # bytes of its first page
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
            log_id="the-log",
            damaged_bytes=self.damaged if len(self.asked) == 1 else 0,
        )


class Cluster:
    """A cluster that asks its logs one after the other."""

    def __init__(self, *logs: Log) -> None:
        self._logs = logs

    async def ask_all(self, ask: Any) -> BrokerAnswers[Any]:
        answers, unreachable = [], []
        for log in self._logs:
            if log.is_down:
                unreachable.append(log.name)
            else:
                member = SimpleNamespace(name=log.name, client=log)
                answers.append(BrokerAnswer(log.name, await ask(member)))
        return BrokerAnswers(answers, unreachable)


def traced(*logs: Log, cursor: str = "", is_gone: bool = False) -> MessageTraceView:
    async def look() -> bool:
        return is_gone

    cluster = cast("Brokers", Cluster(*logs))
    return asyncio.run(trace(cluster, "m", cursor, OPEN, is_gone=look))


def cursor_of(places: dict[str, list[object]]) -> str:
    return ",".join(":".join(map(str, [name, *place])) for name, place in places.items())


def positions(found: MessageTraceView) -> list[int]:
    return [event.position for event in found.events]


def test_a_call_reads_up_to_the_limit_and_the_next_call_continues() -> None:
    far = 3 * LOG_BYTES_MAX
    log = Log("broker-0", [MIB, 2 * MIB, far], far + MIB)
    first = traced(log)
    assert positions(first) == [MIB, 2 * MIB]
    assert LOG_BYTES_MAX <= first.read_bytes < LOG_BYTES_MAX + 9 * MIB
    assert first.read_bytes + first.left_bytes == log.end - MIB
    log.end += LOG_BYTES_MAX  # Later records are not read.
    found, cursor, calls = positions(first), first.cursor, 1
    while cursor:
        page = traced(log, cursor=cursor)
        found, cursor, calls = found + positions(page), page.cursor, calls + 1
    assert (found, calls) == ([MIB, 2 * MIB, far], 3)
    assert {request.log_id for request in log.asked[1:]} == {"the-log"}


def test_a_log_that_was_read_to_its_end_is_not_read_again() -> None:
    long, short = Log("broker-0", [0], 2 * LOG_BYTES_MAX), Log("broker-1", [], 100)
    cursor = traced(long, short).cursor
    assert cursor
    assert len(short.asked) == 1
    assert traced(long, short, cursor=cursor).cursor is None
    assert len(short.asked) == 1


def test_an_unreachable_broker_is_named_and_the_others_are_read() -> None:
    down = Log("broker-1", [], 0, is_down=True)
    found = traced(Log("broker-0", [5], 10), down)
    assert (positions(found), found.unreachable, found.cursor) == ([5], ["broker-1"], None)
    with pytest.raises(BrokerGroupUnreachable, match="broker-1"):
        traced(Log("broker-0", [], 10), down)
    with pytest.raises(MessageNotFound):
        traced(Log("broker-0", [], 10))


def test_a_cursor_with_numbers_beyond_any_log_is_read_like_the_end() -> None:
    log = Log("broker-0", [5], 10)
    beyond = {"broker-0": [10**18 * 9, 10**9 * 9, 10**19 - 1, "the-log"], "b": [10, 0, 10, "x"]}
    found = traced(log, cursor=cursor_of(beyond))
    assert (positions(found), found.cursor, found.unreachable) == ([], None, ["b"])


def test_an_unknown_broker_group_in_a_cursor_is_named_and_the_others_are_read() -> None:
    log = Log("broker-0", [5], 10)
    places = {"removed": [0, 0, 10, "x"], "broker-0": [0, 0, 10, "the-log"]}
    found = traced(log, cursor=cursor_of(places))
    assert (positions(found), found.unreachable, found.cursor) == ([5], ["removed"], None)
    found = traced(log, cursor=cursor_of({"removed": [0, 0, 10, "x"]}))
    assert (positions(found), found.unreachable, found.cursor) == ([], ["removed"], None)


def test_a_broker_group_that_was_removed_between_two_calls_is_named() -> None:
    log = Log("broker-0", [5], 10)
    cursor = traced(log, Log("broker-1", [0], 2 * LOG_BYTES_MAX)).cursor
    assert cursor
    found = traced(log, cursor=cursor)
    assert (found.unreachable, found.cursor) == (["broker-1"], None)


def test_a_trace_ends_at_the_end_of_the_log_even_if_the_cursor_has_a_later_end() -> None:
    log = Log("broker-0", [5], 10)
    found = traced(log, cursor=cursor_of({"broker-0": [0, 0, 1 << 40, "the-log"]}))
    assert (positions(found), found.cursor, len(log.asked)) == ([5], None, 1)


def test_a_call_ends_after_a_page_without_progress() -> None:
    log = Log("broker-0", [], 10, is_stuck=True)
    cursor = cursor_of({"broker-0": [3, 0, 10, "the-log"]})
    assert traced(log, cursor=cursor).left_bytes == 7
    assert len(log.asked) == 1


def test_no_further_page_is_read_after_the_client_disconnects() -> None:
    log = Log("broker-0", [0], LOG_BYTES_MAX)
    assert traced(log, is_gone=True).left_bytes == LOG_BYTES_MAX - LOG_BYTES_PER_REQUEST
    assert len(log.asked) == 1


def test_a_trace_has_the_number_of_damaged_bytes() -> None:
    damaged = Log("broker-0", [MIB], 20 * MIB, damaged=700)
    intact = Log("broker-1", [MIB], 2 * MIB)
    assert traced(damaged, intact).damaged_bytes == {"broker-0": 700}
    assert traced(intact).damaged_bytes is None


def test_a_damaged_log_without_the_message_is_not_an_error() -> None:
    found = traced(Log("broker-0", [], 2 * MIB, damaged=700))
    assert (found.events, found.damaged_bytes) == ([], {"broker-0": 700})
