"""The brokers behind this proxy: a name becomes a topic or group, and whom to ask about it.

What all broker groups share, topics and consumer groups above all, is asked of the cluster. What
one of them has, its link, its name and its signers, is asked of the `BrokerGroup` that the cluster
answers with. Methods name neither a link nor a configuration of their own, so that another broker
group is another entry here. Today there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, final

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
        # The first one is the home of topics and groups; the others have them from it.
        self._home = links[0]
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

    def place(self, topic: link_pb2.TopicConfig, message_group: str) -> tuple[BrokerGroup, int]:
        """Choose who stores a message, and in which queue.

        The client's own choice is not a promise that clients keep alike.
        """
        if message_group:
            return self.brokers[0], queue_of_group(message_group, queues=topic.queues)
        return self.brokers[0], self._queues.choose_queue(topic.queues)

    def broker_to_pop(self) -> BrokerGroup:
        """Choose of whom to take messages."""
        return self.brokers[0]

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
        await self._home.ask(ENSURE, request, timeout_ms=self.timeout_ms(call))
