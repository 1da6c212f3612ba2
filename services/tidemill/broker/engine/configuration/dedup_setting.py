"""The change of the deduplication of a topic: its policy, its share of memory, and the owners."""

from __future__ import annotations

from dataclasses import replace

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.metadata.dedup_policy import (
    NO_PLACEMENT,
    DedupChange,
    DedupPolicy,
    KeyPlacement,
)
from tidemill.common.errors import Conflict


def with_dedup(topic: Topic, change: DedupChange, catalog: Catalog, config: EngineConfig) -> Topic:
    """Return a topic after a change of its deduplication. Raises BadRequest, Conflict.

    Turning it on freezes the list of the broker groups that own its keys. Turning it off is a
    spread to no owner (ADR 0091).
    """
    bytes_max = config.dedup.memory_bytes
    policy = change.apply_to(
        topic.dedup, max_delay_ms=config.timer.max_delay_ms, memory_bytes_max=bytes_max
    )
    if policy is None:
        return topic if topic.dedup is None else _turned_off(topic, catalog)
    _check_share(topic, policy, catalog, bytes_max)
    placement = topic.placement
    if topic.dedup is None:
        _check_forgotten(topic)
        names = [name for name, _ in catalog.membership.placements(1)]
        since = topic.version if names else 0
        placement = KeyPlacement(groups=tuple(names), version=topic.version, since=since)
    elif placement.before and policy.key_from is not topic.dedup.key_from:
        raise Conflict(
            f"a spread of the dedup keys of topic {topic.name!r} is open, and keyFrom"
            f" (--dedup-key-from) gives its messages other keys; change keyFrom when the spread has"
            f" ended (`tidemill topic show {topic.name}` prints the owners while it is open)"
        )
    return replace(topic, dedup=policy, placement=placement)


def _turned_off(topic: Topic, catalog: Catalog) -> Topic:
    """Return a topic without deduplication.

    Its list names the broker groups that may know keys until they have recorded the change. The
    record of this change removes the keys here, at the home.
    """
    known = topic.placement
    # Message groups have keys at the broker groups with their queues.
    names = {*known.groups, *known.before, *(name for name, _ in topic.placements)}
    names.discard(catalog.broker_name)
    before = tuple([group.name for group in catalog.membership.in_order() if group.name in names])
    placement = KeyPlacement(version=topic.version, before=before) if before else NO_PLACEMENT
    return replace(topic, dedup=None, placement=placement)


def _check_forgotten(topic: Topic) -> None:
    """Raise Conflict while a broker group may know keys from before the deduplication was off."""
    before = topic.placement.before
    if before:
        raise Conflict(
            f"the deduplication of topic {topic.name!r} was turned off, and these broker groups may"
            f" still know its keys: {', '.join(before)}; turn it on when they are up and have"
            f" received that change; if one of them is lost, drain and remove it first"
        )


def _check_share(topic: Topic, policy: DedupPolicy, catalog: Catalog, bytes_max: int) -> None:
    """Raise Conflict if the shares of all topics exceed the memory for dedup keys."""
    others = [one.dedup for one in catalog.topics.values() if one.id != topic.id]
    taken = sum([one.memory_bytes or 0 for one in others if one is not None])
    if policy.memory_bytes and taken + policy.memory_bytes > bytes_max:
        raise Conflict(
            f"the shares of other topics have {taken} of the {bytes_max} bytes for dedup keys"
            f" (dedup_memory_bytes), so topic {topic.name!r} cannot have {policy.memory_bytes}"
        )
