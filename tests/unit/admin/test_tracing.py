"""A message's journey over several calls: what a cursor keeps, and who is asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidemill.admin.brokers import Answer, Answers, Brokers
from tidemill.admin.message_schemas import MessageTrace
from tidemill.admin.tracing import LOG_BYTES_MAX, trace
from tidemill.common.errors import BadRequest, BrokerGroupUnreachable, MessageNotFound
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

MIB = 1 << 20


@dataclass
class Log:
    """A broker group's log: positions of the message's events, and where it ends."""

    name: str
    positions: list[int]
    end: int
    is_away: bool = False
    damaged: int = 0  # bytes, of its first page
    asked: list[pb.ReadEventsRequest] = field(default_factory=list)

    async def read_events(self, request: pb.ReadEventsRequest) -> pb.ReadEventsReply:
        self.asked.append(request)
        begin = request.from_position
        if request.from_message:
            begin = self.positions[0] if self.positions else self.end
        until = min(request.until_position or self.end, begin + request.log_bytes_max)
        found = [at for at in self.positions if begin <= at < until]
        return pb.ReadEventsReply(
            events=[pb.Event(position=at, kind=pb.STORED, topic="orders") for at in found],
            next_position=until, log_end=self.end, log_id="the log",
            damaged_bytes=self.damaged if len(self.asked) == 1 else 0,
        )  # fmt: skip


class Cluster:
    """Asks the logs one behind the other."""

    def __init__(self, *logs: Log) -> None:
        self._logs = logs

    async def ask_all(self, ask: Any) -> Answers[Any]:
        answers, away = [], []
        for log in self._logs:
            if log.is_away:
                away.append(log.name)
            else:
                member = SimpleNamespace(name=log.name, client=log)
                answers.append(Answer(log.name, await ask(member)))
        return Answers(answers, away)


def traced(*logs: Log, cursor: str = "") -> MessageTrace:
    return asyncio.run(trace(cast("Brokers", Cluster(*logs)), "m", cursor))


def positions(found: MessageTrace) -> list[int]:
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
    ["x", "e30", "W10=", "eyJhIjogMX0=", "eyJhIjogWy0xLCAwLCAwLCAieCJdfQ==", "é"],
)
def test_a_cursor_of_somebody_elses_is_refused(cursor: str) -> None:
    with pytest.raises(BadRequest):
        traced(Log("broker-0", [5], 10), cursor=cursor)


def test_what_is_damaged_is_told_with_the_journey() -> None:
    ill = Log("broker-0", [MIB], 20 * MIB, damaged=700)
    sound = Log("broker-1", [MIB], 2 * MIB)
    assert traced(ill, sound).damaged_bytes == {"broker-0": 700}
    assert traced(sound).damaged_bytes is None


def test_a_message_whose_own_record_is_damaged_is_not_one_that_never_was() -> None:
    found = traced(Log("broker-0", [], 2 * MIB, damaged=700))
    assert (found.events, found.damaged_bytes) == ([], {"broker-0": 700})
