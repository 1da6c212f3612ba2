"""Deliveries in flight of a consumer group: list and release them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Final

from fastapi import APIRouter, Query

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerAnswers, BrokerGroupClient
from tidemill.admin.http.paging import PAGE_SIZE, PageSize
from tidemill.admin.json.deliveries import (
    BrokerGroupCountView,
    DeliveryPageView,
    DeliveryReleaseRequest,
    DeliveryReleaseView,
)
from tidemill.admin.json.render import delivery_of
from tidemill.admin.messages.delivery_pages import Token, cursor_of, merged, position_after
from tidemill.admin.routes import Caller, ChangeAuthor, Cluster, DryRun, GroupName
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["groups"])

# Rounds of calls per request, each for up to 1,000 messages per broker group: some seconds. If more
# deliveries remain, the answer has `more`. The caller decides, since consumers may have received
# the messages again.
CALLS_MAX: Final = 32

Topic = Annotated[str, Query(max_length=255, description="Only of this topic, retries included.")]
Queue = Annotated[
    int | None, Query(ge=0, le=2**31, description="Only of the queue with this number, from 0.")
]
ClientId = Annotated[
    str, Query(alias="clientId", max_length=1024, description="Only messages of this client.")
]
MessageId = Annotated[
    str, Query(alias="messageId", max_length=255, description="Only the message with this id.")
]


@router.get("/groups/{group}/deliveries", response_model_exclude_none=True)
async def list_deliveries(
    group: GroupName,
    cluster: Cluster,
    begin: Token,
    topic: Topic = "",
    queue: Queue = None,
    client_id: ClientId = "",
    message_id: MessageId = "",
    page_size: PageSize = PAGE_SIZE,
) -> DeliveryPageView:
    """List the messages in flight of a group at all broker groups, the oldest delivery first.

    A page with fewer items than requested, even an empty page, may have a `nextPageToken`.
    """
    delivery_filter = pb.DeliveryFilter(
        group=group, topic=topic, queue_id=queue, client_id=client_id, message_id=message_id
    )
    cursor = cursor_of(begin.after) if begin.after else None

    def ask(member: BrokerGroupClient) -> Awaitable[pb.GetDeliveriesReply]:
        position = None if cursor is None else position_after(cursor, member.name)
        return member.client.call(
            calls.GET_DELIVERIES,
            pb.GetDeliveriesRequest(filter=delivery_filter, page_size=page_size, after=position),
        )

    found = await cluster.ask_all(ask)
    deliveries, token = merged(found.answers, page_size)
    return DeliveryPageView(
        deliveries=[delivery_of(delivery, broker) for broker, delivery in deliveries],
        next_page_token=begin.next(token),
        unreachable=found.unreachable or None,
    )


@router.post("/groups/{group}/deliveries:release", response_model_exclude_none=True)
async def release_deliveries(
    group: GroupName,
    release: DeliveryReleaseRequest,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> DeliveryReleaseView:
    """Make messages in flight of a group visible again at once, for the next consumer.

    The delivery counts as an attempt, as at the end of the invisible duration. The broker then
    rejects the receipt handles of these deliveries. Each broker logs a line per 1,000 messages with
    the filter, the count and the caller. Messages that are popped during the call stay in flight.
    If the answer has `more`, repeat the request.
    """
    is_dry = dry_run or release.dry_run
    delivery_filter = pb.DeliveryFilter(
        group=group,
        topic=release.topic or "",
        queue_id=release.queue,
        client_id=release.client_id or "",
        message_id=release.message_id or "",
    )
    # The last reply of each broker group with remaining deliveries.
    incomplete: dict[str, pb.ReleaseDeliveriesReply] = {}
    counts: dict[str, int] = {}
    unreachable: set[str] = set()

    async def ask(member: BrokerGroupClient) -> pb.ReleaseDeliveriesReply:
        if counts and member.name not in incomplete:
            return pb.ReleaseDeliveriesReply()
        request = pb.ReleaseDeliveriesRequest(
            filter=delivery_filter, dry_run=is_dry, asked_by=caller
        )
        if not counts.get(member.name):
            # The first call that releases something is recorded, for the whole change.
            request.audit.CopyFrom(author.of(f"Group:{group}"))
        if (before := incomplete.get(member.name)) is not None:
            request.after.CopyFrom(before.end)
            request.before_id = before.before_id
        return await member.client.call(calls.RELEASE_DELIVERIES, request)

    for _ in range(CALLS_MAX):
        found: BrokerAnswers[pb.ReleaseDeliveriesReply] = await cluster.ask_all(ask)
        unreachable.update(found.unreachable)
        incomplete = {broker: reply for broker, reply in found.answers if reply.HasField("end")}
        for broker, reply in found.answers:
            counts[broker] = counts.get(broker, 0) + reply.count
        if not incomplete:
            break
    return DeliveryReleaseView(
        dry_run=is_dry,
        by=caller,
        group=group,
        messages=sum(counts.values()),
        brokers=[
            BrokerGroupCountView(broker=broker, messages=count) for broker, count in counts.items()
        ],
        more=bool(incomplete),
        unreachable=sorted(unreachable) or None,
    )
