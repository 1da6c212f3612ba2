"""Why a consumer group is behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from fastapi import APIRouter
from pydantic import Field

from tidemill.admin.activity.diagnosis import SILENT_MS, Code, GroupFacts, Holder, find_findings
from tidemill.admin.activity.rows import all_unreachable, group_numbers, sampled_at_ms
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.proxies import list_clients
from tidemill.admin.http.request_access import READS
from tidemill.admin.json import render
from tidemill.admin.json.activity import SAMPLED_AT
from tidemill.admin.json.conflicts import TopicFilterView, conflicts_of, topic_filters_of
from tidemill.admin.json.schema import UNREACHABLE, Schema
from tidemill.admin.routes import Access, Activity, Cluster, GroupName
from tidemill.common.clock import SystemClock
from tidemill.common.errors import ServiceError
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["groups"])

CONSUMERS_MAX: Final = 1_000
DELIVERIES_MAX: Final = 1_000  # of each broker group; a consumer may hold more
ANSWER_S: Final = 2.0  # of the parts that name no cause of their own
EVERY: Final = "*"  # the filter that matches every message
FILTER_LIFE_MS: Final = 600_000  # brokers keep a filter for this time after its last poll
POLLERS: Final = frozenset({v2.PUSH_CONSUMER, v2.SIMPLE_CONSUMER})
TOPICS_MAX: Final = 20  # topics, those with the oldest messages


class BacklogCauseView(Schema):
    """A cause of a backlog."""

    code: Code = Field(description="Kind of the cause.")
    text: str = Field(description="The cause with its numbers, as a sentence.")
    numbers: dict[str, float] = Field(description="The numbers of the sentence.")
    command: str = Field(description="A command that shows more, or ends the cause.")


class DiagnosisView(Schema):
    """The causes of the backlog of a consumer group, those to look at first at the beginning."""

    group: str = Field(description="Name of the consumer group.")
    findings: list[BacklogCauseView] = Field(
        description="The causes. Empty if none is known: the group keeps up, or numbers are"
        " missing."
    )
    unknown: str | None = Field(
        None, description="Why numbers are missing, so that causes may be missing. Missing if none."
    )
    sampled_at_ms: int | None = SAMPLED_AT
    unreachable: list[str] | None = UNREACHABLE


@router.get("/groups/{group}/diagnosis", response_model_exclude_none=True)
async def diagnose_group(
    group: GroupName, cluster: Cluster, access: Access, activity: Activity
) -> DiagnosisView:
    """Explain why a consumer group is behind: pauses, locks, silent or slow consumers, failures.

    The rates are those of the last seconds.
    """
    asked = pb.GetGroupProgressRequest(name=group)
    used = pb.ListConflictsRequest(groups=[group], with_single_filters=True)
    progress, conflicts, (consumers, lacking) = await asyncio.gather(
        cluster.call_all(calls.GET_GROUP_PROGRESS, asked),
        cluster.call_all(calls.LIST_CONFLICTS, used),
        _consumers(cluster, group, access.client_owner),
    )
    shown, reading = render.progress_of(progress), activity.read()
    numbers = group_numbers(reading, group)
    oldest = {
        each.topic: each.oldest_unacked_at_ms
        for each in shown.topics
        if each.oldest_unacked_at_ms is not None and access.allows_topic(READS, each.topic)
    }
    topics = sorted(oldest, key=lambda topic: oldest[topic])[:TOPICS_MAX]
    filters = topic_filters_of(conflicts)
    now_ms = SystemClock().wall_ms()
    oldest_age_ms = now_ms - min(oldest.values(), default=now_ms)
    facts = GroupFacts(
        name=group,
        now_ms=now_ms,
        pause=render.group_of(progress.answers[0].value.group).paused,
        numbers=numbers,
        locks=[each for each in shown.locks if access.allows_topic(READS, each.topic)],
        silent=consumers.silent,
        has_polled=bool(filters or shown.topics),
        no_poll_ms=None if conflicts.unreachable else last_poll_ms(filters, oldest_age_ms),
        pollers=consumers.pollers,
        has_filter=any(each.expression != EVERY for each in filters),
        conflicts=[
            each for each in conflicts_of(conflicts) if access.allows_topic(READS, each.topic)
        ],
        oldest_at_ms={topic: oldest[topic] for topic in topics},
        retention_ms=await _retention(cluster, topics),
    )
    return DiagnosisView(
        group=group,
        findings=[
            BacklogCauseView(
                code=each.code, text=each.text, numbers=dict(each.numbers), command=each.command
            )
            for each in find_findings(facts)
        ],
        unknown=numbers.unknown,
        sampled_at_ms=sampled_at_ms(reading),
        unreachable=all_unreachable(reading, progress.unreachable, conflicts.unreachable, lacking),
    )


class _Consumers(NamedTuple):
    """Connected consumers of a group."""

    silent: list[Holder]  # with messages of the group
    pollers: list[str]  # ids of push and simple consumers


def last_poll_ms(filters: Iterable[TopicFilterView], oldest_age_ms: int) -> int | None:
    """Return the time since the last poll; None: unknown.

    A broker reports no filter after its start, after ten minutes without a poll, and if its version
    is older and reports only conflicts. A message that has waited for longer tells a start from the
    other two.
    """
    forgotten_ms = FILTER_LIFE_MS if oldest_age_ms > FILTER_LIFE_MS else None
    return min((each.polled_ms for each in filters), default=forgotten_ms)


async def _consumers(cluster: Brokers, group: str, owner: int) -> tuple[_Consumers, list[str]]:
    """Return the consumers of the group, and the processes without an answer."""
    asked = pb.ListClientsRequest(group=group, clients_max=CONSUMERS_MAX, owner=owner)
    delivered = pb.GetDeliveriesRequest(
        filter=pb.DeliveryFilter(group=group), page_size=DELIVERIES_MAX
    )
    try:
        async with asyncio.timeout(ANSWER_S):
            page, found = await asyncio.gather(
                list_clients(cluster, asked), cluster.call_all(calls.GET_DELIVERIES, delivered)
            )
    except (TimeoutError, ServiceError):
        return _Consumers([], []), ["consumers"]
    held = Counter(one.client_id for _, reply in found.answers for one in reply.deliveries)
    holders = [
        Holder(client_id=id_, silent_ms=client.newest.silent_ms, in_flight=held[id_])
        for id_, client in page.clients
        if held[id_] and client.states[0][1].silent_ms > SILENT_MS
    ]
    pollers = [id_ for id_, client in page.clients if client.newest.client_type in POLLERS]
    return _Consumers(holders, pollers), sorted({*page.unreachable, *found.unreachable})


async def _retention(cluster: Brokers, topics: Iterable[str]) -> dict[str, int]:
    """Return the retention in effect by topic; a topic without an answer is left out."""

    async def of(topic: str) -> tuple[str, int | None]:
        try:
            asked = pb.GetTopicStatusRequest(name=topic)
            status = (await cluster.call_home(calls.GET_TOPIC_STATUS, asked)).answers[0].value
        except ServiceError:
            return topic, None
        return topic, status.retention_ms if status.HasField("retention_ms") else None

    try:
        async with asyncio.timeout(ANSWER_S):
            found = await asyncio.gather(*(of(topic) for topic in topics))
    except TimeoutError:
        return {}
    return {topic: kept_ms for topic, kept_ms in found if kept_ms is not None}
