"""Sends of messages with dedup keys: to the owner, after a lookup if the key moves (ADR 0091)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar, final

from tidemill.common.errors import KeyOwnerChanged
from tidemill.proxy.cluster.dedup_keys import find_stored_key
from tidemill.proxy.link.commands import LOOK_UP_KEY
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.proxy.cluster.cluster import BrokerCluster, SendTarget
    from tidemill.proxy.cluster.linked_group import LinkedGroup
    from tidemill.proxy.link.commands import Appended
    from tidemill.proxy.server.call import Call

# Of one message with one list. Only in mode REPLACE there is a second one: a pending message was
# delivered after the first lookup and before it was replaced.
LOOKUPS_MAX: Final = 3
T = TypeVar("T")


class KeyedRequest(NamedTuple, Generic[T]):
    """A message with a dedup key and without a message group, and how it is stored."""

    blob: bytes
    # Sends it to a target, with the version of its proof or 0, within some ms.
    put: Callable[[SendTarget, int, int], Awaitable[T]]
    # Makes the same result of the first answer.
    repeated: Callable[[link_pb2.KeyLookupReply], T]


@final
class KeyedSends:
    """Stores messages with dedup keys at their owners."""

    def __init__(self, cluster: BrokerCluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock

    def append(
        self,
        call: Call,
        topic: link_pb2.TopicConfig,
        target: SendTarget,
        blob: bytes,
        *,
        may_repeat: bool,
    ) -> Awaitable[tuple[LinkedGroup, Appended]]:
        """Store a message without a transaction; otherwise as `store`."""

        def put(at: SendTarget, key_version: int, timeout_ms: int) -> Awaitable[Appended]:
            return at.broker.link.append(
                at.topic_id,
                at.queue_id,
                blob,
                timeout_ms=timeout_ms,
                may_repeat=may_repeat,
                key_version=key_version,
            )

        def repeated(found: link_pb2.KeyLookupReply) -> Appended:
            return found.queue_offset, found.due_at_ms, found.repeat

        return self.store(call, topic, target, KeyedRequest(blob, put, repeated))

    async def store(
        self, call: Call, topic: link_pb2.TopicConfig, target: SendTarget, message: KeyedRequest[T]
    ) -> tuple[LinkedGroup, T]:
        """Store a message at its owner; return the broker group with the answer, and the answer.

        If the broker group has another list of owners than this proxy, it is repeated when one of
        the lists changes, within the deadline of the call. The key and its owner are always those
        of the newest setting of the topic.
        """
        owners, now_ms = self._cluster.key_owners, self._clock.monotonic_ms
        end_ms = now_ms() + self._cluster.timeout_ms(call)
        while True:
            known = owners.known_lists(topic.name)
            current = self._cluster.find_topic(topic.name)
            if current is not topic:
                topic, found = current, find_stored_key(message.blob, current)
                if found is not None:
                    target = owners.choose(topic, target, found.key, "")
                if not target.topic_id:
                    topic_id = await self._cluster.topic_id_at(target.broker, topic.name, call)
                    target = target._replace(topic_id=topic_id)
            try:
                return await self._store_once(topic, target, message, end_ms)
            except KeyOwnerChanged as error:
                remaining_ms = max(end_ms - now_ms(), 0)
                await owners.wait_for_change(topic.name, known, error, remaining_ms)

    async def _store_once(
        self, topic: link_pb2.TopicConfig, target: SendTarget, message: KeyedRequest[T], end_ms: int
    ) -> tuple[LinkedGroup, T]:
        """Store a message with the list of the topic. Raises KeyOwnerChanged."""
        owners, now_ms = self._cluster.key_owners, self._clock.monotonic_ms
        key_version = 0
        stored = find_stored_key(message.blob, topic) if topic.placement.before else None
        old = None if stored is None else owners.find_old(topic, target.broker, stored.key)
        if stored is not None and old is not None:
            key_version = topic.placement.version
            lookup = link_pb2.KeyLookup(
                topic_id=old.topic_id,
                key=stored.key,
                body_crc=stored.body_crc,
                placement=topic.placement,
                is_message_id=stored.is_message_id,
            )
            for attempt in range(LOOKUPS_MAX):
                timeout_ms = max(end_ms - now_ms(), 0)
                found = await old.broker.link.ask(LOOK_UP_KEY, lookup, timeout_ms=timeout_ms)
                if found.HasField("repeat"):
                    return old.broker, message.repeated(found)
                if not found.is_replaceable:
                    break
                replacing = owners.move(topic, target, old.broker)
                try:
                    timeout_ms = max(end_ms - now_ms(), 0)
                    return old.broker, await message.put(replacing, 0, timeout_ms)
                except KeyOwnerChanged:
                    # The pending message was delivered in between, so its key is free.
                    if attempt == LOOKUPS_MAX - 1:
                        raise
        return target.broker, await message.put(target, key_version, max(end_ms - now_ms(), 0))
