"""Topics."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query

from tidemill.admin import schemas
from tidemill.admin.paging import PAGE_SIZE, PageSize, PageToken, page_of
from tidemill.admin.routes import Broker
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["topics"])

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
        topics=[schemas.topic_of(topic) for topic in page], next_page_token=token
    )


@router.put("/topics/{topic}", response_model_exclude_none=True)
async def put_topic(topic: str, settings: schemas.TopicSettings, broker: Broker) -> schemas.Topic:
    """Create a topic, or change one."""
    kind = settings.message_type
    request = pb.PutTopicRequest(
        name=topic,
        type=pb.TopicType.Value(kind.value) if kind else pb.TOPIC_TYPE_UNSPECIFIED,
        queues=settings.queues or 0,
        delivery_spread_ms=settings.delivery_spread_ms,
    )
    return schemas.topic_of(await broker.put_topic(request))


@router.get("/topics/{topic}", response_model_exclude_none=True)
async def get_topic(topic: str, broker: Broker) -> schemas.TopicDetails:
    """Show a topic and what its queues hold."""
    status = await broker.topic_status(topic)
    return schemas.TopicDetails(
        **schemas.topic_of(status.topic).model_dump(),
        queue_status=[schemas.queue_of(queue) for queue in status.queues],
    )


@router.delete("/topics/{topic}", status_code=HTTPStatus.NO_CONTENT)
async def delete_topic(topic: str, broker: Broker) -> None:
    """Delete a topic with its messages."""
    await broker.delete_topic(topic)
