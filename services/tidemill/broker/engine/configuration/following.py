"""Commands of a follower: it copies topics and consumer groups from its home.

The follower gives them ids of its own. Its CONFIG records contain the home's id beside the own id,
so a start has nothing else to rebuild. Owned by the round loop, as all commands are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import final

from tidemill.broker.engine.configuration.administration import Administration
from tidemill.broker.engine.configuration.security import SecurityAdministration
from tidemill.broker.engine.dedup.tables import KeyTables
from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.metadata.beginnings import merge_beginnings
from tidemill.broker.engine.metadata.catalog import (
    Beginnings,
    Catalog,
    ConsumerGroup,
    Topic,
    group_item,
    topic_item,
)
from tidemill.broker.engine.metadata.dedup_policy import DEDUP_LEVEL, NO_PLACEMENT
from tidemill.broker.engine.metadata.group_pause import PAUSE_LEVEL
from tidemill.broker.engine.metadata.membership import Home, home_item
from tidemill.broker.engine.metadata.priority import FACTOR_DEFAULT, PRIORITY_LEVEL
from tidemill.broker.engine.metadata.topic_creator import CREATOR_LEVEL
from tidemill.broker.engine.metadata.topic_retention import BROKER_DEFAULT, RETENTION_LEVEL
from tidemill.broker.engine.metadata.transaction_policy import DEFAULT_POLICY, TRANSACTION_LEVEL
from tidemill.broker.engine.queries.inspection import Inspection
from tidemill.broker.engine.queries.removal_check import Readers, RemovalBacklog, RemovalCount
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.common.errors import Conflict, Forbidden

CHANGES_A_SLICE = 16  # deletions are the slowest changes
BEGUN_GROUPS_A_REPLY = 16  # with all their topics 30 KB, half of the largest reply


@final
class Following:
    """The commands that a home sends to its followers."""

    def __init__(
        self,
        catalog: Catalog,
        administration: Administration,
        security: SecurityAdministration,
        inspection: Inspection,
        timer_index: TimerIndex,
        transactions: TransactionTable,
        keys: KeyTables,
        *,
        archive_group: str,
    ) -> None:
        """`archive_group` is the group that retention waits for; "": none."""
        self._catalog = catalog
        self._administration = administration
        self._security = security
        self._inspection = inspection
        self._timer_index = timer_index
        self._transactions = transactions
        self._keys = keys
        self._archive_group = archive_group
        self.restored_count = 0  # homes restored from a backup, since the process started

    def accept_home(self, home: Home, *, may_join: bool, is_complete: bool, now_ms: int) -> None:
        """Accept changes of a home from here on: our home, or a new home if there is none.

        Raises Forbidden for the home of another cluster. Raises Conflict if topics of our own would
        be lost. Also raises Conflict if the home sends only changes, but this broker needs
        everything: the home then starts over and sends everything.
        """
        known = self._catalog.membership.home
        if known == home:
            return
        if known is not None:
            self.check(home.cluster_id)
            if home.life != known.life and not is_complete:
                raise Conflict(f"{self._catalog.broker_name} needs the whole configuration first")
        elif not may_join:
            raise Conflict(f"{self._catalog.broker_name} has left the cluster")
        elif not is_complete:
            raise Conflict(
                f"{self._catalog.broker_name} has left; it needs the whole configuration"
            )
        elif self.has_own():
            raise Conflict(
                f"{self._catalog.broker_name} has topics, consumer groups or users of its own, "
                f"which joining another would delete: delete them first, or begin with an empty"
                f" store"
            )
        self._administration.record(home_item(home), now_ms)

    def check(self, cluster_id: str) -> None:
        """Raise Forbidden unless the home of that cluster is ours."""
        home = self._catalog.membership.home
        if home is None or home.cluster_id != cluster_id:
            other = f"belongs to {home.name} at {home.address}" if home else "has no home"
            raise Forbidden(f"{self._catalog.broker_name} {other}")
        if home.name == self._catalog.broker_name:
            raise Forbidden(f"{home.name} is the home of its cluster itself")

    def has_own(self) -> bool:
        """Whether there are topics, consumer groups or users that no home has sent."""
        catalog = self._catalog
        if catalog.membership.home is None and catalog.security.items:
            return True
        return any(not one.is_system and not one.home_id for one in catalog.topics.values()) or any(
            not one.home_id for one in catalog.groups.values()
        )

    # ------------------------------------------------------------ changes at the home

    def find_deleted(
        self, topic_ids: Collection[int], group_ids: Collection[int]
    ) -> tuple[list[int], list[int]]:
        """Return the home's ids of topics and groups that the home has deleted.

        The arguments are the ids that the home still has.
        """
        catalog = self._catalog
        return (
            [id_ for id_ in catalog.topic_ids_at_home if id_ not in topic_ids],
            [id_ for id_ in catalog.group_ids_at_home if id_ not in group_ids],
        )

    def follow(
        self,
        topics: Iterable[Topic],
        groups: Iterable[ConsumerGroup],
        *,
        deleted_topic_ids: Iterable[int],
        deleted_group_ids: Iterable[int],
        is_restored: bool = False,
        now_ms: int,
    ) -> Iterator[None]:
        """Apply changes of the home; ids are the home's.

        `is_restored`: the home was restored from a backup, so its versions may be lower.
        """
        changes = [
            *((self._delete_topic, id_) for id_ in deleted_topic_ids),
            *((self._delete_group, id_) for id_ in deleted_group_ids),
        ]
        # Deletions come first: a new topic or group may have the name of a deleted one.
        for n, (delete, id_) in enumerate(changes, 1):
            delete(id_, now_ms)
            if n % CHANGES_A_SLICE == 0:
                yield
        for n, topic in enumerate(topics, 1):
            self._put_topic(topic, now_ms, is_restored=is_restored)
            if n % CHANGES_A_SLICE == 0:
                yield
        for n, group in enumerate(groups, 1):
            self._put_group(group, now_ms)
            if n % CHANGES_A_SLICE == 0:
                yield

    def _put_topic(self, homes: Topic, now_ms: int, *, is_restored: bool) -> None:
        catalog = self._catalog
        known = catalog.topics.get(catalog.topic_ids_at_home.get(homes.id, TopicId(0)))
        # A home that was restored from a backup assigns ids and names a second time.
        for other in (known, catalog.find_topic(homes.name)):
            if other is not None and other.id in catalog.topics and not _is_same(other, homes):
                self._administration.forget_topic(other.id, now_ms)
                self._drop_beginnings(other.home_id, now_ms)
                known = None if other is known else known
        own_id = TopicId(catalog.next_id) if known is None else known.id
        topic = replace(homes, id=own_id, home_id=homes.id)
        if catalog.feature_level < RETENTION_LEVEL:
            # It joined after the setting was made. The log may not have the setting yet.
            topic = replace(topic, retention=BROKER_DEFAULT)
        if catalog.feature_level < TRANSACTION_LEVEL:
            topic = replace(topic, transaction=DEFAULT_POLICY)
        if catalog.feature_level < DEDUP_LEVEL:
            topic = replace(topic, dedup=None, placement=NO_PLACEMENT)
        if catalog.feature_level < CREATOR_LEVEL:
            topic = replace(topic, creator=None)
        own = catalog.topics.get(own_id)
        if own is not None and own.dedup is not None and topic.dedup is not None:
            if is_restored or own.placement.since != topic.placement.since:
                # Invariant: no key of an earlier start of deduplication answers a new message. A
                # restored home may give another start the same version.
                off = replace(topic, dedup=None, placement=NO_PLACEMENT)
                self._administration.record(topic_item(off), now_ms)
            elif own.placement.version > topic.version:
                # Invariant: no older frame of the home undoes a fence that a proxy has relied on.
                topic = replace(topic, placement=own.placement)
        if self._catalog.topics.get(own_id) != topic:
            self._administration.record(topic_item(topic), now_ms)

    def _drop_beginnings(self, home_id: int, now_ms: int) -> None:
        """Forget when groups began with a topic: its id now belongs to another topic."""
        for group in list(self._catalog.groups.values()):
            begun = tuple(each for each in group.begun if each[0] != home_id)
            if begun != group.begun:
                self._administration.record(group_item(replace(group, begun=begun)), now_ms)

    def _put_group(self, homes: ConsumerGroup, now_ms: int) -> None:
        catalog = self._catalog
        known = catalog.groups.get(catalog.group_ids_at_home.get(homes.id, GroupId(0)))
        for other in (known, catalog.find_group(homes.name)):
            if other is not None and other.id in catalog.groups and not _is_same(other, homes):
                self._administration.forget_group(other.id, now_ms)
                known = None if other is known else known
        own_id = GroupId(catalog.next_id) if known is None else known.id
        group = replace(homes, id=own_id, home_id=homes.id)
        if catalog.feature_level < PRIORITY_LEVEL:
            # As for the settings of a topic.
            group = replace(group, priority_factor=FACTOR_DEFAULT)
        if catalog.feature_level < PAUSE_LEVEL:
            group = replace(group, paused=None)
        own = catalog.groups.get(own_id)
        if own is not None and own.begun:
            begun = merge_beginnings(homes.begun, own.begun, catalog=catalog)
            group = replace(group, begun=begun)
        if own != group:
            self._administration.record(group_item(group), now_ms)
        if group.begun == homes.begun:
            catalog.unreported_begun.pop(own_id, None)
        else:
            catalog.unreported_begun[own_id] = None

    def _delete_topic(self, home_id: int, now_ms: int) -> None:
        own_id = self._catalog.topic_ids_at_home.get(home_id)
        if own_id is not None:
            self._administration.forget_topic(own_id, now_ms)

    def _delete_group(self, home_id: int, now_ms: int) -> None:
        own_id = self._catalog.group_ids_at_home.get(home_id)
        if own_id is not None:
            self._administration.forget_group(own_id, now_ms)

    # ------------------------------------------------------------ reports to the home

    def note_begun(self, begun: Iterable[tuple[int, Beginnings]], now_ms: int) -> Iterator[None]:
        """At the home: record when groups began with topics at a member."""
        for group_id, beginnings in begun:
            group = self._catalog.groups.get(GroupId(group_id))
            if group is not None:
                begun_here = merge_beginnings(group.begun, beginnings, catalog=self._catalog)
                if begun_here != group.begun:
                    item = group_item(replace(group, begun=begun_here))
                    self._administration.record(item, now_ms)
            yield

    def take_unreported_beginnings(self) -> list[ConsumerGroup]:
        """At a follower: return some groups with beginnings that the home does not know yet."""
        unreported = self._catalog.unreported_begun
        some = list(islice(unreported, BEGUN_GROUPS_A_REPLY))
        for group_id in some:
            del unreported[group_id]
        return [self._catalog.groups[group_id] for group_id in some]

    # ------------------------------------------------------------ leaving

    def count_backlog(self, backlog: RemovalBacklog, readers: Readers) -> Iterator[None]:
        """Add the messages here to `backlog`; `readers` are the readers at the home."""
        backlog.delayed_count = self._timer_index.pending_count
        backlog.half_count = self._transactions.open_count
        backlog.key_count = self._keys.key_count
        count = RemovalCount(
            backlog, self._catalog, self._inspection, readers, archive_group=self._archive_group
        )
        yield from count.run()

    def leave(self, cluster_id: str, now_ms: int) -> Iterator[None]:
        """Forget the home, its topics, its consumer groups and its security items.

        Invariant: the caller has seen in the same round that the backlog is empty. Another home
        would have other topics under the same ids. Raises Conflict unless the home drains this
        broker group.
        """
        home = self._catalog.membership.home
        if home is None:
            return  # This broker has left already.
        self.check(cluster_id)
        if not home.is_draining:
            raise Conflict(f"{self._catalog.broker_name} is not draining: drain it first")
        topic_ids, group_ids = self.find_deleted((), ())
        yield from self.follow(
            (), (), deleted_topic_ids=topic_ids, deleted_group_ids=group_ids, now_ms=now_ms
        )
        yield from self._security.forget_all(now_ms)
        self._administration.record(home_item(None, left_cluster_id=cluster_id), now_ms)


def _is_same(own: Topic | ConsumerGroup, homes: Topic | ConsumerGroup) -> bool:
    """Whether a topic or group here is the same incarnation as the home's."""
    named = own.home_id, own.name, own.created_at_ms
    return named == (homes.id, homes.name, homes.created_at_ms)
