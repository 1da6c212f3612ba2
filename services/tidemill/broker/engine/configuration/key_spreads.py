"""Spreads of dedup keys: new lists of owners, fences, and the end of a spread (ADR 0091)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, final

from tidemill.broker.engine.configuration.administration import Administration
from tidemill.broker.engine.dedup.old_keys import OldKeys
from tidemill.broker.engine.dedup.tables import KeyTables
from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.metadata.catalog import Catalog, Topic, topic_item
from tidemill.broker.engine.metadata.dedup_policy import DEDUP_LEVEL, KeyPlacement
from tidemill.broker.engine.metadata.membership import BROKER_GROUPS_MAX
from tidemill.common.errors import BadRequest, Conflict, KeyOwnerChanged, TopicNotFound

# Changes of a topic that a broker group may miss before it accepts a list from a proxy. A wrong
# version cannot reject the lists of the home for longer than that.
MISSED_VERSIONS_MAX: Final = 1_000
ENDED_A_REPLY: Final = 64  # spreads in one reply to the home, and that the home closes in a turn


@final
class KeySpreads:
    """The commands of spreads: some at the home, some at old owners."""

    def __init__(self, catalog: Catalog, administration: Administration, tables: KeyTables) -> None:
        self._catalog = catalog
        self._administration = administration
        self._old_keys = OldKeys(catalog, tables)
        # At the home, by topic and version: broker groups that have reported to this process that
        # their older keys are over. They repeat their reports.
        self._reported: dict[tuple[TopicId, int], set[str]] = {}
        self._looks_seen = 0

    def take_over(self) -> None:
        """Begin to decide."""
        self._old_keys.take_over()

    def next_due_ms(self, now_ms: int) -> int | None:
        """Return the wall time of the next work of `run_due`; None: no spread is open."""
        return self._old_keys.next_due_ms(now_ms)

    # ------------------------------------------------------------ at the home

    def spread(self, name: str, *, is_dry: bool, now_ms: int) -> Topic:
        """Make all active broker groups owners of the dedup keys of a topic; return the topic.

        An unchanged list changes nothing. `is_dry` only checks. Raises TopicNotFound, Forbidden,
        and Conflict without deduplication and while an earlier spread is open.
        """
        self._administration.check_home()
        catalog, topic = self._catalog, self._catalog.find_topic(name)
        if topic is None:
            raise TopicNotFound(f"there is no topic {name!r}")
        if topic.dedup is None:
            raise Conflict(
                f"topic {name!r} has no deduplication, so it has no keys to spread; its other"
                f" messages go to all active broker groups"
            )
        self._administration.check_level("a spread of dedup keys", DEDUP_LEVEL)
        home = catalog.membership.home
        if home is None:
            return topic  # There is no other broker group.
        groups = tuple([name for name, _ in catalog.membership.placements(1)])
        owners = topic.placement.groups or (home.name,)
        if set(groups) == set(owners):
            return topic
        if topic.placement.before:
            raise Conflict(
                f"the last spread of topic {name!r} is open: keys of"
                f" {', '.join(self._waited_for(topic))} from before it may be known; wait for the"
                f" end of their windows, of their delayed messages and of their transactions"
            )
        version = topic.version + 1
        placement = replace(topic.placement, groups=groups, version=version, before=owners)
        topic = replace(topic, version=version, placement=placement)
        if not is_dry:
            self._record(topic, now_ms)
        return topic

    def note_ended(self, member: str, ended: Iterable[tuple[int, int]], now_ms: int) -> None:
        """Note that older keys are over at a member: topic ids of the home, and versions."""
        if len(self._reported) > 2 * self._old_keys.open_count + ENDED_A_REPLY:
            self._reported = {key: of for key, of in self._reported.items() if self._is_open(*key)}
        for topic_id, version in ended:
            if self._is_open(TopicId(topic_id), version):
                self._reported.setdefault((TopicId(topic_id), version), set()).add(member)
                self._close_if_ended(TopicId(topic_id), now_ms)

    def run_due(self, now_ms: int) -> bool:
        """Look for the end of older keys, and close some spreads; return whether more is due."""
        has_more = self._old_keys.look()
        home = self._catalog.membership.home
        is_home = home is not None and home.name == self._catalog.broker_name
        if is_home and self._looks_seen != self._old_keys.looks and not has_more:
            self._looks_seen = self._old_keys.looks
            for topic_id, _ in self._old_keys.take_ended(ENDED_A_REPLY):
                self._close_if_ended(topic_id, now_ms)
        return has_more

    def _is_open(self, topic_id: TopicId, version: int) -> bool:
        topic = self._catalog.topics.get(topic_id)
        return (
            topic is not None
            and bool(topic.placement.before)
            and topic.placement.version == version
        )

    def _waited_for(self, topic: Topic) -> tuple[str, ...]:
        """Return the broker groups whose older keys may be known."""
        version = topic.placement.version
        ended = self._reported.get((topic.id, version), set())
        if self._old_keys.has_ended(topic.id, version):
            ended = ended | {self._catalog.broker_name}
        return tuple([name for name in topic.placement.before if name not in ended])

    def _close_if_ended(self, topic_id: TopicId, now_ms: int) -> None:
        """Close a spread when no broker group has older keys.

        Without deduplication, remove those without older keys from the list: no owner depends on
        it.
        """
        topic = self._catalog.topics.get(topic_id)
        if topic is None:
            return
        waited_for = self._waited_for(topic)
        if waited_for == topic.placement.before or (waited_for and topic.dedup is not None):
            return
        self._reported.pop((topic_id, topic.placement.version), None)
        placement = replace(topic.placement, before=waited_for)
        self._record(replace(topic, version=topic.version + 1, placement=placement), now_ms)

    # ------------------------------------------------------------ at old owners

    def fence(self, topic: Topic, placement: KeyPlacement, now_ms: int) -> Topic:
        """Store a newer list of owners, which a proxy has from the home; return the topic.

        Raises BadRequest. Raises KeyOwnerChanged at the home, which has the newest list, and at a
        broker group that has missed very many changes of the topic, or that deduplication was
        turned off and on again: its keys are those of another start.
        """
        known = topic.placement
        if topic.dedup is None:
            return topic
        if placement.since != known.since:
            raise KeyOwnerChanged(
                f"broker group {self._catalog.broker_name} knows keys of another start of the"
                f" deduplication of topic {topic.name}: it was turned on with version {known.since}"
                f" of the topic there, and with {placement.since} in the list; send the message"
                f" again"
            )
        if placement.version <= known.version:
            return topic
        if not topic.home_id:
            raise KeyOwnerChanged(
                f"the home has list {known.version} of the owners of dedup keys of topic"
                f" {topic.name}, and no list {placement.version}; send the message again"
            )
        for groups in (placement.groups, placement.before):
            if not 1 <= len(groups) <= BROKER_GROUPS_MAX:
                raise BadRequest(
                    f"a lookup has a list of 1 to {BROKER_GROUPS_MAX} owners of dedup keys, and as"
                    f" many before it, not {len(groups)}"
                )
        if placement.version > topic.version + MISSED_VERSIONS_MAX:
            raise KeyOwnerChanged(
                f"broker group {self._catalog.broker_name} has version {topic.version} of topic"
                f" {topic.name}, and accepts list {placement.version} of the owners of its dedup"
                f" keys only from the home; send the message again"
            )
        topic = replace(topic, placement=placement)
        self._record(topic, now_ms)
        return topic

    def take_ended(self) -> Iterator[tuple[int, int]]:
        """Yield ids at the home and versions of some spreads without older keys here."""
        for topic_id, version in self._old_keys.take_ended(ENDED_A_REPLY):
            topic = self._catalog.topics.get(topic_id)
            is_old_owner = topic is not None and self._catalog.broker_name in topic.placement.before
            if topic is not None and topic.home_id and is_old_owner:
                yield topic.home_id, version

    def _record(self, topic: Topic, now_ms: int) -> None:
        self._administration.record(topic_item(topic), now_ms)
