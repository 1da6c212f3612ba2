"""BrokerAdmin's call about the counts of topics and consumer groups (ADR 0092)."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, Final

from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.metrics.lag import TopicLag
from tidemill.broker.server.round.rpc import read_in_round
from tidemill.common.errors import Repairing
from tidemill.message.resource_names import HIDDEN_TOPICS
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup, Topic
    from tidemill.broker.metrics.traffic import Traffic
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.broker.server.scrape.lag import LagReader

TOPICS_A_PAGE: Final = 2_000  # up to 300 bytes each
GROUPS_A_PAGE: Final = 250  # with at most 128 topics and their retry topics each
# A slice of either takes about a millisecond, whichever comes first.
TOPICS_A_SLICE: Final = 64
QUEUES_A_SLICE: Final = 1_024
PAIRS_A_SLICE: Final = 256  # of a consumer group and a topic
PAIRS_OF_A_SEARCH: Final = 64  # a search by time takes as long: it reads some records
PROGRESS_AGE_MS_MAX: Final = 60_000  # older progress is unknown
RUN_BYTES: Final = 8


class ActivityAdmin:
    """Describes what topics and consumer groups do."""

    def __init__(self, rounds: Rounds, traffic: Traffic, read_lag: LagReader) -> None:
        self._rounds = rounds
        self._traffic = traffic
        self._read_lag = read_lag
        self._run = secrets.token_hex(RUN_BYTES)

    async def GetActivity(self, request: pb.GetActivityRequest) -> pb.ActivityPage:
        """Return a page of topics or consumer groups; each part of the page takes a round."""
        after_topic_id, after_group_id = request.after_topic_id, request.after_group_id
        if not after_topic_id and not after_group_id:
            await self._read_lag()

        def begin(engine: Engine, turn: Turn) -> tuple[pb.ActivityPage, list[int], list[int]]:
            if not after_topic_id and not after_group_id:
                engine.recent_letters.forget_deleted()
            page = pb.ActivityPage(run=self._run, read_ms=turn.monotonic_ms)
            topics: list[int] = []
            if not after_group_id:
                topics = _after(sorted(engine.catalog.topics), after_topic_id)
            groups = _after(sorted(engine.catalog.groups), after_group_id)
            if len(topics) > TOPICS_A_PAGE or (topics and groups):
                page.next_page.after_topic_id = topics[:TOPICS_A_PAGE][-1]
                groups = []
            elif len(groups) > GROUPS_A_PAGE:
                page.next_page.after_group_id = groups[GROUPS_A_PAGE - 1]
            return page, topics[:TOPICS_A_PAGE], groups[:GROUPS_A_PAGE]

        page, topics, groups = await read_in_round(self._rounds, begin)
        while topics:
            topics = await read_in_round(self._rounds, partial(self._add_topics, page, topics))
        while groups:
            groups = await read_in_round(self._rounds, partial(self._add_groups, page, groups))
        return page

    def _add_topics(
        self, page: pb.ActivityPage, ids: list[int], engine: Engine, _turn: Turn
    ) -> list[int]:
        """Add the first topics to a page; return the ids of the others."""
        queue_count = 0
        for number, id_ in enumerate(ids):
            if number == TOPICS_A_SLICE or queue_count >= QUEUES_A_SLICE:
                return ids[number:]
            topic = engine.catalog.topics.get(TopicId(id_))
            if topic is not None and engine.catalog.is_alive(topic.id):
                queue_count += topic.queues
                if topic.name not in HIDDEN_TOPICS:
                    page.topics.append(_topic(engine, topic))
        return []

    def _add_groups(
        self, page: pb.ActivityPage, ids: list[int], engine: Engine, turn: Turn
    ) -> list[int]:
        """Add the first consumer groups to a page; return the ids of the others."""
        pair_count = 0
        for number, id_ in enumerate(ids):
            if pair_count >= PAIRS_A_SLICE:
                return ids[number:]
            group = engine.catalog.groups.get(GroupId(id_))
            if group is not None:
                searches = engine.recent_letters.searches
                page.groups.append(self._group(engine, group, turn.now_ms))
                pair_count += PAIRS_OF_A_SEARCH * (engine.recent_letters.searches - searches)
                pair_count += 1 + len(self._read_lag.lag.topics_of_group.get(group.id, ()))
                pair_count += len(self._traffic.topics_of_group.get(group.id, ()))
        return []

    def _group(self, engine: Engine, group: ConsumerGroup, now_ms: int) -> pb.GroupActivity:
        lag = self._read_lag.lag
        keys = lag.topics_of_group.get(group.id)
        if now_ms - lag.now_ms > PROGRESS_AGE_MS_MAX:
            keys = None  # A stalled disk, or many queues: the values are too old.
        dead_letters = engine.dead_letters.topic_of(group)
        found = pb.GroupActivity(
            id=group.id,
            name=group.name,
            dead_letters=0
            if dead_letters is None
            else engine.dead_letters.counts_of(dead_letters)[0],
            has_polled=engine.inspection.has_popped(group),
            has_progress=keys is not None,
            dead_letters_last_hour=_last_hour(engine, dead_letters, now_ms),
        )
        # The last pass may have begun before the first delivery of a topic.
        pairs = self._counts(group.id)
        for topic_id, is_retry in keys or ():
            pair = pairs.setdefault(topic_id, pb.GroupTopicActivity())
            pair.has_progress = True
            _add_progress(pair, lag.of_topics[group.id, topic_id, is_retry])
        for topic_id, pair in pairs.items():
            topic = engine.catalog.topics.get(topic_id)
            if topic is not None and engine.catalog.is_alive(topic_id):
                pair.topic = topic.name
                found.topics.append(pair)
        return found

    def _counts(self, group_id: GroupId) -> dict[TopicId, pb.GroupTopicActivity]:
        """Return the counters of a group that are above 0, by topic, without names."""
        pairs: dict[TopicId, pb.GroupTopicActivity] = {}
        for topic_id in sorted(self._traffic.topics_of_group.get(group_id, ())):
            first, _, repeated, _ = self._traffic.sent[topic_id, group_id]
            acked = self._traffic.acks[topic_id, group_id][AckResult.APPLIED]
            if first or repeated or acked:
                pairs[topic_id] = pb.GroupTopicActivity(
                    delivered=first + repeated, redelivered=repeated, acked=acked
                )
        return pairs


def _last_hour(engine: Engine, dead_letters: Topic | None, now_ms: int) -> int | None:
    """Return the dead letters of the last hour of a group; None while that is unknown."""
    try:
        return 0 if dead_letters is None else engine.recent_letters.count(dead_letters, now_ms)
    except Repairing:
        return None


def _after(ids: list[int], last: int) -> list[int]:
    return ids[bisect_right(ids, last) :]


def _topic(engine: Engine, topic: Topic) -> pb.TopicActivity:
    contents = engine.inspection.contents_of(topic)
    found = pb.TopicActivity(
        id=topic.id,
        name=topic.name,
        stored=contents.stored_count,
        messages=contents.message_count,
        pending_timers=contents.timer_count,
    )
    if engine.live_bytes.is_complete:
        live_bytes = engine.live_bytes.bytes_of_topic(topic.id)
        found.log_bytes = live_bytes + engine.live_bytes.dead_bytes_of_topic(topic.id)
    return found


def _add_progress(pair: pb.GroupTopicActivity, lag: TopicLag) -> None:
    pair.ready += lag.ready_count - lag.blocked_count
    pair.blocked += lag.blocked_count
    pair.in_flight += lag.in_flight_count
    pair.locked_queues += lag.locked_queue_count
    times_ms = filter(None, (pair.oldest_unacked_at_ms, lag.oldest_unacked_at_ms))
    pair.oldest_unacked_at_ms = min(times_ms, default=0)
