"""What every family of RPCs asks of the brokers first: names to topics and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.common.errors import BrokerTimeout, GroupNotFound, TopicNotFound
from tidemill.message.resource_names import (
    DEAD_LETTER_TOPIC_PREFIX,
    RETRY_TOPIC_PREFIX,
    check_group,
    check_topic,
)

if TYPE_CHECKING:
    from tidemill.proxy.broker_link import BrokerLink
    from tidemill.proxy.server.call import Call
    from tidemill.proxy.settings import ProxySettings
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

# A client may name a deadline of years; what waits for one would stay for as long. Long polls have
# a time of their own.
TIMEOUT_MAX_MS = 60_000


class Backend:
    """The broker behind this proxy."""

    def __init__(self, link: BrokerLink, settings: ProxySettings) -> None:
        self.link = link
        self._request_timeout_ms = settings.request_timeout_ms
        self._reserve_ms = settings.deadline_reserve_ms

    def timeout_ms(self, call: Call) -> int:
        """Return how long the broker may take, so that the answer leaves before the deadline."""
        remaining_ms = call.time_remaining_ms()
        if remaining_ms is None:
            return self._request_timeout_ms
        # The reserve must not eat up a short deadline.
        timeout_ms = remaining_ms - min(self._reserve_ms, remaining_ms // 4)
        if timeout_ms <= 0:
            raise BrokerTimeout("the deadline of the call has passed")
        return min(timeout_ms, TIMEOUT_MAX_MS)

    def known_topic(self, name: str) -> link_pb2.TopicConfig | None:
        """Return a topic that exists, which is what nearly every call names."""
        return self.link.configuration.topics.get(name)

    def find_topic(self, name: str) -> link_pb2.TopicConfig:
        """Return a topic that exists; raise IllegalTopic or TopicNotFound."""
        topic = self.link.configuration.topics.get(name)
        if topic is None:
            check_topic(name)
            raise TopicNotFound(f"there is no topic {name}")
        return topic

    def find_group(self, name: str) -> link_pb2.GroupConfig:
        """Return a group that exists; raise IllegalGroup or GroupNotFound."""
        group = self.link.configuration.groups.get(name)
        if group is None:
            check_group(name)
            raise GroupNotFound(f"there is no consumer group {name}")
        return group

    async def use_topic(self, name: str, call: Call) -> link_pb2.TopicConfig:
        """Return a topic, created by this first use where the broker permits that."""
        configuration = self.link.configuration
        if name not in configuration.topics:
            check_topic(name)
            if self._may_be_made(name):
                await self.link.ensure(topic=name, timeout_ms=self.timeout_ms(call))
        return self.find_topic(name)

    def _may_be_made(self, name: str) -> bool:
        configuration = self.link.configuration
        if name.startswith(DEAD_LETTER_TOPIC_PREFIX):
            # Whoever watches for dead letters comes before the first one.
            return name.removeprefix(DEAD_LETTER_TOPIC_PREFIX) in configuration.groups
        return configuration.auto_create and not name.startswith(RETRY_TOPIC_PREFIX)

    async def use_group(self, name: str, call: Call) -> link_pb2.GroupConfig:
        """Return a consumer group, created by this first use where the broker permits that."""
        configuration = self.link.configuration
        if name not in configuration.groups:
            check_group(name)
            if configuration.auto_create:
                await self.link.ensure(group=name, timeout_ms=self.timeout_ms(call))
        return self.find_group(name)
