"""What a follower does with what its home tells it: topics and groups under ids of its own.

Owned by the round loop, as all commands are. What is recorded is CONFIG records as of any topic or
group, with the home's id beside the broker's own, so nothing here has to be rebuilt after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import final

from tidemill.broker.engine.administration import Administration
from tidemill.broker.engine.inspection import Inspection
from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.metadata.catalog import Catalog, Group, Topic, group_item, topic_item
from tidemill.broker.engine.metadata.membership import Home, home_item
from tidemill.common.errors import Conflict, Forbidden
from tidemill.message.resource_names import HIDDEN_TOPIC_PREFIX

CHANGES_A_SLICE = 16  # a deletion takes as long as any
COUNTED_A_SLICE = 64  # queues that a group reads


@dataclass(slots=True)
class Left:
    """What is left at a broker for somebody to receive."""

    ready_count: int = 0  # of each group that reads a topic; of a topic that nobody reads, all
    in_flight_count: int = 0
    delayed_count: int = 0

    def __bool__(self) -> bool:
        return bool(self.ready_count or self.in_flight_count or self.delayed_count)


@final
class Following:
    """The commands of the home."""

    def __init__(
        self,
        catalog: Catalog,
        administration: Administration,
        inspection: Inspection,
        *,
        delayed_count: Callable[[], int],
    ) -> None:
        self._catalog = catalog
        self._administration = administration
        self._inspection = inspection
        self._delayed_count = delayed_count

    def meet(self, home: Home, *, may_join: bool, is_told_all: bool, now_ms: int) -> None:
        """Take a home's word from here on: it is ours, or becomes it where there is none.

        Raises Forbidden for another's home, and Conflict where topics of our own would be lost or
        the home tells what changed to one that has nothing: it begins again with everything.
        """
        known = self._catalog.membership.home
        if known == home:
            return
        if known is not None:
            self.check(home.cluster_id)
        elif not may_join:
            raise Conflict(f"{self._catalog.broker_name} has left the cluster")
        elif not is_told_all:
            raise Conflict(f"{self._catalog.broker_name} has left, and is to be told everything")
        elif self.has_own():
            raise Conflict(
                f"{self._catalog.broker_name} has topics or consumer groups of its own, which "
                f"joining another would delete: delete them first, or begin with an empty store"
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
        """Whether there are topics or groups that no home has told of."""
        catalog = self._catalog
        return any(not one.is_system and not one.home_id for one in catalog.topics.values()) or any(
            not one.home_id for one in catalog.groups.values()
        )

    # ------------------------------------------------------------ what it tells

    def gone(
        self, topic_ids: Collection[int], group_ids: Collection[int]
    ) -> tuple[list[int], list[int]]:
        """Return the home's ids of what it told of and does not have: all but these."""
        catalog = self._catalog
        return (
            [id_ for id_ in catalog.topic_ids_at_home if id_ not in topic_ids],
            [id_ for id_ in catalog.group_ids_at_home if id_ not in group_ids],
        )

    def follow(
        self,
        topics: Iterable[Topic],
        groups: Iterable[Group],
        *,
        deleted_topic_ids: Iterable[int],
        deleted_group_ids: Iterable[int],
        now_ms: int,
    ) -> Iterator[None]:
        """Do as the home did; ids are the home's."""
        changes = [
            *((self._delete_topic, id_) for id_ in deleted_topic_ids),
            *((self._delete_group, id_) for id_ in deleted_group_ids),
        ]
        # What is gone goes first: what comes may have its name.
        for n, (delete, id_) in enumerate(changes, 1):
            delete(id_, now_ms)
            if n % CHANGES_A_SLICE == 0:
                yield
        for n, topic in enumerate(topics, 1):
            self._put_topic(topic, now_ms)
            if n % CHANGES_A_SLICE == 0:
                yield
        for n, group in enumerate(groups, 1):
            self._put_group(group, now_ms)
            if n % CHANGES_A_SLICE == 0:
                yield

    def _put_topic(self, homes: Topic, now_ms: int) -> None:
        known_id = self._catalog.topic_ids_at_home.get(homes.id)
        own_id = TopicId(self._catalog.next_id) if known_id is None else known_id
        topic = replace(homes, id=own_id, home_id=homes.id)
        if self._catalog.topics.get(own_id) != topic:
            self._administration.record(topic_item(topic), now_ms)

    def _put_group(self, homes: Group, now_ms: int) -> None:
        known_id = self._catalog.group_ids_at_home.get(homes.id)
        own_id = GroupId(self._catalog.next_id) if known_id is None else known_id
        group = replace(homes, id=own_id, home_id=homes.id)
        if self._catalog.groups.get(own_id) != group:
            self._administration.record(group_item(group), now_ms)

    def _delete_topic(self, home_id: int, now_ms: int) -> None:
        own_id = self._catalog.topic_ids_at_home.get(home_id)
        if own_id is not None:
            self._administration.forget_topic(own_id, now_ms)

    def _delete_group(self, home_id: int, now_ms: int) -> None:
        own_id = self._catalog.group_ids_at_home.get(home_id)
        if own_id is not None:
            self._administration.forget_group(own_id, now_ms)

    # ------------------------------------------------------------ leaving

    def count_left(self, left: Left) -> Iterator[None]:
        """Count into `left` what is here for somebody."""
        catalog, look = self._catalog, self._inspection
        left.delayed_count = self._delayed_count()
        for topic in list(catalog.topics.values()):
            if topic.retry_of is None and not topic.name.startswith(HIDDEN_TOPIC_PREFIX):
                use = look.use_of(topic)
                if not use.groups:
                    left.ready_count += use.message_count
            yield
        for group in list(catalog.groups.values()):
            for n, key in enumerate(look.queues_read(group), 1):
                progress = look.find_progress(key)
                if progress is not None:
                    left.ready_count += progress.ready_count
                    left.in_flight_count += progress.in_flight_count
                if n % COUNTED_A_SLICE == 0:
                    yield
            yield

    def leave(self, cluster_id: str, now_ms: int) -> Iterator[None]:
        """Forget the home and what it has told; nothing of that has messages for anybody.

        The caller has seen so in the same round. Another home would have other topics under the
        same ids. Raises Conflict unless the home has made this broker group drain.
        """
        home = self._catalog.membership.home
        if home is None:
            return  # It has left already.
        self.check(cluster_id)
        if not home.is_draining:
            raise Conflict(f"{self._catalog.broker_name} is not draining: drain it first")
        topic_ids, group_ids = self.gone((), ())
        yield from self.follow(
            (), (), deleted_topic_ids=topic_ids, deleted_group_ids=group_ids, now_ms=now_ms
        )
        self._administration.record(home_item(None), now_ms)
