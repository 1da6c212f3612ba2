"""Deliveries: what consumers of a group have, and have not acked."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Final

from fastapi import APIRouter, Path, Query

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerAnswers, BrokerGroupClient
from tidemill.admin.http.paging import PAGE_SIZE, PageSize, PageToken
from tidemill.admin.json.deliveries import (
    BrokerGroupCountView,
    DeliveryPageView,
    DeliveryReleaseRequest,
    DeliveryReleaseView,
)
from tidemill.admin.json.render import delivery_of
from tidemill.admin.messages.delivery_pages import after, merged, place_of
from tidemill.admin.routes import Caller, Cluster, DryRun
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["groups"])

# Of one request, each of up to 1,000 messages a broker group: some seconds in all. Then the answer
# says that there are more, and does not go on by itself: consumers may have got them again.
CALLS_MAX: Final = 32

Name = Annotated[str, Path(description="Name of the consumer group.")]
Topic = Annotated[str, Query(max_length=255, description="Only of this topic, retries included.")]
Queue = Annotated[
    int | None, Query(ge=0, le=2**31, description="Only of this queue of the topic, from 0.")
]
ClientId = Annotated[
    str, Query(alias="clientId", max_length=1024, description="Only what this client has.")
]
MessageId = Annotated[
    str, Query(alias="messageId", max_length=255, description="Only the message with this id.")
]


@router.get("/groups/{group}/deliveries", response_model_exclude_none=True)
async def list_deliveries(
    group: Name,
    cluster: Cluster,
    topic: Topic = "",
    queue: Queue = None,
    client_id: ClientId = "",
    message_id: MessageId = "",
    page_size: PageSize = PAGE_SIZE,
    page_token: PageToken = None,
) -> DeliveryPageView:
    """List the messages that a group has in flight at all broker groups, those out longest first.

    A page that has fewer than were asked for, or none, may still have a `nextPageToken`.
    """
    wanted = pb.DeliveryFilter(
        group=group, topic=topic, queue_id=queue, client_id=client_id, message_id=message_id
    )
    place = None if page_token is None else place_of(page_token)

    def ask(member: BrokerGroupClient) -> Awaitable[pb.GetDeliveriesReply]:
        behind = None if place is None else after(place, member.name)
        return member.client.call(
            calls.GET_DELIVERIES,
            pb.GetDeliveriesRequest(filter=wanted, page_size=page_size, after=behind),
        )

    found = await cluster.ask_all(ask)
    deliveries, token = merged(found.answers, page_size)
    return DeliveryPageView(
        deliveries=[delivery_of(delivery, broker) for broker, delivery in deliveries],
        next_page_token=token,
        unreachable=found.unreachable or None,
    )


@router.post("/groups/{group}/deliveries:release", response_model_exclude_none=True)
async def release_deliveries(
    group: Name,
    release: DeliveryReleaseRequest,
    cluster: Cluster,
    caller: Caller,
    dry_run: DryRun = False,
) -> DeliveryReleaseView:
    """Give messages back that a group has in flight, at once: consumers that poll get them.

    The delivery counts as an attempt, as when its time is up; the receipt handles of what is given
    back are refused from then on. Each broker writes a line to its log for up to 1,000 messages:
    which, how many, and who asked. What is popped meanwhile stays where it is. Where the answer
    says `more`, ask again.
    """
    is_dry = dry_run or release.dry_run
    wanted = pb.DeliveryFilter(
        group=group,
        topic=release.topic or "",
        queue_id=release.queue,
        client_id=release.client_id or "",
        message_id=release.message_id or "",
    )
    # Of those that have more: where they go on.
    left: dict[str, pb.ReleaseDeliveriesReply] = {}
    counts: dict[str, int] = {}
    unreachable: set[str] = set()

    async def ask(member: BrokerGroupClient) -> pb.ReleaseDeliveriesReply:
        if counts and member.name not in left:
            return pb.ReleaseDeliveriesReply()
        request = pb.ReleaseDeliveriesRequest(filter=wanted, dry_run=is_dry, asked_by=caller)
        if (before := left.get(member.name)) is not None:
            request.after.CopyFrom(before.end)
            request.before_id = before.before_id
        return await member.client.call(calls.RELEASE_DELIVERIES, request)

    for _ in range(CALLS_MAX):
        asked: BrokerAnswers[pb.ReleaseDeliveriesReply] = await cluster.ask_all(ask)
        unreachable.update(asked.unreachable)
        left = {broker: reply for broker, reply in asked.answers if reply.HasField("end")}
        for broker, reply in asked.answers:
            counts[broker] = counts.get(broker, 0) + reply.count
        if not left:
            break
    return DeliveryReleaseView(
        dry_run=is_dry,
        by=caller,
        group=group,
        messages=sum(counts.values()),
        brokers=[
            BrokerGroupCountView(broker=broker, messages=count) for broker, count in counts.items()
        ],
        more=bool(left),
        unreachable=sorted(unreachable) or None,
    )
