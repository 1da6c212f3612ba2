"""Lists of dead letters for users with few rights: calls to the broker groups, and their bound."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tests.support.worlds.broker_groups import cluster_of
from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.cluster import brokers as module
from tidemill.admin.cluster.brokers import SCANS_MAX
from tidemill.admin.http.request_access import OPEN, RequestAccess
from tidemill.admin.json.dead_letters import DeadLetterPageView
from tidemill.admin.routes.dead_letters import CALLS_MAX, list_dead_letters, summarize_dead_letters
from tidemill.common.errors import Overloaded
from tidemill.security.table import Mode
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

STRANGER = RequestAccess(Mode.ON, is_super=False)


class Sees:
    """A user with rights on some consumer groups."""

    is_limited = True

    def __init__(self, *groups: str) -> None:
        self._groups = groups

    def allows_group(self, _actions: object, group: str) -> bool:
        return group in self._groups


class ScanningGroup(CallsByRequest):
    """A broker group with dead letters of one consumer group. No filter matches them."""

    def __init__(self) -> None:
        self.scans = 0
        self.is_held = asyncio.Event()

    async def summarize_dead_letters(
        self, request: pb.SummarizeDeadLettersRequest
    ) -> pb.DeadLetterSummary:
        if not request.without_causes:
            await self.is_held.wait()
        return pb.DeadLetterSummary(groups=[pb.DeadLetterCounts(group="g", open=1)])

    async def list_dead_letters(
        self, _request: pb.ListDeadLettersRequest
    ) -> pb.ListDeadLettersReply:
        self.scans += 1
        return pb.ListDeadLettersReply(has_more=True, next_log_offset=10**9 - self.scans)


def listed(group: ScanningGroup, access: Any) -> DeadLetterPageView:
    return asyncio.run(list_dead_letters(cluster_of(group), access, topic="none", page_size=10))


@pytest.mark.parametrize("access", [STRANGER, Sees("other")])
def test_a_user_who_may_see_no_dead_letter_causes_no_search(access: Any) -> None:
    group = ScanningGroup()
    view = listed(group, access)
    assert (view.dead_letters, view.next_page_token, group.scans) == ([], None, 0)


def test_a_page_of_a_limited_user_has_a_bounded_number_of_searches() -> None:
    group = ScanningGroup()
    assert listed(group, Sees("g")).next_page_token
    assert group.scans == CALLS_MAX
    group = ScanningGroup()
    assert listed(group, OPEN).next_page_token
    assert group.scans == 1


def test_few_searches_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE_READ_WAIT_S", 0.01)

    async def scenario() -> None:
        group = ScanningGroup()
        cluster = cluster_of(group)
        running = [
            asyncio.ensure_future(summarize_dead_letters(cluster, OPEN)) for _ in range(SCANS_MAX)
        ]
        await asyncio.sleep(0)
        for rejected in (
            summarize_dead_letters(cluster, OPEN),
            list_dead_letters(cluster, cast("Any", Sees("g")), page_size=10),
        ):
            with pytest.raises(Overloaded, match="try again later"):
                await rejected
        assert group.scans == 0
        # Numbers without causes need no search.
        assert (await summarize_dead_letters(cluster, OPEN, causes=False)).groups[0].open == 1
        group.is_held.set()
        await asyncio.gather(*running)
        await list_dead_letters(cluster, OPEN, page_size=10)
        assert group.scans == 1

    asyncio.run(scenario())
