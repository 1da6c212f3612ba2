"""Topics and consumer groups, read from the home or, while it is unreachable, from the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import Brokers
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

Item = TypeVar("Item", pb.TopicConfig, pb.GroupConfig)


class ClusterConfiguration(NamedTuple):
    """Topics and consumer groups, and the unreachable broker groups."""

    topics: list[pb.TopicConfig]
    groups: list[pb.GroupConfig]
    unreachable: list[str] | None  # None: all answered


async def read_configuration(
    cluster: Brokers, *, with_system: bool = False
) -> ClusterConfiguration:
    """Return all topics and consumer groups. Each broker group has its own system topics."""
    call = cluster.call_all if with_system else cluster.call_home
    found = await call(calls.GET_CONFIG, pb.GetConfigRequest())
    home = (await cluster.members())[0].name
    configs = [answer.value for answer in found.answers]
    # The reply of the home is current; another broker group may still list a deleted topic.
    deciding = configs[:1] if found.answers[0].broker == home else configs
    topics = _newest(topic for config in deciding for topic in config.topics if not topic.is_system)
    if with_system:
        topics += _newest(topic for config in configs for topic in config.topics if topic.is_system)
    groups = _newest(group for config in deciding for group in config.groups)
    return ClusterConfiguration(topics, groups, found.unreachable or None)


def _newest(items: Iterable[Item]) -> list[Item]:
    """Return the latest version of each name."""
    newest: dict[str, Item] = {}
    for item in items:
        known = newest.get(item.name)
        if known is None or _age(known) < _age(item):
            newest[item.name] = item
    return list(newest.values())


def _age(item: pb.TopicConfig | pb.GroupConfig) -> tuple[int, int]:
    return item.created_at_ms, item.version
