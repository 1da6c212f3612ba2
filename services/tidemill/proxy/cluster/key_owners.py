"""The owners of dedup keys without a message group, and of keys that move to others (ADR 0091)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from tidemill.common.errors import (
    BrokerTimeout,
    BrokerUnreachable,
    GroupDraining,
    KeyOwnerChanged,
    VersionUnsupported,
)
from tidemill.message.dedup_key import owner_of_key
from tidemill.message.queue_choice import level_of
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.proxy.cluster.linked_group import LinkedGroup
    from tidemill.proxy.cluster.members import MemberLinks
    from tidemill.proxy.cluster.send_target import SendTarget

# Of the home and then of each broker group: the version of the topic and the list of owners that it
# has. A lookup changes the list alone, and the home changes both.
KnownLists: TypeAlias = "Sequence[tuple[int, link_pb2.KeyPlacement]]"


class OldOwner(NamedTuple):
    """The broker group that owned a moved key, and the id of the topic there."""

    broker: LinkedGroup
    topic_id: int


@final
class KeyOwners:
    """Finds the broker group of each key by the list of the home."""

    def __init__(self, members: MemberLinks, turns: Iterator[int]) -> None:
        self._members = members
        self._turns = turns
        self._known: dict[str, KnownLists] = {}  # by topic; a cache of the configurations

    def forget(self) -> None:
        """Forget what a change of the configurations may have changed."""
        self._known = {}

    def choose(
        self, topic: link_pb2.TopicConfig, target: SendTarget, key: bytes, message_group: str
    ) -> SendTarget:
        """Return the target of a message with a dedup key: at the owner, and nowhere else.

        The placement of a message group decides. Raises BrokerUnreachable, GroupDraining.
        """
        if message_group:
            return target
        broker = self._owner_of(topic.placement.broker_groups, key)
        if broker is not target.broker:
            target = self.move(topic, target, broker)
        if broker.is_draining:
            raise _draining(topic, broker)
        return target._replace(may_move=False)

    def move(
        self, topic: link_pb2.TopicConfig, target: SendTarget, broker: LinkedGroup
    ) -> SendTarget:
        """Return a target at another broker group; its topic id is 0 without the topic."""
        own = broker.find_topic(topic)
        queues = topic.queues if own is None else own.queues
        if target.priority is None:
            queue_id = next(self._turns) % queues
        else:
            queue_id = level_of(target.priority, queues=queues)
        topic_id = 0 if own is None else own.id
        return target._replace(broker=broker, topic_id=topic_id, queue_id=queue_id)

    def find_old(
        self, topic: link_pb2.TopicConfig, owner: LinkedGroup, key: bytes
    ) -> OldOwner | None:
        """Return the owner of a key before an open spread; None if it is the same as now.

        Raises BrokerUnreachable, and VersionUnsupported if it answers no lookups.
        """
        broker = self._owner_of(topic.placement.before, key)
        if broker is owner:
            return None
        own = broker.find_topic(topic)
        if own is None:
            raise BrokerUnreachable(
                f"broker group {broker.name}, which may know the dedup key of this message, has not"
                f" received the topic from the home yet; retry later"
            )
        if not broker.link.configuration.serves_key_lookups:
            raise VersionUnsupported(
                f"broker group {broker.name}, which may know the dedup key of this message, is"
                f" older than this proxy; upgrade it"
            )
        return OldOwner(broker, own.id)

    def _owner_of(self, groups: Sequence[str], key: bytes) -> LinkedGroup:
        if not groups:
            return self._members.home
        name = owner_of_key(key, groups)
        broker = self._members.by_name.get(name)
        if broker is None:
            raise BrokerUnreachable(
                f"broker group {name}, which owns the dedup key of this message or may know it, is"
                f" unreachable; retry later"
            )
        return broker

    def known_lists(self, name: str) -> KnownLists:
        """Return the lists of a topic as the home and each broker group have them now."""
        known = self._known.get(name)
        if known is None:
            topic = self._members.home.link.configuration.topics.get(name)
            if topic is None:
                return []
            owns = [broker.find_topic(topic) for broker in self._members.brokers]
            known = [(one.version, one.placement) for one in (topic, *owns) if one is not None]
            self._known[name] = known
        return known

    async def wait_for_change(
        self, name: str, known: KnownLists, error: KeyOwnerChanged, timeout_ms: int
    ) -> None:
        """Wait until the version or a list of a topic differs from the known ones.

        Raises `error`, which the sender got, if none changes in time.
        """
        try:
            await self._members.wait_until(
                lambda: self.known_lists(name) != known, timeout_ms, error.message
            )
        except BrokerTimeout:
            raise error from None


def _draining(topic: link_pb2.TopicConfig, owner: LinkedGroup) -> GroupDraining:
    """Return the error for a key of a draining broker group, with a remedy."""
    remedy = f"run: tidemill topic spread {topic.name}"
    if topic.placement.before:
        # The home rejects another spread until then.
        remedy = (
            f"end the drain: tidemill broker-group add {owner.name} ADDRESS; or wait until the open"
            f" spread of the topic has ended, and {remedy}"
        )
    return GroupDraining(
        f"broker group {owner.name}, which owns the dedup key of this message, is draining;"
        f" {remedy}"
    )
