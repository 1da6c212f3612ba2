"""The brokers behind this proxy: a name becomes a topic or group, and whom to ask about it.

What all broker groups share, topics and consumer groups above all, is asked of the cluster. What
one of them has, its link, its name and its signers, is asked of the `BrokerGroup` that the cluster
answers with. Methods name neither a link nor a configuration of their own, so that another broker
group is another entry here.

A topic or group means the home's: its name, and its incarnation. Each broker has ids of its own for
it, which are asked of the `BrokerGroup` (ADR 0025).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

from tidemill.common.errors import (
    BadRequest,
    BrokerTimeout,
    GroupNotFound,
    InvalidReceiptHandle,
    TopicNotFound,
)
from tidemill.common.readiness import Peer
from tidemill.message import limits
from tidemill.message.queue_choice import RoundRobin, queue_of_group
from tidemill.message.resource_names import (
    DEAD_LETTER_TOPIC_PREFIX,
    RETRY_TOPIC_PREFIX,
    check_group,
    check_topic,
)
from tidemill.proxy.link.commands import ENSURE
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.message.recall_handle import Recall, RecallSigner
    from tidemill.message.receipt_handle import HandleFields, HandleOpener, HandleSigner
    from tidemill.proxy.link import BrokerLink
    from tidemill.proxy.server.call import Call
    from tidemill.proxy.settings import ProxySettings

# A client may name a deadline of years; what waits for one would stay for as long. Long polls have
# a time of their own.
TIMEOUT_MAX_MS = 60_000


class Ids(NamedTuple):
    """Of a consumer group and a topic, at one broker."""

    group_id: int
    topic_id: int


@final
class BrokerGroup:
    """One broker group: its link, and what it has told of itself."""

    __slots__ = ("link",)

    def __init__(self, link: BrokerLink) -> None:
        self.link = link

    @property
    def name(self) -> str:
        """The name under which routes show it."""
        return self.link.configuration.broker_name

    @property
    def signer(self) -> HandleSigner:
        """Signer of its receipt handles."""
        return self.link.configuration.signer

    @property
    def recall_signer(self) -> RecallSigner:
        """Signer of its recall handles."""
        return self.link.configuration.recall_signer

    def find_topic(self, topic: link_pb2.TopicConfig) -> link_pb2.TopicConfig | None:
        """Return what it has of a topic of the home's; None where it has not this incarnation."""
        own = self.link.configuration.topics.get(topic.name)
        return own if own is not None and _is_same(own, topic) else None

    def find_ids(self, group: link_pb2.GroupConfig, topic: link_pb2.TopicConfig) -> Ids | None:
        """Return under which ids it has both; None where it has not these incarnations."""
        own_topic = self.find_topic(topic)
        own_group = self.link.configuration.groups.get(group.name)
        if own_topic is None or own_group is None or not _is_same(own_group, group):
            return None
        return Ids(own_group.id, own_topic.id)


def _is_same(
    own: link_pb2.TopicConfig | link_pb2.GroupConfig,
    homes: link_pb2.TopicConfig | link_pb2.GroupConfig,
) -> bool:
    """Whether a broker's own topic or group is of the incarnation that the home has."""
    if isinstance(own, link_pb2.TopicConfig) and own.is_system:
        return True  # Each broker makes its own, and none knows of the others'.
    return (own.home_id or own.id) == homes.id


class Place(NamedTuple):
    """Who stores a message, and where; the topic by the id that it has there."""

    broker: BrokerGroup
    topic_id: int
    queue_id: int


@final
class Deliveries:
    """Opens the receipt handles of one request, mostly of few deliveries."""

    def __init__(self, openers: Sequence[tuple[BrokerGroup, HandleOpener]]) -> None:
        self._openers = openers

    def open(self, handle: str) -> tuple[BrokerGroup, HandleFields]:
        """Return which delivery of whom `handle` names. Raises InvalidReceiptHandle."""
        limits.RECEIPT_HANDLE.check_text(handle)
        for broker, opener in self._openers:
            try:
                return broker, opener.open(handle)
            except InvalidReceiptHandle as error:
                refused = error
        raise refused


