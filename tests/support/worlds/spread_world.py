"""Several broker groups with dedup keys: a home and followers, each with an engine of its own.

Lists of owners reach followers and proxies as snapshots of the topics of the home, one after the
other, with any delay.
"""

from __future__ import annotations

from typing import Any

from tests.support.worlds.dedup_world import DedupWorld
from tests.support.worlds.engine_world import TOPIC
from tidemill.broker.engine.dedup.deduplication import KeyLookup, RepeatedSend
from tidemill.broker.engine.dedup.first_messages import FirstMessage
from tidemill.broker.engine.metadata.catalog import Topic
from tidemill.broker.engine.metadata.dedup_policy import KeyPlacement
from tidemill.broker.engine.metadata.membership import Home
from tidemill.message.dedup_key import owner_of_key

HOME = "broker-0"
ADDRESSES = {f"broker-{n}": f"h{n}:1" for n in range(3)}


class SpreadWorld:
    """Broker groups with one topic; its first owners are `owners`."""

    def __init__(self, owners: tuple[str, ...] = (HOME, "broker-1"), **options: Any) -> None:
        self.worlds = {
            name: DedupWorld(broker_name=name, is_followed=True) for name in sorted(ADDRESSES)
        }
        self.home = self.worlds[HOME]
        administration = self.home.engine.broker_groups
        administration.found({name: ADDRESSES[name] for name in owners}, self.home.now_ms)
        self.report_levels()
        self.home.turn_on(**options)
        self.snapshots: list[list[Topic]] = []
        self.delivered: dict[str, int] = {}
        self.note_snapshot()
        for name in owners:
            self.join(name)

    # ------------------------------------------------------------ the cluster

    def join(self, name: str) -> None:
        """Add a broker group, which gets the newest topics."""
        if name == HOME:
            return
        self.home.engine.broker_groups.add(name, ADDRESSES[name], self.home.now_ms)
        self.home.commit()
        membership = self.home.engine.catalog.membership
        assert membership.home is not None
        home = Home(
            cluster_id=membership.home.cluster_id, name=HOME, address=membership.home.address
        )
        world = self.worlds[name]
        world.engine.following.accept_home(
            home, may_join=True, is_complete=True, now_ms=world.now_ms
        )
        self.deliver(name)

    def remove(self, name: str) -> None:
        """Remove a lost broker group by force; it keeps its store."""
        groups = self.home.engine.broker_groups
        groups.drain(name, self.home.now_ms)
        for _ in groups.remove(name, self.home.now_ms):
            pass
        self.home.commit()
        self.note_snapshot()
        del self.delivered[name]

    def report_levels(self) -> None:
        """Report the feature levels of all broker groups to the home."""
        for name, world in self.worlds.items():
            level = world.engine.catalog.feature_level
            self.home.engine.broker_groups.feature_levels[name] = level

    def note_snapshot(self) -> None:
        """Note the committed topics of the home."""
        topics = [one for one in self.home.engine.catalog.topics.values() if not one.is_system]
        if not self.snapshots or self.snapshots[-1] != topics:
            self.snapshots.append(topics)

    def deliver(self, name: str, number: int = -1) -> None:
        """Send a snapshot to a follower."""
        world = self.worlds[name]
        number %= len(self.snapshots)
        self.delivered[name] = number
        world.note_round()
        for _ in world.engine.following.follow(
            self.snapshots[number],
            (),
            deleted_topic_ids=(),
            deleted_group_ids=(),
            now_ms=world.now_ms,
        ):
            pass
        world.commit()

    def spread(self, *, is_delivered: bool = True) -> KeyPlacement:
        """Spread the keys of the topic, and return the new list."""
        self.home.note_round()
        topic = self.home.engine.key_spreads.spread(TOPIC, is_dry=False, now_ms=self.home.now_ms)
        self.home.commit()
        self.note_snapshot()
        if is_delivered:
            for name in self.delivered:
                self.deliver(name)
        return topic.placement

    def report(self, name: str) -> None:
        """Report to the home the end of older keys at a follower."""
        ended = list(self.worlds[name].engine.key_spreads.take_ended())
        self.home.note_round()
        self.home.engine.key_spreads.note_ended(name, ended, self.home.now_ms)
        self.home.commit()
        self.note_snapshot()

    def advance(self, duration_ms: int) -> None:
        """Let time pass everywhere, and do the work that is due."""
        for world in self.worlds.values():
            world.advance(duration_ms)
            world.run_due()
        self.note_snapshot()

    # ------------------------------------------------------------ proxies

    def topic(self, name: str = HOME) -> Topic:
        """Return the topic as a broker group has it."""
        catalog = self.worlds[name].engine.catalog
        return catalog.topics[catalog.topic_ids[TOPIC]]

    def stored(self, name: str) -> int:
        """Return the number of messages in the queues of the topic at a broker group."""
        catalog = self.worlds[name].engine.catalog
        return sum(queue.max_offset for queue in catalog.queues_of(self.topic(name)))

    def look_up(
        self, name: str, key: str, placement: KeyPlacement, *, is_committed: bool = True
    ) -> KeyLookup:
        """Look up a key at its old owner. Raises KeyOwnerChanged."""
        world = self.worlds[name]
        world.note_round()
        engine = world.engine
        topic = engine.key_spreads.fence(self.topic(name), placement, world.now_ms)
        try:
            return engine.deduplication.look_up(topic, key.encode(), 0, version=placement.version)
        finally:
            if is_committed:
                world.commit()

    def send(self, key: str, text: str, placement: KeyPlacement, **options: Any) -> FirstMessage:
        """Send a message as a proxy with this list does. Raises RepeatedSend, KeyOwnerChanged."""
        owner = owner_of_key(key.encode(), placement.groups)
        old_owner = owner_of_key(key.encode(), placement.before or placement.groups)
        version = 0
        if owner != old_owner:
            found = self.look_up(old_owner, key, placement)
            if found.repeat is not None:
                raise found.repeat
            if found.is_replaceable:
                return self.worlds[old_owner].store(text, key=key, **options)
            version = placement.version
        return self.worlds[owner].store(text, key=key, key_version=version, **options)

    def repeat(self, key: str, text: str, placement: KeyPlacement) -> FirstMessage:
        """Send a message that must be a repeat, and return the first answer."""
        try:
            self.send(key, text, placement)
        except RepeatedSend as repeat:
            return repeat.first
        raise AssertionError("the message was stored")


def moved_key(placement: KeyPlacement, old_owner: str) -> str:
    """Return a key that moves from a broker group to another one by a spread."""
    keys = (f"k{n}" for n in range(1_000))
    return next(
        key
        for key in keys
        if owner_of_key(key.encode(), placement.before) == old_owner
        and owner_of_key(key.encode(), placement.groups) != old_owner
    )
