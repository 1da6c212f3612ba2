"""Pages of the timers of several broker groups contain each timer once, in order."""

from __future__ import annotations

import pytest

from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.messages.timer_pages import TimerCursor, cursor_of, merged, request_after
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class Cluster:
    """Brokers that list timers as real brokers do."""

    def __init__(self, timers: dict[str, list[tuple[int, int]]], *, search_max: int = 100) -> None:
        self.timers = timers
        self.search_max = search_max  # timers per search of a broker

    def all(self) -> list[TimerCursor]:
        return sorted(
            TimerCursor(due, id_, name) for name in self.timers for due, id_ in self.timers[name]
        )

    def reply(self, name: str, request: pb.ListTimersRequest) -> pb.ListTimersReply:
        behind = (-1, -1)
        if request.HasField("after_due_ms"):
            behind = (request.after_due_ms, request.after_timer_id)
        rest = sorted(place for place in self.timers[name] if place > behind)
        page = rest[: min(request.page_size, self.search_max)]
        reply = pb.ListTimersReply(has_more=len(page) < len(rest))
        for due_at_ms, timer_id in page:
            reply.timers.add(due_at_ms=due_at_ms, timer_id=timer_id)
            reply.last_due_ms, reply.last_timer_id = due_at_ms, timer_id
        return reply

    def walk(self, page_size: int) -> list[TimerCursor]:
        found, token = [], ""
        while True:
            request = pb.ListTimersRequest(page_size=page_size)
            answers = [
                BrokerAnswer(
                    name,
                    self.reply(
                        name, request_after(request, cursor_of(token), name) if token else request
                    ),
                )
                for name in self.timers
            ]
            page = merged(answers, page_size)
            assert len(page.timers) <= page_size
            found += [
                TimerCursor(timer.due_at_ms, timer.timer_id, name) for name, timer in page.timers
            ]
            if page.next_token is None:
                return found
            token = page.next_token


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("search_max", [1, 2, 100])
def test_pages_contain_each_timer_once_and_in_order(page_size: int, search_max: int) -> None:
    cluster = Cluster(
        {
            # Several brokers have equal times and ids, even the first possible one.
            "b-0": [(0, 0), (5, 1), (5, 2), (9, 3)],
            "b-1": [(0, 0), (5, 0), (5, 1), (5, 2)],
            "b-2": [(5, 1), (7, 0)],
            "b-3": [],
        },
        search_max=search_max,
    )
    assert cluster.walk(page_size) == cluster.all()