@final
class Cluster:
    """The broker groups behind this proxy, and what they have in common."""

    def __init__(self, links: Sequence[BrokerLink], settings: ProxySettings) -> None:
        self.brokers = [BrokerGroup(link) for link in links]
        # Of topics, groups and the list of broker groups; the others have them from it.
        self.home = self.brokers[0]
        self._configuration = links[0].configuration
        self._queues = RoundRobin()
        self._request_timeout_ms = settings.request_timeout_ms
        self._reserve_ms = settings.deadline_reserve_ms

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the links up until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(broker.link.run(), name="broker link") for broker in self.brokers
            ]
            try:
                yield
            finally:
                for task in running:
                    task.cancel()

    async def configured(self) -> None:
        """Wait until every broker group has told its configuration; nothing is served before."""
        for broker in self.brokers:
            await broker.link.configured.wait()

    def peers(self) -> list[Peer]:
        """Return each broker group, and whether it can be reached."""
        found = []
        for broker in self.brokers:
            word, since_s, reason = broker.link.state()
            found.append(Peer(broker.name, broker.link.address, word, since_s, reason))
        return found

    def client_alive(self, client_id: str, now_ms: int) -> None:
        """Note that a consumer lives, by monotonic time: whoever has messages of it renews them."""
        for broker in self.brokers:
            broker.link.client_alive(client_id, now_ms)

    def client_ended(self, client_id: str) -> None:
        """Note that a consumer has ended: what it held is for others."""
        for broker in self.brokers:
            broker.link.client_ended(client_id)

    def release_polls(self) -> None:
        """Answer every parked pop empty, and every later one at once: the process is to stop."""
        for broker in self.brokers:
            broker.link.release_polls()

    def timeout_ms(self, call: Call) -> int:
        """Return how long a broker may take, so that the answer leaves before the deadline."""
        remaining_ms = call.time_remaining_ms()
        if remaining_ms is None:
            return self._request_timeout_ms
        # The reserve must not eat up a short deadline.
        timeout_ms = remaining_ms - min(self._reserve_ms, remaining_ms // 4)
        if timeout_ms <= 0:
            raise BrokerTimeout("the deadline of the call has passed")
        return min(timeout_ms, TIMEOUT_MAX_MS)

    # ------------------------------------------------------------ whom to ask

    def brokers_of(
        self, topic: link_pb2.TopicConfig, group: link_pb2.GroupConfig | None = None
    ) -> Sequence[BrokerGroup]:
        """Return who has a topic, and a group, in the home's incarnation; always in one order."""
        if group is None:
            return [broker for broker in self.brokers if broker.find_topic(topic) is not None]
        return [broker for broker in self.brokers if broker.find_ids(group, topic) is not None]

    def place(self, topic: link_pb2.TopicConfig, message_group: str) -> Place:
        """Choose who stores a message, and in which queue.

        The client's own choice is not a promise that clients keep alike.
        """
        if message_group:
            queue_id = queue_of_group(message_group, queues=topic.queues)
        else:
            queue_id = self._queues.choose_queue(topic.queues)
        return Place(self.home, topic.id, queue_id)

    def broker_to_pop(self) -> BrokerGroup:
        """Choose of whom to take messages."""
        return self.home

    def deliveries(self, group: str, topic: str) -> Deliveries:
        """Return what opens the receipt handles of one request."""
        return Deliveries([(broker, broker.signer.opener(group, topic)) for broker in self.brokers])

    def open_recall(self, handle: str, topic: str) -> tuple[BrokerGroup, Recall]:
        """Return which timer of whom a recall handle names. Raises BadRequest."""
        limits.RECALL_HANDLE.check_text(handle)
        for broker in self.brokers:
            try:
                return broker, broker.recall_signer.open(handle, topic)
            except BadRequest as error:
                refused = error
        raise refused

    # ------------------------------------------------------------ topics and groups

    def known_topic(self, name: str) -> link_pb2.TopicConfig | None:
        """Return a topic that exists, which is what nearly every call names."""
        return self._configuration.topics.get(name)

    def find_topic(self, name: str) -> link_pb2.TopicConfig:
        """Return a topic that exists; raise IllegalTopic or TopicNotFound."""
        topic = self._configuration.topics.get(name)
        if topic is None:
            check_topic(name)
            raise TopicNotFound(f"there is no topic {name}")
        return topic

    def find_group(self, name: str) -> link_pb2.GroupConfig:
        """Return a group that exists; raise IllegalGroup or GroupNotFound."""
        group = self._configuration.groups.get(name)
        if group is None:
            check_group(name)
            raise GroupNotFound(f"there is no consumer group {name}")
        return group

    async def use_topic(self, name: str, call: Call) -> link_pb2.TopicConfig:
        """Return a topic, created by this first use where the broker permits that."""
        call.topic = name
        if name not in self._configuration.topics:
            check_topic(name)
            if self._may_be_made(name):
                await self._ensure(link_pb2.EnsureRequest(topic=name), call)
        return self.find_topic(name)

    async def use_group(self, name: str, call: Call) -> link_pb2.GroupConfig:
        """Return a consumer group, created by this first use where the broker permits that."""
        call.group = name
        if name not in self._configuration.groups:
            check_group(name)
            if self._configuration.auto_create:
                await self._ensure(link_pb2.EnsureRequest(group=name), call)
        return self.find_group(name)

    def _may_be_made(self, name: str) -> bool:
        if name.startswith(DEAD_LETTER_TOPIC_PREFIX):
            # Whoever watches for dead letters comes before the first one.
            return name.removeprefix(DEAD_LETTER_TOPIC_PREFIX) in self._configuration.groups
        return self._configuration.auto_create and not name.startswith(RETRY_TOPIC_PREFIX)

    async def _ensure(self, request: link_pb2.EnsureRequest, call: Call) -> None:
        """Create what is missing; the configuration holds it when this returns."""
        await self.home.link.ask(ENSURE, request, timeout_ms=self.timeout_ms(call))
