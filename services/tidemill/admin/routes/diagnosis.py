"""Why a consumer group is behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

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
from tidemill.admin.json.conflicts import conflicts_of
from tidemill.admin.json.schema import UNREACHABLE, Schema
from tidemill.admin.routes import Access, Activity, Cluster, GroupName
from tidemill.common.clock import SystemClock
from tidemill.common.errors import ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["groups"])

CONSUMERS_MAX: Final = 1_000
SILENT_MAX: Final = 10  # silent consumers, with their messages in flight
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
    progress = await cluster.call_all(calls.GET_GROUP_PROGRESS, asked)
    conflicts = await cluster.call_all(
        calls.LIST_CONFLICTS, pb.ListConflictsRequest(groups=[group])
    )
    silent, lacking = await _silent(cluster, group, access.client_owner)
    shown, reading = render.progress_of(progress), activity.read()
    numbers = group_numbers(reading, group)
    oldest = {
        each.topic: each.oldest_unacked_at_ms
        for each in shown.topics
        if each.oldest_unacked_at_ms is not None and access.allows_topic(READS, each.topic)
    }
    topics = sorted(oldest, key=lambda topic: oldest[topic])[:TOPICS_MAX]
    facts = GroupFacts(
        name=group,
        now_ms=SystemClock().wall_ms(),
        pause=render.group_of(progress.answers[0].value.group).paused,
        numbers=numbers,
        locks=[each for each in shown.locks if access.allows_topic(READS, each.topic)],
        silent=silent,
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


async def _silent(cluster: Brokers, group: str, owner: int) -> tuple[list[Holder], list[str]]:
    """Return silent consumers with their messages in flight, and the unreachable processes."""
    asked = pb.ListClientsRequest(group=group, clients_max=CONSUMERS_MAX, owner=owner)
    page = await list_clients(cluster, asked)
    silent = [
        (id_, one.newest) for id_, one in page.clients if one.states[0][1].silent_ms > SILENT_MS
    ]
    holders, lacking = [], set(page.unreachable)
    for client_id, client in silent[:SILENT_MAX]:
        held = await cluster.call_all(calls.GET_HELD, pb.GetHeldRequest(client_id=client_id))
        lacking.update(held.unreachable)
        in_flight = sum(reply.in_flight_count for _, reply in held.answers)
        holders.append(Holder(client_id=client_id, silent_ms=client.silent_ms, in_flight=in_flight))
    return holders, sorted(lacking)


async def _retention(cluster: Brokers, topics: Iterable[str]) -> dict[str, int]:
    """Return the retention in effect by topic; a topic without an answer is left out."""

    async def of(topic: str) -> tuple[str, int | None]:
        try:
            asked = pb.GetTopicStatusRequest(name=topic)
            status = (await cluster.call_home(calls.GET_TOPIC_STATUS, asked)).answers[0].value
        except ServiceError:
            return topic, None
        return topic, status.retention_ms if status.HasField("retention_ms") else None

    found = await asyncio.gather(*(of(topic) for topic in topics))
    return {topic: kept_ms for topic, kept_ms in found if kept_ms is not None}
