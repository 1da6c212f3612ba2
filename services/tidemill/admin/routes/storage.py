"""Storage: what holds the space of the disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import APIRouter

from tidemill.admin.activity.disks import DiskForecast
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.http.paging import PAGE_SIZE, NameCursor, PageSize
from tidemill.admin.json.storage import (
    BrokerGroupStorageView,
    DerivedBytesView,
    LogBytesView,
    StateFloorView,
    StorageView,
    TopicAtBrokerView,
    TopicStorageView,
)
from tidemill.admin.routes import Access, Activity, Cluster
from tidemill.common.sizes import size_text
from tidemill.common.times import duration_text
from tidemill.security.acl import Action
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["storage"])


@router.get("/storage", response_model_exclude_none=True)
async def get_storage(
    cluster: Cluster,
    access: Access,
    activity: Activity,
    cursor: NameCursor,
    page_size: PageSize = PAGE_SIZE,
) -> StorageView:
    """Show the disks and logs of all broker groups, and the space that topics hold.

    Each page has all broker groups. The counts are some seconds old.
    """
    shown: list[TopicStorageView] = []
    token: str | None = cursor.after
    # A page that ends at a hidden topic would tell its name.
    while True:
        request = pb.GetStorageRequest(after_topic=token or "", topics_max=page_size)
        found = await cluster.call_all(calls.GET_STORAGE, request)
        topics, token = page_of_topics(found.answers, page_size)
        shown += [topic for topic in topics if access.allows_topic(Action.GET, topic.name)]
        if token is None or len(shown) > page_size or not access.is_limited:
            break
    if len(shown) > page_size:
        shown = shown[:page_size]
        token = shown[-1].name
    return StorageView(
        broker_groups=[
            _broker_group(broker, reply, activity.disk_forecast(broker))
            for broker, reply in found.answers
        ],
        topics=shown,
        next_page_token=cursor.next(token),
        unreachable=found.unreachable or None,
    )


def page_of_topics(
    answers: Sequence[BrokerAnswer[pb.GetStorageReply]], size: int
) -> tuple[list[TopicStorageView], str | None]:
    """Return a page of the topics of all broker groups, and the name of the last one or None."""
    topics: dict[str, list[BrokerAnswer[pb.TopicStorage]]] = {}
    for broker, reply in answers:
        for topic in reply.topics:
            topics.setdefault(topic.name, []).append(BrokerAnswer(broker, topic))
    # Behind the end of an incomplete answer, other topics are unknown.
    end = min((reply.last_topic for _, reply in answers if reply.last_topic), default=None)
    known = sorted(name for name in topics if end is None or name <= end)
    page = known[:size]
    token = page[-1] if len(page) < len(known) else end
    return [_topic(name, topics[name]) for name in page], token


def _broker_group(
    broker: str, reply: pb.GetStorageReply, forecast: DiskForecast
) -> BrokerGroupStorageView:
    log = reply.log
    return BrokerGroupStorageView(
        broker=broker,
        is_full=reply.is_full,
        free_bytes=reply.free_bytes,
        total_bytes=reply.total_bytes,
        reserve_bytes=reply.reserve_bytes,
        full_in_ms=forecast.full_in_ms,
        full_in_unknown=forecast.unknown or None,
        log=LogBytesView(
            live=log.live, dead=log.dead, stub=log.stub, control=log.control, pinned=log.pinned
        )
        if reply.HasField("log")
        else None,
        derived_bytes=DerivedBytesView(
            queues=reply.derived_bytes.queues, index=reply.derived_bytes.index
        ),
        state_floor=StateFloorView(
            offset=reply.floor_offset,
            stored_at_ms=reply.floor_stored_at_ms if reply.HasField("floor_stored_at_ms") else None,
        ),
    )


def _topic(name: str, found: Sequence[BrokerAnswer[pb.TopicStorage]]) -> TopicStorageView:
    is_counted = all(topic.HasField("live_bytes") for _, topic in found)

    def total(count: Callable[[pb.TopicStorage], int]) -> int | None:
        return sum(count(topic) for _, topic in found) if is_counted else None

    return TopicStorageView(
        name=name,
        bytes=total(lambda topic: topic.log_bytes),
        live_bytes=total(lambda topic: topic.live_bytes),
        freed_by_deletion_bytes=total(lambda topic: topic.freed_by_deletion_bytes),
        broker_groups=[_at_broker(broker, topic) for broker, topic in found],
    )


def _at_broker(broker: str, topic: pb.TopicStorage) -> TopicAtBrokerView:
    is_counted = topic.HasField("live_bytes")
    return TopicAtBrokerView(
        broker=broker,
        bytes=topic.log_bytes if is_counted else None,
        live_bytes=topic.live_bytes if is_counted else None,
        kept_by=_kept_by(topic) if topic.live_bytes else None,
    )


def _kept_by(topic: pb.TopicStorage) -> str:
    """Return the rules that keep the live messages of a topic, in the words of its settings."""
    if topic.waits_for_archive:
        return "archive gate"
    kept = topic.retention
    parts = ["for ever" if kept.ms < 0 else f"retention.ms {duration_text(kept.ms)}"]
    if kept.HasField("bytes"):
        parts.append(f"retention.bytes {size_text(kept.bytes)}")
    if kept.frees_acked:
        parts.append("retention.acked free")
    return ", ".join(parts)
