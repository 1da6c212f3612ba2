"""PipelineSource's ReadMessages: a range of a queue, page by page (ADR 0046).

If a read names a consumer group, each page waits for the permits of the group's dispatch quotas
(ADR 0084). Meanwhile, the client gets replies without messages, so that it does not take the wait
for an outage.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.common.errors import BadRequest, IllegalOffset, Overloaded
from tidemill.message.namespaces import full_name
from tidemill.message.resource_names import check_topic
from tidemill.message.resources import ResourceName
from tidemill.proxy.filters import wanted_by
from tidemill.proxy.message_codec import OF_READ, encode_read
from tidemill.proxy.server.broker_queue import PULL_MAX, BrokerQueue, find_broker, find_queue
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

if TYPE_CHECKING:
    from tidemill.proxy.cluster.cluster import BrokerCluster
    from tidemill.proxy.quotas.deliveries import DeliveryPermits, DeliveryQuotas
    from tidemill.proxy.server.pull_pages import PullPage, PullPages

PAGE_TIMEOUT_MS: Final = 10_000
# Log bytes. Other calls wait at most for one page. Pages of a megabyte were not faster for the
# reader, but raised the P99 of others by half.
PAGE_BYTES: Final = 128 << 10
# Between two replies to a read that a quota holds: shorter than the deadlines of clients.
HELD_REPLY_MS: Final = 500


class _Page(NamedTuple):
    """A page that the broker has sent, and the permits of its messages."""

    page: PullPage
    permits: DeliveryPermits | None  # None: no quota limits the read


class RangeReader:
    """The method ReadMessages."""

    def __init__(
        self,
        cluster: BrokerCluster,
        pages: PullPages,
        quotas: DeliveryQuotas | None = None,
        *,
        held_reply_ms: int = HELD_REPLY_MS,
    ) -> None:
        """Without `quotas`, reads have none."""
        self._cluster = cluster
        self._pages = pages
        self._quotas = quotas
        self._held_reply_ms = held_reply_ms

    async def read_messages(
        self, request: pb.ReadMessagesRequest, address: str
    ) -> AsyncGenerator[bytes, None]:
        """Yield pages of a range. Read the next page while the client gets this one.

        All ranges of one address share one place in the rotation.
        """
        topic = ResourceName(full_name(request.namespace, request.topic), request.namespace)
        queue = _queue_of(self._cluster, request, topic.full)
        if request.from_offset < 0:
            raise IllegalOffset(f"the offset must be 0 or more, not {request.from_offset}")
        pull = link_pb2.PullRequest(
            topic_id=queue.topic_id,
            queue_id=queue.queue_id,
            offset=request.from_offset,
            max_messages=PULL_MAX,
            max_bytes=PAGE_BYTES,
            tags=wanted_by(v2.FilterExpression(type=v2.TAG, expression=request.filter)).tags,
            without_bodies=request.without_bodies,
            until_offset=max(request.until_offset, 0),
            log_id=request.log_id,
            topic=topic.full if request.topic_id else "",
        )
        group = request.quota_group and self._find_group(request)

        def ask(wait_ms: int) -> asyncio.Task[_Page | None]:
            reading = self._ask(queue, pull, address, topic, group, wait_ms)
            return asyncio.create_task(reading, name="range")

        asking: asyncio.Task[_Page | None] | None = ask(0)
        try:
            while asking is not None:
                found, asking = await asking, None
                if found is None:
                    asking = ask(self._held_reply_ms)
                    yield _held_at(pull.offset)
                    continue
                page = found.page
                gone_from, next_offset = -1, page.next_offset
                # min_offset is as of the end of the page: retention may have deleted messages that
                # are on the page.
                if next_offset == pull.offset < page.min_offset:
                    gone_from, next_offset = pull.offset, page.min_offset
                elif pull.offset > page.end_offset:
                    raise IllegalOffset(
                        f"the queue ends at {page.end_offset}, before {pull.offset}"
                    )
                pull.until_offset = pull.until_offset or page.end_offset
                pull.offset = next_offset
                is_last = (page.is_at_end and gone_from < 0) or next_offset >= pull.until_offset
                if not is_last:
                    asking = ask(0)
                yield encode_read(
                    page.items,
                    next_offset=next_offset,
                    min_offset=page.min_offset,
                    end_offset=page.end_offset,
                    gone_from=gone_from,
                )
                del page, found
        finally:
            if asking is not None:
                _drop(asking)

    def _find_group(self, request: pb.ReadMessagesRequest) -> str:
        """Return the name of the consumer group of the quotas. Raises GroupNotFound."""
        return self._cluster.find_group(full_name(request.namespace, request.quota_group)).name

    async def _ask(
        self,
        queue: BrokerQueue,
        pull: link_pb2.PullRequest,
        address: str,
        topic: ResourceName,
        group: str,
        wait_ms: int,
    ) -> _Page | None:
        """Read a page; return None if its permits have not come within `wait_ms`.

        A page has at most as many messages as there are permits. Raises Overloaded if this process
        stops.
        """
        permits = None
        if group and self._quotas is not None and self._quotas.is_limited(group):
            permits = await self._take(self._quotas, group, pull, wait_ms)
            if permits is None:
                return None
            limited = link_pb2.PullRequest()
            limited.CopyFrom(pull)
            limited.max_messages = permits.messages
            pull = limited
        try:
            page = await self._pages.read(
                queue, pull, reader=address, header=OF_READ, topic=topic, timeout_ms=PAGE_TIMEOUT_MS
            )
        except BaseException:
            if permits is not None:
                permits.give_back()
            raise
        if permits is not None:
            permits.spend(len(page.items), sum(map(len, page.items)))
        return _Page(page, permits)

    async def _take(
        self, quotas: DeliveryQuotas, group: str, pull: link_pb2.PullRequest, wait_ms: int
    ) -> DeliveryPermits | None:
        """Return the permits of a page; None if there are none within `wait_ms`."""
        wanted = PULL_MAX
        if pull.until_offset:
            wanted = min(max(pull.until_offset - pull.offset, 1), PULL_MAX)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_ms / 1_000
        permits = await quotas.take(group, wanted, timeout_ms=wait_ms)
        if permits is None:
            if self._cluster.polls_released.is_set():
                raise Overloaded("this proxy stops; continue the read at another one")
            # It returns sooner if too many reads wait.
            await asyncio.sleep(max(until_s - loop.time(), 0))
        return permits


def _held_at(offset: int) -> bytes:
    """Return the reply to a read that a quota holds."""
    return pb.ReadMessagesReply(next_offset=offset, is_held=True).SerializeToString()


def _drop(asking: asyncio.Task[_Page | None]) -> None:
    """End the read of a page that the client does not get, and return the permits of the page."""
    asking.cancel()
    if not asking.done() or asking.cancelled() or asking.exception() is not None:
        return
    found = asking.result()
    if found is not None and found.permits is not None:
        found.permits.give_back()


def _queue_of(cluster: BrokerCluster, request: pb.ReadMessagesRequest, topic: str) -> BrokerQueue:
    """Return the queue of a request: by the topic's id if it is set, otherwise by name."""
    if not request.topic_id:
        return find_queue(cluster, topic, request.broker, request.queue_id)
    # The id comes from the broker. This proxy may not know the topic yet, so it does not check.
    check_topic(topic)
    if request.queue_id < 0:
        raise BadRequest(f"the queue must be 0 or more, not {request.queue_id}")
    return BrokerQueue(find_broker(cluster, request.broker), request.topic_id, request.queue_id)
