"""BrokerAdmin's calls about consumer groups: configuration, progress, locks and offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.server.admin.lookup import (
    check_existence,
    check_expected,
    check_queue_id,
    find_group,
    find_topic,
)
from tidemill.broker.server.round.rpc import in_round, read_in_round
from tidemill.broker.server.scrape.lag import PROGRESS_A_ROUND
from tidemill.broker.server.wire import config_frames, config_log
from tidemill.broker.server.wire.audit_facts import CREATE, UPDATE, audited, group_facts
from tidemill.common.errors import Conflict
from tidemill.message.resource_names import check_group
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.pop.progress_index import ProgressKey
    from tidemill.broker.engine.time_search import TimeSearch
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn


class ConsumerGroupAdmin:
    """Changes and describes consumer groups."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def PutGroup(self, request: pb.PutGroupRequest) -> pb.PutGroupReply:
        """Create or change a consumer group."""

        def put(engine: Engine, turn: Turn) -> pb.PutGroupReply:
            check_group(request.name)
            before = engine.catalog.find_group(request.name)
            check_existence(
                request.existence, request.name, is_topic=False, exists=before is not None
            )
            check_expected(request, before)
            fields = config_frames.group_fields(request)
            planned = engine.administration.put_group(
                request.name, **fields, is_dry=True, now_ms=turn.now_ms
            )
            if not request.dry_run:
                facts = group_facts(before), group_facts(planned)
                action = CREATE if before is None else UPDATE
                with audited(engine, request, before=facts[0], after=facts[1], action=action):
                    engine.administration.put_group(request.name, **fields, now_ms=turn.now_ms)
                config_log.group_put(before, planned, by=request.requested_by)
            return pb.PutGroupReply(
                group=config_frames.group_config(planned),
                before=config_frames.group_config(before) if before else None,
            )

        return await in_round(self._rounds, put)

    async def PauseGroup(self, request: pb.PauseGroupRequest) -> pb.PutGroupReply:
        """Pause or resume a consumer group."""

        def pause(engine: Engine, turn: Turn) -> pb.PutGroupReply:
            before, wanted = find_group(engine, request.name), config_frames.read_pause(request)
            check_expected(request, before)
            pauses, now_ms = engine.group_pauses, turn.now_ms
            group = pauses.put(request.name, wanted, is_dry=True, now_ms=now_ms)
            if not request.dry_run and group != before:
                facts = group_facts(before), group_facts(group)
                with audited(engine, request, before=facts[0], after=facts[1], action=UPDATE):
                    group = pauses.put(request.name, wanted, now_ms=now_ms)
                config_log.group_paused(before, group, by=request.requested_by)
            return pb.PutGroupReply(
                group=config_frames.group_config(group), before=config_frames.group_config(before)
            )

        return await in_round(self._rounds, pause)

    async def DeleteGroup(self, request: pb.DeleteGroupRequest) -> pb.DeleteGroupReply:
        """Delete a consumer group with its progress; a dry run only returns its lag."""
        progress = await self.GetGroupProgress(pb.GetGroupProgressRequest(name=request.name))
        topics = sorted({queue.topic for queue in progress.queues})
        lag = sum(queue.ready_count + queue.in_flight_count for queue in progress.queues)

        def delete(engine: Engine, turn: Turn) -> pb.DeleteGroupReply:
            group = find_group(engine, request.name)
            check_expected(request, group)
            if not request.dry_run:
                facts = {**group_facts(group), "lag": lag, "topics": topics[:16]}
                with audited(engine, request, before=facts):
                    engine.administration.delete_group(request.name, turn.now_ms)
                config_log.group_deleted(group, topics, lag, by=request.requested_by)
            return pb.DeleteGroupReply(
                group=config_frames.group_config(group), topics=topics, lag=lag
            )

        return await in_round(self._rounds, delete)

    async def GetGroupProgress(self, request: pb.GetGroupProgressRequest) -> pb.GroupProgress:
        """Return a consumer group and its progress in each queue."""

        def begin(engine: Engine, _turn: Turn) -> tuple[pb.GroupProgress, list[ProgressKey]]:
            group = find_group(engine, request.name)
            pulled = engine.inspection.pulled_by(group)
            known = engine.catalog.topic_ids
            named = frozenset(known[name] for name in request.topics if name in known)
            reply = pb.GroupProgress(
                group=config_frames.group_config(group),
                pulled=[pb.PulledQueue(**each._asdict()) for each in pulled],
            )
            keys = engine.inspection.queues_given(group, also=named)
            # Before the queues are read: a message that is delivered meanwhile counts in both.
            delivered = engine.timers.deliverer.delivered
            for topic_id in {topic_id for _, topic_id, _ in keys} & delivered.keys():
                reply.delivered_timers[engine.catalog.topics[topic_id].name] = delivered[topic_id]
            return reply, keys

        reply, keys = await read_in_round(self._rounds, begin)
        for first in range(0, len(keys), PROGRESS_A_ROUND):
            part = keys[first : first + PROGRESS_A_ROUND]

            def read(
                engine: Engine, _turn: Turn, part: list[ProgressKey] = part
            ) -> list[pb.QueueProgress]:
                inspection = engine.inspection
                return [
                    config_frames.queue_progress(progress, inspection.find_lock(key))
                    for key in part
                    if (progress := inspection.find_progress(key)) is not None
                ]

            reply.queues.extend(await read_in_round(self._rounds, read))
        return reply

    async def ListConflicts(self, request: pb.ListConflictsRequest) -> pb.ConflictList:
        """List consumer groups with different filters, or without the order of a FIFO topic.

        If wanted, list consumer groups with one filter, too.
        """

        def find(engine: Engine, turn: Turn) -> pb.ConflictList:
            now_ms = turn.monotonic_ms
            found = turn.polls.filters.conflicts(
                engine.catalog,
                monotonic_ms=now_ms,
                groups=frozenset(request.groups),
                with_single=request.with_single_filters,
            )
            return pb.ConflictList(
                conflicts=[
                    pb.ConsumptionConflict(
                        group=conflict.group,
                        topic=conflict.topic,
                        is_order_lost=conflict.is_order_lost,
                        filters=[
                            pb.PolledFilter(
                                tags=each.tags,
                                sql=each.sql,
                                client_id=each.client_id,
                                polled_ms=now_ms - each.polled_at_ms,
                            )
                            for each in conflict.filters
                        ],
                    )
                    for conflict in found
                ]
            )

        return await read_in_round(self._rounds, find)

    async def ReleaseLock(self, request: pb.ReleaseLockRequest) -> pb.QueueLock:
        """Release the lock of a queue of a FIFO group; the next consumer then gets its messages."""

        def release(engine: Engine, turn: Turn) -> pb.QueueLock:
            group, topic = find_group(engine, request.group), find_topic(engine, request.topic)
            check_expected(request, group, also_of_copy=True)
            if not group.is_ordered:
                raise Conflict(f"consumer group {group.name!r} is not FIFO, so it has no locks")
            check_queue_id(topic, request.queue_id)
            key = group.id, topic.id, QueueId(request.queue_id)
            lock = engine.inspection.find_lock(key)
            facts = {"topic": topic.name, "queue": request.queue_id}
            if lock is not None:
                facts["clientId"] = lock.client_id
            with audited(engine, request, before=facts):
                engine.administration.release_lock(key, turn.now_ms)
            assert lock is not None, "release_lock raises for a queue without a lock"
            config_log.lock_released(
                group.name, topic.name, request.queue_id, lock, by=request.asked_by
            )
            return config_frames.queue_lock(lock)

        return await in_round(self._rounds, release)

    async def ResetOffset(self, request: pb.ResetOffsetRequest) -> pb.ResetOffsetReply:
        """Set the offsets from which a consumer group reads a topic; a dry run only plans them."""
        found = None
        if request.WhichOneof("target") == "timestamp_ms":
            found = await self._look_up_time(request)

        def reset(engine: Engine, turn: Turn) -> pb.ResetOffsetReply:
            if found is None:
                target = config_frames.reset_target(request)
            else:
                target = ResetTarget(offsets=found)
            find_topic(engine, request.topic)
            group, topic, after = engine.administration.plan_reset(
                request.group, request.topic, target
            )
            check_expected(request, group, also_of_copy=target.queues is not None)
            before = engine.inspection.consumer_offsets(group, topic)
            queues = engine.inspection.queue_status(topic)
            place: dict[str, object] = {"topic": request.topic}
            if target.queues is not None:
                before = [before[queue_id] for queue_id in after]
                queues = [queues[queue_id] for queue_id in after]
                place["queues"] = list(after)
            offsets = list(after.values())
            if not request.dry_run:
                with audited(
                    engine,
                    request,
                    before={"offsets": before},
                    after={"offsets": offsets},
                    place=place,
                ):
                    engine.administration.reset_offset(
                        request.group, request.topic, target, turn.now_ms
                    )
                config_log.offsets_reset(
                    request.group,
                    request.topic,
                    from_offsets=before,
                    to_offsets=offsets,
                    by=request.requested_by,
                )
            return pb.ResetOffsetReply(
                queues=[config_frames.queue_status(queue) for queue in queues],
                from_offsets=before,
                to_offsets=offsets,
            )

        return await in_round(self._rounds, reset)

    async def _look_up_time(self, request: pb.ResetOffsetRequest) -> list[int]:
        """Return the first offset of a time in each queue; each slice takes a round."""

        def begin(engine: Engine, _turn: Turn) -> TimeSearch:
            find_group(engine, request.group)
            topic = find_topic(engine, request.topic)
            return engine.inspection.look_up_time(topic, request.timestamp_ms)

        search = await read_in_round(self._rounds, begin)
        while await read_in_round(self._rounds, lambda _engine, _turn: search.step()):
            pass
        return search.offsets

    async def ForgetPullOffsets(
        self, request: pb.ForgetPullOffsetsRequest
    ) -> pb.ForgetPullOffsetsReply:
        """Delete the pull offsets of a consumer group in a topic."""

        def forget(engine: Engine, turn: Turn) -> pb.ForgetPullOffsetsReply:
            group, topic = find_group(engine, request.group), find_topic(engine, request.topic)
            check_expected(request, group)
            pulled = [
                each for each in engine.inspection.pulled_by(group) if each.topic == topic.name
            ]
            if pulled and not request.dry_run:
                facts = {
                    "topic": topic.name,
                    "pullOffsets": {str(each.queue_id): each.offset for each in pulled},
                }
                with audited(engine, request, before=facts):
                    engine.administration.forget_pull_offsets(group.id, topic.id, turn.now_ms)
                config_log.pull_offsets_forgotten(
                    group.name,
                    topic.name,
                    [each.offset for each in pulled],
                    by=request.requested_by,
                )
            return pb.ForgetPullOffsetsReply(
                queues=[pb.PulledQueue(**each._asdict()) for each in pulled]
            )

        return await in_round(self._rounds, forget)
