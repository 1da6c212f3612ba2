"""The first pop of a consumer group in a topic: its queues, and where it begins."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, final

from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.layout.state import StatedProgress
from tidemill.broker.engine.metadata.beginnings import (
    BEGUN_TOPICS_MAX,
    begun_since_ms,
    home_id_of,
    merge_beginnings,
)
from tidemill.broker.engine.metadata.catalog import Catalog, ConsumerGroup, Topic, group_item
from tidemill.broker.engine.pop.progress import PopSubscription
from tidemill.broker.engine.time_search import QUEUES_A_STEP, TimeSearch
from tidemill.common.errors import Repairing

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.entry import Recorder
    from tidemill.broker.engine.message_store import MessageStore
    from tidemill.broker.engine.pop.acks import RoundAcks
    from tidemill.broker.engine.pop.state import PopState
    from tidemill.broker.engine.tally import Tally

QUEUES_A_SLICE = 256  # progress added per slice: a millisecond
SEARCHES_MAX = 16  # concurrent searches for first pops by time; a few bytes per queue each


@final
class FirstPops:
    """The first pops of consumer groups in topics."""

    def __init__(
        self,
        state: PopState,
        store: MessageStore,
        catalog: Catalog,
        recorder: Recorder,
        tally: Tally,
        acks: RoundAcks,
    ) -> None:
        self._state = state
        self._store = store
        self._catalog = catalog
        self._recorder = recorder
        self._tally = tally
        self._acks = acks
        # Searches for the first offsets of groups that began in another broker group, by group,
        # topic, version of the topic and begin time.
        self._searches: dict[tuple[int, int, int, int], TimeSearch] = {}

    def prepare(self, group_id: GroupId, topic_id: TopicId) -> bool:
        """Prepare a part of the first pop of a wide topic. Return True while more is missing.

        It records nothing. A pop without preparation does all of it in one slice.
        """
        topic, group = self._catalog.topics.get(topic_id), self._catalog.groups.get(group_id)
        if topic is None or group is None or topic.queues <= QUEUES_A_STEP:
            return False
        subscription = self._state.subscriptions.get((group_id, topic_id))
        if subscription is not None and subscription.version == topic.version:
            return False
        if self._prepare_search(group, topic):
            return True
        # Without queue 0: its progress means that the group has popped this topic.
        missing = (
            QueueId(number)
            for number in range(1, topic.queues)
            if (group_id, topic_id, number) not in self._state.progress
        )
        for queue_id in islice(missing, QUEUES_A_SLICE):
            self._tally.add(1)
            self._state.progress_of(group_id, topic_id, queue_id)
        return next(missing, None) is not None

    def subscribe(self, group: ConsumerGroup, topic: Topic, now_ms: int) -> PopSubscription:
        """Return the queues that a group pops of a topic, and note that it has begun to read it.

        Raises BlockFileDamaged, Repairing.
        """
        is_new = (group.id, topic.id, 0) not in self._state.progress
        # Before any progress is added: a damaged queue file raises here, and the next pop must
        # still be the first one.
        begins = self._begins(group, topic) if is_new and group.start_from_latest else None
        queues = [
            self._state.progress_of(group.id, topic.id, QueueId(number))
            for number in range(topic.queues)
        ]
        if begins is not None:
            # Logged, because a restart must not move the begin past messages that arrive later.
            rows = [
                progress.as_row()._replace(pop_offset=begin)
                for progress, begin in zip(queues, begins, strict=True)
            ]
            # The begin time comes first: if a power cut loses the positions, the next pop uses it.
            self._note_begun(group, topic, now_ms)
            self._recorder.append(StatedProgress(rows), now_ms)
        else:
            # The lag counts the topic from now on, here after a restart and at other broker groups.
            self._note_begun(group, topic, now_ms)
        retry_id = self._catalog.retry_topic_ids.get((group.id, topic.id))
        retries = []
        if retry_id is not None:
            retries = [
                self._state.progress_of(group.id, retry_id, QueueId(number))
                for number in range(self._catalog.topics[retry_id].queues)
            ]
        before = self._state.subscriptions.get((group.id, topic.id))
        subscription = PopSubscription(
            group_id=group.id,
            topic_id=topic.id,
            version=topic.version,
            queues=queues,
            retries=retries,
            credit=0 if before is None else before.credit,
        )
        self._state.subscriptions[group.id, topic.id] = subscription
        return subscription

    def _begins(self, group: ConsumerGroup, topic: Topic) -> list[int]:
        """Return the begin of a "from latest" group in each queue. Raises Repairing."""
        queues = self._catalog.queues_of(topic)
        since_ms = begun_since_ms(group, topic, self._catalog)
        if since_ms is None:
            return [queue.max_offset for queue in queues]
        key = (group.id, topic.id, topic.version, since_ms)
        search = self._searches.pop(key, None) or self._search(topic, since_ms)
        while search.step():
            pass
        return [
            max(offset, queue.min_offset)
            for queue, offset in zip(queues, search.offsets, strict=True)
        ]

    def _search(self, topic: Topic, since_ms: int) -> TimeSearch:
        catalog = self._catalog
        return TimeSearch(
            self._store, catalog.queues_of(topic), since_ms, falls=catalog.clock_falls
        )

    def _prepare_search(self, group: ConsumerGroup, topic: Topic) -> bool:
        """Search some queues for the begin of a group that began in another broker group.

        Return True while queues remain.
        """
        is_new = (group.id, topic.id, 0) not in self._state.progress
        since_ms = begun_since_ms(group, topic, self._catalog) if is_new else None
        if since_ms is None or not group.start_from_latest:
            return False
        key = (group.id, topic.id, topic.version, since_ms)
        search = self._searches.get(key)
        if search is None:
            if len(self._searches) >= SEARCHES_MAX:
                # The oldest one was abandoned, or its group or topic was deleted.
                del self._searches[next(iter(self._searches))]
            search = self._searches[key] = self._search(topic, since_ms)
        try:
            return search.step()
        except Repairing:
            del self._searches[key]
            return False  # The pop raises it.

    def _note_begun(self, group: ConsumerGroup, topic: Topic, now_ms: int) -> None:
        """Record when a group began with a topic, unless a record of it is known."""
        topic_id = home_id_of(topic, self._catalog)
        # Without deleted topics, which must not use up the limit.
        known = dict(merge_beginnings(group.begun, catalog=self._catalog))
        if topic_id is None or topic_id in known or len(known) >= BEGUN_TOPICS_MAX:
            return
        begun = tuple(sorted({**known, topic_id: now_ms}.items()))
        self._acks.record(now_ms)  # Required before each change of configuration.
        self._recorder.append(ConfigItem(group_item(replace(group, begun=begun))), now_ms)
