"""Topics: list, create, change, show and delete them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.configuration import read_configuration
from tidemill.admin.http.paging import PAGE_SIZE, PageSize, PageToken, page_of
from tidemill.admin.json import render
from tidemill.admin.json.topics import (
    TopicDeletionView,
    TopicDetailsView,
    TopicPageView,
    TopicPutView,
    TopicSettings,
)
from tidemill.admin.routes import Caller, Cluster, DryRun, json_of
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["topics"])

Name = Annotated[str, Path(description="Name of the topic.")]
IncludeSystem = Annotated[
    bool, Query(alias="includeSystem", description="Also retry and dead-letter topics.")
]


@router.get("/topics", response_model_exclude_none=True)
async def list_topics(
    cluster: Cluster,
    page_size: PageSize = PAGE_SIZE,
    page_token: PageToken = None,
    include_system: IncludeSystem = False,
) -> TopicPageView:
    """List topics, ordered by name.

    While the home is unreachable, the other broker groups answer with their copies.
    """
    found = await read_configuration(cluster, with_system=include_system)
    page, token = page_of(found.topics, page_size, page_token)
    return TopicPageView(
        topics=[render.topic_of(topic) for topic in page],
        next_page_token=token,
        unreachable=found.unreachable,
    )


@router.put("/topics/{topic}", response_model_exclude_none=True)
async def put_topic(
    topic: Name, settings: TopicSettings, cluster: Cluster, caller: Caller
) -> TopicPutView:
    """Create or change a topic.

    Without `force`, the type of a topic with messages or readers does not change.
    """
    kind = settings.message_type
    request = pb.PutTopicRequest(
        name=topic,
        type=pb.TopicType.Value(f"TOPIC_TYPE_{kind.value}") if kind else pb.TOPIC_TYPE_UNSPECIFIED,
        queues=settings.queues or 0,
        delivery_spread_ms=settings.delivery_spread_ms,
        force=settings.force,
        requested_by=caller,
    )
    reply = await (await cluster.home()).call(calls.PUT_TOPIC, request)
    put = TopicPutView(
        is_new=not reply.HasField("before"), **render.topic_of(reply.topic).model_dump()
    )
    if not put.is_new and reply.before != reply.topic:
        put.before = render.topic_of(reply.before)
    return put


@router.get("/topics/{topic}", response_model_exclude_none=True)
async def get_topic(topic: Name, cluster: Cluster) -> TopicDetailsView:
    """Show a topic and its queues at all broker groups."""
    found = await cluster.call_all(calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name=topic))
    return TopicDetailsView(
        **render.topic_of(found.answers[0].value.topic).model_dump(),
        queue_status=[
            render.queue_of(queue, broker)
            for broker, status in found.answers
            for queue in status.queues
        ],
        unreachable=found.unreachable or None,
    )


@router.delete(
    "/topics/{topic}",
    status_code=HTTPStatus.NO_CONTENT,
    response_model=None,
    responses={200: {"description": "Result of a dry run.", "model": TopicDeletionView}},
)
async def delete_topic(
    topic: Name, cluster: Cluster, caller: Caller, dry_run: DryRun = False
) -> Response | None:
    """Delete a topic with its messages.

    The home deletes it first, and the other broker groups as soon as the home reaches them. Each
    broker group has its own dead-letter topics: these are deleted at all broker groups, or at none
    while one is unreachable.
    """
    request = pb.DeleteTopicRequest(name=topic, dry_run=dry_run, requested_by=caller)
    if not dry_run and topic.startswith(DEAD_LETTER_TOPIC_PREFIX):
        await cluster.change_all(
            calls.DELETE_TOPIC,
            dry_run=pb.DeleteTopicRequest(name=topic, dry_run=True, requested_by=caller),
            request=request,
        )
        return None
    if not dry_run:
        await (await cluster.home()).call(calls.DELETE_TOPIC, request)
        return None
    planned = await cluster.call_all(calls.DELETE_TOPIC, request)
    replies = [reply for _, reply in planned.answers]
    deletion = TopicDeletionView(
        dry_run=True,
        by=caller,
        topic=render.topic_of(replies[0].topic),
        messages=sum(reply.messages for reply in replies),
        groups=sorted({group for reply in replies for group in reply.groups}),
        unreachable=planned.unreachable or None,
    )
    return json_of(deletion)
