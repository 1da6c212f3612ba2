"""The broker groups behind this proxy: names of topics and groups, and the broker for a request.

The cluster has what all broker groups share, mainly topics and consumer groups. A `LinkedGroup` has
what belongs to one broker group: its link, its name and its signers. Methods get it from the
cluster; they keep no link and no configuration themselves. `members.py` maintains the list of
broker groups.

A topic or a consumer group means that of the home: its name and its incarnation. Each broker group
has its own ids for it, which `LinkedGroup` returns (ADR 0025).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from itertools import count, product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from tidemill.common.errors import (
    BrokerTimeout,
    BrokerUnreachable,
    GroupDraining,
    GroupNotFound,
    TopicNotFound,
)
from tidemill.common.readiness import PeerStatus
from tidemill.message.client_key import ClientKey
from tidemill.message.queue_choice import (
    broker_queue_of_message_group,
    level_of,
    queue_of_message_group,
)
from tidemill.message.resource_names import (
    DEAD_LETTER_TOPIC_PREFIX,
    RETRY_TOPIC_PREFIX,
    check_group,
    check_topic,
)
from tidemill.proxy.cluster.key_owners import KeyOwners
from tidemill.proxy.cluster.linked_group import HandleIssuers, LinkedGroup, LocalIds, ReceiptHandles
from tidemill.proxy.cluster.members import MemberLinks
from tidemill.proxy.cluster.send_target import SendTarget
from tidemill.proxy.link.commands import ENSURE
from tidemill.security.acl import Resource, group_resource, topic_resource
from tidemill.security.item_counts import ItemCounts
from tidemill.security.table import SecurityTable, parse_mode
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.proxy.link import BrokerLink
    from tidemill.proxy.link.broker_configuration import BrokerConfiguration
    from tidemill.proxy.server.call import Call
    from tidemill.proxy.settings import ProxySettings

__all__ = ["BrokerCluster", "LinkedGroup", "LocalIds", "RouteQueues", "SendTarget"]

# A client may set a deadline of years, and its request must not stay for so long. Long polls have
# another limit.
TIMEOUT_MAX_MS = 60_000
# If a broker needs more time for the last reports, it redelivers messages that clients have read.
REPORT_TIMEOUT_S = 1.0

# Broker groups that store messages of a topic, each with its topic id and its number of queues.
Spread: TypeAlias = "Sequence[tuple[LinkedGroup, int, int]]"


class RouteQueues(NamedTuple):
    """The queues of a topic at one broker group, as routes show them."""

    broker_name: str
    queues: int
    is_writable: bool


@final
class BrokerCluster:
    """The broker groups behind this proxy, with their common topics and consumer groups.

    It is one class because all its methods read the same members, and each is short.
    """

    def __init__(self, open_link: Callable[[str], BrokerLink], settings: ProxySettings) -> None:
        self.security = SecurityTable(
            self._find_security,
            self._count_security,
            self._list_users,
            floor=parse_mode(settings.security_floor),
        )

        def open_watched(address: str) -> BrokerLink:
            security = (link := open_link(address)).configuration.security
            security.on_change = functools.partial(self._note_security, link)
            security.on_table = functools.partial(self._note_table, link)
            return link

        self._members = MemberLinks(settings.brokers, open_watched)
        self._security_home = self._members.home
        self._members.on_change = self._changed
        self.polls_released = asyncio.Event()  # for waits that are not pops
        self._listeners: list[Callable[[], None]] = []  # few, added at the start
        # Caches of the configurations, cleared by each change.
        self._spreads: dict[str, Spread] = {}  # by topic
        self._issuers: HandleIssuers | None = None
        self._turns = count()
        self.key_owners = KeyOwners(self._members, self._turns)
        self._request_timeout_ms = settings.request_timeout_ms
        self._reserve_ms = settings.deadline_reserve_ms

    @property
    def home(self) -> LinkedGroup:
        """The owner of topics, consumer groups and the list of broker groups."""
        return self._members.home

    @property
    def is_single(self) -> bool:
        """Whether the cluster has one broker group, counting those not connected yet."""
        return len(self._members.by_name) == 1

    @property
    def brokers(self) -> Sequence[LinkedGroup]:
        """All members whose configuration has arrived, always in the same order."""
        return self._members.brokers

    def running(self) -> AbstractAsyncContextManager[None]:
        """Keep the links up until the block ends."""
        return self._members.running()

    async def configured(self) -> None:
        """Wait for the configuration of the home. The proxy serves nothing before."""
        await self._members.configured.wait()

    def peers(self) -> list[PeerStatus]:
        """Return the reachability of each broker group."""
        return [
            PeerStatus(broker.name, broker.link.address, *broker.link.state())
            for broker in self._members.all
        ]

    def masters(self) -> list[str]:
        """Return the address of the master of each broker group, as its link dialled it last."""
        return [broker.link.dialled for broker in self._members.all]

    def report_alive(self, client: ClientKey, now_ms: int) -> None:
        """Report that a consumer lives, by monotonic time, so that brokers renew its deliveries."""
        for broker in self.brokers:
            broker.link.report_alive(client, now_ms)

    def report_disconnected(self, client: ClientKey) -> None:
        """Report that a consumer has no connection, so that brokers stop its renewals."""
        for broker in self.brokers:
            broker.link.report_disconnected(client)

    def report_subscriptions(self, group: str, topics: Iterable[str]) -> None:
        """Report the topics that a consumer subscribes to, so that brokers count their lag."""
        for topic, broker in product(topics, self.brokers):
            broker.link.report_subscription(group, topic)

    def report_ended(self, client: ClientKey) -> None:
        """Report that a consumer has ended, so that brokers release its messages."""
        for broker in self.brokers:
            broker.link.report_ended(client)

    def report_revoked(self, client: ClientKey, lost: Collection[Resource]) -> None:
        """Report that a consumer has lost rights; without resources, all of them."""
        for broker in self.brokers:
            broker.link.report_revoked(client, lost)

    def release_polls(self) -> None:
        """End every parked pop empty, and every later one at once: the process stops."""
        self.polls_released.set()
        for broker in self._members.all:
            broker.link.release_polls()

    async def wait_reported(self) -> None:
        """Wait until the brokers have all reports, `REPORT_TIMEOUT_S` at most, before the stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                await asyncio.gather(*[broker.link.wait_reported() for broker in self._members.all])

    def timeout_ms(self, call: Call) -> int:
        """Return the timeout of a request, so that the client gets the answer in its deadline."""
        remaining_ms = call.time_remaining_ms()
        if remaining_ms is None:
            return self._request_timeout_ms
        # The reserve takes at most a quarter of a short deadline.
        timeout_ms = remaining_ms - min(self._reserve_ms, remaining_ms // 4)
        if timeout_ms <= 0:
            raise BrokerTimeout("the deadline of the call has passed")
        return min(timeout_ms, TIMEOUT_MAX_MS)

    # ------------------------------------------------------------ broker of a request

    def brokers_of(
        self, topic: link_pb2.TopicConfig, group: link_pb2.GroupConfig | None = None
    ) -> Sequence[LinkedGroup]:
        """Return the broker groups that have a topic, and a consumer group, of the home.

        Another incarnation does not count. The order is always the same.
        """
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
        """Choose the broker group and the queue of a message; skip the broker groups `tried`.

        The choice of the client is ignored, since clients choose in different ways. Raises
        GroupDraining or BrokerUnreachable if the broker group of a message group accepts no
        messages, and BrokerUnreachable if all broker groups were tried.
        """
        if message_group:
            return self._target_of_group(topic, message_group)
        spread = self._spreads.get(topic.name) or self._spread_of(topic)
        turn = next(self._turns)
        if len(spread) == 1 and not tried:
            broker, topic_id, queues = spread[0]
            return SendTarget(broker, topic_id, turn % queues)
        if not tried:
            # Nearly every message: this checks only two of many broker groups.
            lap, position = divmod(turn, len(spread))
            broker, topic_id, queues = spread[position]
            if broker.link.is_up and spread[position - 1][0].link.is_up:
                return SendTarget(broker, topic_id, lap % queues, may_move=True)
        untried = [each for each in spread if each[0] not in tried]
        if not untried:
            raise BrokerUnreachable("no broker group has accepted the message; retry later")
        up = [each for each in untried if each[0].link.is_up]
        # If none is up, the message waits for one of them, as any request does.
        lap, position = divmod(turn, len(up) or len(untried))
        broker, topic_id, queues = (up or untried)[position]
        return SendTarget(broker, topic_id, lap % queues, may_move=len(up) > 1)

    def choose_level(
        self, topic: link_pb2.TopicConfig, priority: int, *, tried: Collection[LinkedGroup] = ()
    ) -> SendTarget:
        """Choose the broker group of a message on a PRIORITY topic. Its queue is its level.

        Raises BrokerUnreachable if all broker groups were tried.
        """
        target = self.choose_target(topic, "", tried=tried)
        own = target.broker.find_topic(topic)
        queues = topic.queues if own is None else own.queues
        return target._replace(queue_id=level_of(priority, queues=queues), priority=priority)

    def _target_of_group(self, topic: link_pb2.TopicConfig, message_group: str) -> SendTarget:
        """Return the target of a message group, which does not depend on the state of links."""
        if not topic.placements:
            queue_id = queue_of_message_group(message_group, queues=topic.queues)
            return SendTarget(self.home, topic.id, queue_id)
        name, queue_id = broker_queue_of_message_group(message_group, topic.placements)
        broker = self._members.by_name.get(name)
        if broker is None:
            raise BrokerUnreachable(
                f"broker group {name}, which stores this message group, is unreachable; retry later"
            )
        if broker.is_draining:
            raise GroupDraining(
                f"broker group {name}, which stores this message group, is draining;"
                f" retry after its removal"
            )
        own = broker.find_topic(topic)
        if own is None:
            return SendTarget(broker, 0, queue_id)
        if broker is not self.home and list(own.placements) != list(topic.placements):
            # One of the two does not know of a removed broker group yet. By the newer placements
            # another broker group may store the message group.
            raise BrokerUnreachable(
                f"the home and {name} do not agree yet on the broker group of this message group;"
                f" retry"
            )
        return SendTarget(broker, own.id, queue_id)

    async def topic_id_at(self, broker: LinkedGroup, name: str, call: Call) -> int:
        """Wait until a broker group knows a topic; return its id there."""

        def find() -> link_pb2.TopicConfig | None:
            topic = self.known_topic(name)
            return broker.find_topic(topic) if topic is not None else None

        failure = f"the broker group of this message group does not know the topic {name} yet"
        await self._members.wait_until(
            lambda: find() is not None or self.known_topic(name) is None,
            self.timeout_ms(call),
            failure,
        )
        own = find()
        if own is None:
            raise TopicNotFound(f"the topic {name} was deleted")
        return own.id

    def _spread_of(self, topic: link_pb2.TopicConfig) -> Spread:
        spread = [
            (broker, own.id, own.queues)
            for broker in self.brokers
            if not broker.is_draining and (own := broker.find_topic(topic)) is not None
        ] or [(self.home, topic.id, topic.queues)]
        self._spreads[topic.name] = spread
        return spread

    def add_listener(self, notify: Callable[[], None]) -> None:
        """Call `notify` after each change of members, topics or consumer groups."""
        self._listeners.append(notify)

    def _find_security(self, kind: str, name: str) -> bytes | None:
        return self.home.link.configuration.security.items.get((kind, name))

    def _count_security(self) -> ItemCounts:
        return self.home.link.configuration.security.counts

    def _list_users(self, field: str, value: str) -> Collection[str]:
        return self.home.link.configuration.security.identities.find(field, value)

    def _note_security(self, link: BrokerLink, kind: str, name: str) -> None:
        if link is self.home.link:
            self.security.note_change(kind, name)

    def _note_table(self, link: BrokerLink) -> None:
        if link is self.home.link:
            self.security.note_all_changed()

    def _changed(self) -> None:
        self._spreads, self._issuers = {}, None
        self.key_owners.forget()
        if self._security_home is not self.home:
            self._security_home = self.home
            self.security.note_all_changed()
        for notify in self._listeners:
            notify()

    def route_queues(self, topic: link_pb2.TopicConfig) -> Sequence[RouteQueues]:
        """Return the queues of a topic by broker group, whether it is up or not."""
        queue_counts = {placement.broker_group: topic.queues for placement in topic.placements}
        for broker in self.brokers:
            own = broker.find_topic(topic)
            # A broker group that joined later stores no message groups.
            if own is not None and not (queue_counts and topic.type == link_pb2.TOPIC_TYPE_FIFO):
                queue_counts[broker.name] = own.queues
        members = self._members.by_name
        return [
            RouteQueues(name, queues, name not in members or not members[name].is_draining)
            for name, queues in queue_counts.items()
        ]

    def deliveries(self, group: str, topic: str) -> ReceiptHandles:
        """Return an opener of the receipt handles of one request."""
        if self._issuers is None:
            self._issuers = HandleIssuers(self.brokers)
        return ReceiptHandles(self._issuers, group, topic)

    # ------------------------------------------------------------ topics and groups

    @property
    def _homes(self) -> BrokerConfiguration:
        return self._members.home.link.configuration

    def known_topic(self, name: str) -> link_pb2.TopicConfig | None:
        """Return a topic, or None if it does not exist."""
        return self._homes.topics.get(name)

    def known_group(self, name: str) -> link_pb2.GroupConfig | None:
        """Return a consumer group, or None if it does not exist."""
        return self._homes.groups.get(name)

    def knows_topic(self, topic: str) -> bool:
        """Whether a topic exists."""
        return topic in self._homes.topics

    def knows(self, topic: str, group: str) -> bool:
        """Whether both exist."""
        return topic in self._homes.topics and group in self._homes.groups

    def find_topic(self, name: str) -> link_pb2.TopicConfig:
        """Return a topic; raise IllegalTopic or TopicNotFound."""
        topic = self._homes.topics.get(name)
        if topic is None:
            check_topic(name)
            self._check_home()
            raise TopicNotFound(f"there is no topic {name}")
        return topic

    def find_group(self, name: str) -> link_pb2.GroupConfig:
        """Return a consumer group; raise IllegalGroup or GroupNotFound."""
        group = self._homes.groups.get(name)
        if group is None:
            check_group(name)
            self._check_home()
            raise GroupNotFound(f"there is no consumer group {name}")
        return group

    async def use_topic(self, name: str, call: Call) -> link_pb2.TopicConfig:
        """Return a topic. Create it if it is missing and the broker permits that."""
        call.topic = name
        if name not in self._homes.topics:
            check_topic(name)
            if self.may_create_topic(name, call):
                await self.create_topic(name, call)
        return self.find_topic(name)

    async def create_topic(self, name: str, call: Call) -> None:
        """Create a topic, after `may_create_topic`. An existing one stays."""
        await self._ensure(link_pb2.EnsureRequest(topic=name), call)

    async def use_group(self, name: str, call: Call) -> link_pb2.GroupConfig:
        """Return a consumer group. Create it if it is missing and the broker permits that."""
        call.group = name
        if name not in self._homes.groups:
            check_group(name)
            if self._homes.auto_create_groups and call.may_create(group_resource(name)):
                await self._ensure(link_pb2.EnsureRequest(group=name), call)
        return self.find_group(name)

    def may_create_topic(self, name: str, call: Call) -> bool:
        """Whether the first use of a missing topic creates it."""
        if name.startswith(DEAD_LETTER_TOPIC_PREFIX):
            # A consumer of dead letters may start before the first one.
            return name.removeprefix(DEAD_LETTER_TOPIC_PREFIX) in self._homes.groups
        is_possible = self._homes.auto_create_topics and not name.startswith(RETRY_TOPIC_PREFIX)
        return is_possible and call.may_create(topic_resource(name))

    def _check_home(self) -> None:
        """Raise BrokerUnreachable if the settings conflict, so that the home is not certain."""
        if self._members.conflict:
            raise BrokerUnreachable(self._members.conflict)

    async def _ensure(self, request: link_pb2.EnsureRequest, call: Call) -> None:
        """Create a topic or consumer group. The configuration has it on return."""
        self._check_home()
        try:
            await self.home.link.ask(ENSURE, request, timeout_ms=self.timeout_ms(call))
        except (BrokerTimeout, BrokerUnreachable) as error:
            if len(self._members.by_name) < 2:
                raise
            raise type(error)(
                f"{request.topic or request.group} is unknown, and only {self.home.name} can"
                f" create it: {error.message}"
            ) from error
