"""Topics."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from tidemill.admin import render, schemas
from tidemill.admin.paging import PAGE_SIZE, PageSize, PageToken, page_of
from tidemill.admin.routes import Broker, Caller, DryRun, json_of
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["topics"])

Name = Annotated[str, Path(description="Name of the topic.")]
IncludeSystem = Annotated[
    bool, Query(alias="includeSystem", description="Also retry and dead-letter topics.")
]


@router.get("/topics", response_model_exclude_none=True)
async def list_topics(
    broker: Broker,
    page_size: PageSize = PAGE_SIZE,
    page_token: PageToken = None,
    include_system: IncludeSystem = False,
) -> schemas.TopicPage:
    """List topics by name."""
    config = await broker.config()
    topics = [topic for topic in config.topics if include_system or not topic.is_system]
    page, token = page_of(topics, page_size, page_token)
    return schemas.TopicPage(
        topics=[render.topic_of(topic) for topic in page], next_page_token=token
    )


@router.put("/topics/{topic}", response_model_exclude_none=True)
async def put_topic(
    topic: Name, settings: schemas.TopicSettings, broker: Broker, caller: Caller
) -> schemas.TopicPut:
    """Create a topic, or change one.

    The type of a topic that holds messages, or that groups read, is changed with `force` only.
    """
    kind = settings.message_type
    request = pb.PutTopicRequest(
        name=topic,
        type=pb.TopicType.Value(kind.value) if kind else pb.TOPIC_TYPE_UNSPECIFIED,
        queues=settings.queues or 0,
        delivery_spread_ms=settings.delivery_spread_ms,
        force=settings.force,
        requested_by=caller,
    )
    reply = await broker.put_topic(request)
    put = schemas.TopicPut.model_validate(render.topic_of(reply.topic).model_dump())
    if reply.HasField("before") and reply.before != reply.topic:
        put.before = render.topic_of(reply.before)
    return put


@router.get("/topics/{topic}", response_model_exclude_none=True)
async def get_topic(topic: Name, broker: Broker) -> schemas.TopicDetails:
    """Show a topic and what its queues hold."""
    status = await broker.topic_status(topic)
    return schemas.TopicDetails(
        **render.topic_of(status.topic).model_dump(),
        queue_status=[render.queue_of(queue) for queue in status.queues],
    )


@router.delete(
    "/topics/{topic}",
    status_code=HTTPStatus.NO_CONTENT,
    response_model=None,
    responses={200: {"description": "The dry run.", "model": schemas.TopicDeletion}},
)
async def delete_topic(
    topic: Name, broker: Broker, caller: Caller, dry_run: DryRun = False
) -> Response | None:
    """Delete a topic with its messages."""
    request = pb.DeleteRequest(name=topic, dry_run=dry_run, requested_by=caller)
    reply = await broker.delete_topic(request)
    if not dry_run:
        return None
    deletion = schemas.TopicDeletion(
        dry_run=True,
        by=caller,
        topic=render.topic_of(reply.topic),
        messages=reply.messages,
        groups=list(reply.groups),
    )
    return json_of(deletion)
