"""The methods of PipelineSource, one row each, and those that only forward pages of brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from tidemill.common.errors import ServiceError
from tidemill.message import limits
from tidemill.message.namespaces import full_name
from tidemill.proxy.server.broker_pages import BrokerPages
from tidemill.proxy.server.broker_queue import find_broker
from tidemill.proxy.server.pipeline_events import EventPageRelay
from tidemill.proxy.server.pipeline_source import PipelineMethod
from tidemill.proxy.server.range_reader import RangeReader
from tidemill.security.acl import Action, ResourceType, group_resource
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

if TYPE_CHECKING:
    from tidemill.proxy.cluster.broker_calls import BrokerCalls
    from tidemill.proxy.cluster.cluster import BrokerCluster
    from tidemill.proxy.cluster.linked_group import LinkedGroup
    from tidemill.proxy.quotas.deliveries import DeliveryQuotas
    from tidemill.proxy.server.call import Call
    from tidemill.proxy.server.pull_pages import PullPages

# Per page: some thousands of items in slices between the broker's other work.
PAGE_TIMEOUT_MS: Final = 10_000
# Longest delay of GetQueues by a broker that hangs.
QUEUES_TIMEOUT_MS: Final = 3_000
# The same, including the wait for a turn at that broker.
QUEUES_ANSWER_MS: Final = 10_000


def pipeline_table(
    cluster: BrokerCluster,
    calls: BrokerCalls,
    pull_pages: PullPages,
    quotas: DeliveryQuotas | None = None,
) -> Mapping[str, PipelineMethod]:
    """Return the methods by name. Without `quotas`, reads have none."""
    pages = ListingPages(cluster, calls)
    queues = ClusterQueues(cluster, calls)
    events = EventPageRelay(cluster, calls)
    return {
        "ReadEvents": PipelineMethod(
            pb.ReadEventsRequest, events.read_events, _check_listed_topics
        ),
        "GetQueues": PipelineMethod(pb.GetQueuesRequest, queues.get_queues, _check_queues),
        "ReadMessages": PipelineMethod(
            pb.ReadMessagesRequest,
            RangeReader(cluster, pull_pages, quotas).read_messages,
            _check_messages,
        ),
        "ListPending": PipelineMethod(
            pb.ListPendingRequest,
            pages.method("ListPending", pb.ListPendingReply, "topics"),
            _check_listed_topics,
        ),
        "ListInFlight": PipelineMethod(
            pb.ListInFlightRequest,
            pages.method("ListInFlight", pb.ListInFlightReply, "groups"),
            _check_listed_groups,
        ),
        "ListProgress": PipelineMethod(
            pb.ListProgressRequest,
            pages.method("ListProgress", pb.ListProgressReply, "groups"),
            _check_listed_groups,
        ),
    }


def _check_listed_topics(call: Call, request: Any) -> None:
    """Check the topics of a request. An empty list means all."""
    limits.NAMES.check_count(len(request.topics))
    if not request.topics:
        _check_all_topics(call)
    for topic in request.topics:
        call.require_topic(topic, Action.GET)


def _check_listed_groups(call: Call, request: Any) -> None:
    """Check the consumer groups of a request. An empty list means all."""
    limits.NAMES.check_count(len(request.groups))
    if not request.groups:
        call.require_all(ResourceType.GROUP, Action.GET)
    for group in request.groups:
        call.require(group_resource(group), Action.GET)


def _check_queues(call: Call, request: pb.GetQueuesRequest) -> None:
    """Check the topics of a request. Without them it is about the broker groups alone."""
    limits.NAMES.check_count(len(request.topics))
    if request.topic_pattern:
        _check_all_topics(call)
    if request.with_groups:
        call.require_all(ResourceType.GROUP, Action.GET)
    for topic in request.topics:
        call.require_topic(topic, Action.GET)


def _check_all_topics(call: Call) -> None:
    """Check the right on all topics, with the dead-letter topics of all consumer groups."""
    call.require_all(ResourceType.TOPIC, Action.GET)
    call.require_all(ResourceType.GROUP, Action.GET)


def _check_messages(call: Call, request: pb.ReadMessagesRequest) -> None:
    topic = full_name(request.namespace, request.topic)
    call.require_topic(topic, Action.GET)
    call.require_topic(topic, Action.SUB)
    if request.quota_group:
        group = full_name(request.namespace, request.quota_group)
        call.require(group_resource(group), Action.SUB)


class ListingPages:
    """Methods that forward the pages of one broker."""

    def __init__(self, cluster: BrokerCluster, calls: BrokerCalls) -> None:
        self._cluster = cluster
        self._pages = BrokerPages(calls)

    def method(self, name: str, reply_type: type[Any], named: Literal["topics", "groups"]) -> Any:
        """Return the handler of a method whose request has a broker, a list of names and a cursor.

        `named`: the field with the names.
        """

        async def answer(request: Any, address: str) -> AsyncGenerator[bytes, None]:
            names = getattr(request, named)
            limits.NAMES.check_count(len(names))
            names[:] = dict.fromkeys(names)
            broker = find_broker(self._cluster, request.broker)
            while True:
                page = await self._pages.ask(
                    broker, name, request, reader=address, timeout_ms=PAGE_TIMEOUT_MS
                )
                yield page
                reply = reply_type.FromString(page)
                request.cursor = reply.cursor
                if not request.cursor:
                    return
                if reply.missing:
                    # Later pages need not look up missing names again. An empty list means all.
                    missing = frozenset(reply.missing)
                    names[:] = [each for each in names if each not in missing]
                    if not names:
                        return

        return answer


class ClusterQueues:
    """The method GetQueues, over all broker groups, including unreachable ones."""

    def __init__(
        self, cluster: BrokerCluster, calls: BrokerCalls, *, answer_ms: int = QUEUES_ANSWER_MS
    ) -> None:
        self._cluster = cluster
        # Separate from listings, which may wait longer for a broker that hangs.
        self._pages = BrokerPages(calls)
        self._answer_ms = answer_ms

    async def get_queues(
        self, request: pb.GetQueuesRequest, address: str
    ) -> AsyncGenerator[pb.GetQueuesReply, None]:
        """Yield the first page of every broker at once, then the other pages broker by broker."""
        limits.NAMES.check_count(len(request.topics))
        limits.TOPIC_PATTERN.check_text(request.topic_pattern)
        brokers = list(self._cluster.brokers)
        first = await asyncio.gather(*[self._ask(broker, request, address) for broker in brokers])
        yield pb.GetQueuesReply(groups=first)
        for broker, answer in zip(brokers, first, strict=True):
            request.cursor = answer.cursor
            while request.cursor:
                page = await self._ask(broker, request, address)
                yield pb.GetQueuesReply(groups=[page])
                request.cursor = page.cursor
        names = {broker.name for broker in brokers}
        unreachable = [peer for peer in self._cluster.peers() if peer.name not in names]
        if unreachable:
            yield pb.GetQueuesReply(
                groups=[
                    pb.BrokerGroupQueues(
                        broker=peer.name or peer.address,
                        error=peer.reason or "the broker group has not reported yet",
                    )
                    for peer in unreachable
                ]
            )

    async def _ask(
        self, broker: LinkedGroup, request: pb.GetQueuesRequest, address: str
    ) -> pb.BrokerGroupQueues:
        try:
            async with asyncio.timeout(self._answer_ms / 1000):
                page = await self._pages.ask(
                    broker, "GetQueues", request, reader=address, timeout_ms=QUEUES_TIMEOUT_MS
                )
        except TimeoutError:
            return pb.BrokerGroupQueues(
                broker=broker.name,
                error="BrokerTimeout: no turn in time, because other readers wait for this broker",
            )
        except ServiceError as error:
            return pb.BrokerGroupQueues(
                broker=broker.name, error=f"{type(error).__name__}: {error.message}"
            )
        return pb.BrokerGroupQueues.FromString(page)
