"""What is configured, as the home says, or while it is away those who have heard it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import Brokers
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

Item = TypeVar("Item", pb.TopicConfig, pb.GroupConfig)


class ClusterConfiguration(NamedTuple):
    """Topics and consumer groups, and who could not be asked."""

    topics: list[pb.TopicConfig]
    groups: list[pb.GroupConfig]
    unreachable: list[str] | None  # None: nobody that matters


async def read_configuration(
    cluster: Brokers, *, with_system: bool = False
) -> ClusterConfiguration:
    """Return all topics and consumer groups; system topics are each broker group's own."""
    ask = cluster.ask_all if with_system else cluster.ask_home
    found = await ask(lambda member: member.client.call(calls.GET_CONFIG, pb.GetConfigRequest()))
    home = (await cluster.members())[0].name
    configs = [answer.value for answer in found.answers]
    # What the home has told is right; another may have yet to hear that something is gone.
    deciding = configs[:1] if found.answers[0].broker == home else configs
    topics = _newest(topic for config in deciding for topic in config.topics if not topic.is_system)
    if with_system:
        topics += _newest(topic for config in configs for topic in config.topics if topic.is_system)
    groups = _newest(group for config in deciding for group in config.groups)
    return ClusterConfiguration(topics, groups, found.unreachable or None)


def _newest(items: Iterable[Item]) -> list[Item]:
    """Return one of each name, that of the latest change."""
    newest: dict[str, Item] = {}
    for item in items:
        known = newest.get(item.name)
        if known is None or _age(known) < _age(item):
            newest[item.name] = item
    return list(newest.values())


def _age(item: pb.TopicConfig | pb.GroupConfig) -> tuple[int, int]:
    return item.created_at_ms, item.version
