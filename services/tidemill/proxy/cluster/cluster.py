"""The brokers behind this proxy: a name becomes a topic or group, and whom to ask about it.

What all broker groups share, topics and consumer groups above all, is asked of the cluster. What
one of them has, its link, its name and its signers, is asked of the `LinkedGroup` that the cluster
answers with. Methods name neither a link nor a configuration of their own. Which broker groups
there are is another matter (`members.py`).

A topic or group means the home's: its name, and its incarnation. Each broker has ids of its own for
it, which are asked of the `LinkedGroup` (ADR 0025).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from tidemill.common.errors import (
    BrokerTimeout,
    BrokerUnreachable,
    GroupDraining,
    GroupNotFound,
    TopicNotFound,
)
from tidemill.common.readiness import PeerStatus
from tidemill.message.queue_choice import broker_queue_of_message_group, queue_of_message_group
from tidemill.message.resource_names import (
    DEAD_LETTER_TOPIC_PREFIX,
    RETRY_TOPIC_PREFIX,
    check_group,
    check_topic,
)
from tidemill.proxy.cluster.linked_group import (
    HandleIssuers,
    LinkedGroup,
    LocalIds,
    ReceiptHandles,
    open_recall,
)
from tidemill.proxy.cluster.members import MemberLinks
from tidemill.proxy.link.commands import ENSURE
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.message.recall_handle import RecallFields
    from tidemill.proxy.link import BrokerLink
    from tidemill.proxy.link.broker_configuration import BrokerConfiguration
    from tidemill.proxy.server.call import Call
    from tidemill.proxy.settings import ProxySettings

__all__ = ["BrokerCluster", "LinkedGroup", "LocalIds", "RouteQueues", "SendTarget"]

# A client may name a deadline of years; what waits for one would stay for as long. Long polls have
# a time of their own.
TIMEOUT_MAX_MS = 60_000
REPORT_TIMEOUT_S = 1.0  # a broker that takes longer redelivers what it does not know to be read

# Of a topic: who stores messages of any queue, its id there, and how many queues it has there.
Spread: TypeAlias = "Sequence[tuple[LinkedGroup, int, int]]"


class SendTarget(NamedTuple):
    """Who stores a message, and where."""

    broker: LinkedGroup
    topic_id: int  # that the topic has there; 0: the broker has yet to hear of it
    queue_id: int
    may_move: bool = False  # whether another broker group may have the message as well


class RouteQueues(NamedTuple):
    """The queues of a topic at one broker group, as routes show them."""

    broker_name: str
    queues: int
    is_writable: bool


@final
class BrokerCluster:
    """The broker groups behind this proxy, and what they have in common."""

    def __init__(self, open_link: Callable[[str], BrokerLink], settings: ProxySettings) -> None:
        self._members = MemberLinks(settings.brokers, open_link)
        self._members.on_change = self._changed
        self.polls_released = asyncio.Event()  # for those who wait otherwise
        self._listeners: list[Callable[[], None]] = []  # few, and known at the start
        # Made of what brokers have told, and made again when one of them tells something.
        self._spreads: dict[str, Spread] = {}  # by topic
        self._issuers: HandleIssuers | None = None
        self._turns = count()
        self._request_timeout_ms = settings.request_timeout_ms
        self._reserve_ms = settings.deadline_reserve_ms

    @property
    def home(self) -> LinkedGroup:
        """Who owns topics, consumer groups and the list of broker groups."""
        return self._members.home

    @property
    def is_single(self) -> bool:
        """Whether there is one broker group, all told; others may have yet to be reached."""
        return len(self._members.by_name) == 1

    @property
    def brokers(self) -> Sequence[LinkedGroup]:
        """All members that have told their configuration, always in one order."""
        return self._members.brokers

    def running(self) -> AbstractAsyncContextManager[None]:
        """Keep the links up until the block ends."""
        return self._members.running()

    async def configured(self) -> None:
        """Wait until the home has told its configuration; nothing is served before."""
        await self._members.configured.wait()

    def peers(self) -> list[PeerStatus]:
        """Return each broker group, and whether it can be reached."""
        found = []
        for broker in self._members.all:
            word, since_s, reason = broker.link.state()
            found.append(PeerStatus(broker.name, broker.link.address, word, since_s, reason))
        return found

    def report_alive(self, client_id: str, now_ms: int) -> None:
        """Note that a consumer lives, by monotonic time: whoever has messages of it renews them."""
        for broker in self.brokers:
            broker.link.report_alive(client_id, now_ms)

    def report_ended(self, client_id: str) -> None:
        """Note that a consumer has ended: what it held is for others."""
        for broker in self.brokers:
            broker.link.report_ended(client_id)

    def release_polls(self) -> None:
        """Answer every parked pop empty, and every later one at once: the process is to stop."""
        self.polls_released.set()
        for broker in self._members.all:
            broker.link.release_polls()

    async def wait_reported(self) -> None:
        """Wait, a moment, until the brokers know who has got what: the process is about to end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                await asyncio.gather(*[broker.link.wait_reported() for broker in self._members.all])

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
    ) -> Sequence[LinkedGroup]:
        """Return who has a topic, and a group, in the home's incarnation; always in one order."""
        if group is None:
            return [broker for broker in self.brokers if broker.find_topic(topic) is not None]
        return [broker for broker in self.brokers if broker.find_ids(group, topic) is not None]

    def choose_target(
        self,
        topic: link_pb2.TopicConfig,
        message_group: str,
        *,
        tried: Collection[LinkedGroup] = (),
    ) -> SendTarget:
        """Choose who stores a message, and in which queue; none of those `tried`.

        The client's own choice is not a promise that clients keep alike. Raises GroupDraining and
        BrokerUnreachable for a message group whose place takes no messages, BrokerUnreachable when
        all have been tried.
        """
        if message_group:
            return self._target_of_group(topic, message_group)
        spread = self._spreads.get(topic.name) or self._spread_of(topic)
        turn = next(self._turns)
        if len(spread) == 1 and not tried:
            broker, topic_id, queues = spread[0]
            return SendTarget(broker, topic_id, turn % queues)
        if not tried:
            # Nearly every message: of very many broker groups two are looked at.
            lap, position = divmod(turn, len(spread))
            broker, topic_id, queues = spread[position]
            if broker.link.is_up and spread[position - 1][0].link.is_up:
                return SendTarget(broker, topic_id, lap % queues, may_move=True)
        left = [each for each in spread if each[0] not in tried]
        if not left:
            raise BrokerUnreachable("no broker group has taken the message")
        up = [each for each in left if each[0].link.is_up]
        # Where nobody is up it waits for one of them, as any request does.
        lap, position = divmod(turn, len(up) or len(left))
        broker, topic_id, queues = (up or left)[position]
        return SendTarget(broker, topic_id, lap % queues, may_move=len(up) > 1)

    def _target_of_group(self, topic: link_pb2.TopicConfig, message_group: str) -> SendTarget:
        """Return the one place of a message group, whoever is up."""
        if not topic.placements:
            queue_id = queue_of_message_group(message_group, queues=topic.queues)
            return SendTarget(self.home, topic.id, queue_id)
        name, queue_id = broker_queue_of_message_group(message_group, topic.placements)
        broker = self._members.by_name.get(name)
        if broker is None:
            raise BrokerUnreachable(
                f"the broker group {name}, which has the message group, is not to be"
                f" found at its address"
            )
        if broker.is_draining:
            raise GroupDraining(
                f"the broker group {name}, which has the message group, is draining;"
                f" send again when it has left"
            )
        own = broker.find_topic(topic)
        if own is None:
            return SendTarget(broker, 0, queue_id)
        if broker is not self.home and list(own.placements) != list(topic.placements):
            # One of the two has yet to hear of a group that has left: by the newer ones the message
            # group may have its place elsewhere.
            raise BrokerUnreachable(
                f"the home and {name} do not agree yet on where the message group"
                f" has its place; send again"
            )
        return SendTarget(broker, own.id, queue_id)

    async def topic_id_at(self, broker: LinkedGroup, name: str, call: Call) -> int:
        """Wait until a broker group has heard of a topic, and return the id that it has there."""

        def find() -> link_pb2.TopicConfig | None:
            topic = self.known_topic(name)
            return broker.find_topic(topic) if topic is not None else None

        what = f"the broker group that has the message group does not know the topic {name}"
        await self._members.wait_until(
            lambda: find() is not None or self.known_topic(name) is None,
            self.timeout_ms(call),
            what,
        )
        own = find()
        if own is None:
            raise TopicNotFound(f"the topic {name} was deleted")
        return own.id

    def _spread_of(self, topic: link_pb2.TopicConfig) -> Spread:
        found = [
            (broker, own.id, own.queues)
            for broker in self.brokers
            if not broker.is_draining and (own := broker.find_topic(topic)) is not None
        ]
        spread = self._spreads[topic.name] = found or [(self.home, topic.id, topic.queues)]
        return spread

    def add_listener(self, tell: Callable[[], None]) -> None:
        """Call `tell` when it has changed who has which topics and groups, or what these are."""
        self._listeners.append(tell)

    def _changed(self) -> None:
        self._spreads, self._issuers = {}, None
        for tell in self._listeners:
            tell()

    def route_queues(self, topic: link_pb2.TopicConfig) -> Sequence[RouteQueues]:
        """Return who has which queues of a topic, whether up or not."""
        has = {place.broker_group: topic.queues for place in topic.placements}
        for broker in self.brokers:
            own = broker.find_topic(topic)
            # One that has joined later has no message group.
            if own is not None and not (has and topic.type == link_pb2.TOPIC_TYPE_FIFO):
                has[broker.name] = own.queues
        members = self._members.by_name
        return [
            RouteQueues(name, queues, name not in members or not members[name].is_draining)
            for name, queues in has.items()
        ]

    def deliveries(self, group: str, topic: str) -> ReceiptHandles:
        """Return what opens the receipt handles of one request."""
        if self._issuers is None:
            self._issuers = HandleIssuers(self.brokers)
        return ReceiptHandles(self._issuers, group, topic)

    def open_recall(self, handle: str, topic: str) -> tuple[LinkedGroup, RecallFields]:
        """Return which timer of whom a recall handle names. Raises BadRequest."""
        return open_recall(self.brokers, handle, topic)

    # ------------------------------------------------------------ topics and groups

    @property
    def _homes(self) -> BrokerConfiguration:
        return self._members.home.link.configuration

    def known_topic(self, name: str) -> link_pb2.TopicConfig | None:
        """Return a topic that exists, which is what nearly every call names."""
        return self._homes.topics.get(name)

    def known_group(self, name: str) -> link_pb2.GroupConfig | None:
        """Return a consumer group that exists."""
        return self._homes.groups.get(name)

    def knows_topic(self, topic: str) -> bool:
        """Whether a topic exists."""
        return topic in self._homes.topics

    def knows(self, topic: str, group: str) -> bool:
        """Whether both exist."""
        return topic in self._homes.topics and group in self._homes.groups

    def find_topic(self, name: str) -> link_pb2.TopicConfig:
        """Return a topic that exists; raise IllegalTopic or TopicNotFound."""
        topic = self._homes.topics.get(name)
        if topic is None:
            check_topic(name)
            self._check_home()
            raise TopicNotFound(f"there is no topic {name}")
        return topic

    def find_group(self, name: str) -> link_pb2.GroupConfig:
        """Return a group that exists; raise IllegalGroup or GroupNotFound."""
        group = self._homes.groups.get(name)
        if group is None:
            check_group(name)
            self._check_home()
            raise GroupNotFound(f"there is no consumer group {name}")
        return group

    async def use_topic(self, name: str, call: Call) -> link_pb2.TopicConfig:
        """Return a topic, created by this first use where the broker permits that."""
        call.topic = name
        if name not in self._homes.topics:
            check_topic(name)
            if self._may_be_made(name):
                await self._ensure(link_pb2.EnsureRequest(topic=name), call)
        return self.find_topic(name)

    async def use_group(self, name: str, call: Call) -> link_pb2.GroupConfig:
        """Return a consumer group, created by this first use where the broker permits that."""
        call.group = name
        if name not in self._homes.groups:
            check_group(name)
            if self._homes.auto_create:
                await self._ensure(link_pb2.EnsureRequest(group=name), call)
        return self.find_group(name)

    def _may_be_made(self, name: str) -> bool:
        if name.startswith(DEAD_LETTER_TOPIC_PREFIX):
            # Whoever watches for dead letters comes before the first one.
            return name.removeprefix(DEAD_LETTER_TOPIC_PREFIX) in self._homes.groups
        return self._homes.auto_create and not name.startswith(RETRY_TOPIC_PREFIX)

    def _check_home(self) -> None:
        """Raise BrokerUnreachable where what the home does not know says nothing."""
        if self._members.refusal:
            raise BrokerUnreachable(self._members.refusal)

    async def _ensure(self, request: link_pb2.EnsureRequest, call: Call) -> None:
        """Create what is missing; the configuration holds it when this returns."""
        self._check_home()
        try:
            await self.home.link.ask(ENSURE, request, timeout_ms=self.timeout_ms(call))
        except (BrokerTimeout, BrokerUnreachable) as error:
            if len(self._members.by_name) < 2:
                raise
            raise type(error)(
                f"{request.topic or request.group} is not known, and can only be created by"
                f" {self.home.name}: {error.message}"
            ) from error
