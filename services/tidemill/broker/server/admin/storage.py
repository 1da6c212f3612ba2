"""BrokerAdmin's call about the space of the log and of topics."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from tidemill.broker.server.round.rpc import read_in_round
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.upkeep.log_space import TopicSpace
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

TOPICS_MAX: Final = 1_000  # of an answer


class StorageAdmin:
    """Describes the space of the log and of topics."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def GetStorage(self, request: pb.GetStorageRequest) -> pb.GetStorageReply:
        """Return the disk, the log, and a page of topics; each part of the page takes a round."""
        reply, names = await read_in_round(
            self._rounds, lambda engine, _turn: (_status(engine), engine.log_space.topic_names())
        )
        begin = bisect_right(names, request.after_topic)
        page = names[begin : begin + min(request.topics_max, TOPICS_MAX)]
        if begin + len(page) < len(names):
            reply.last_topic = page[-1] if page else request.after_topic
        while page:

            def read(
                engine: Engine, turn: Turn, names: list[str] = page
            ) -> tuple[list[pb.TopicStorage], int]:
                found, count = engine.log_space.find_topics(names, turn.now_ms)
                is_known = engine.log_space.is_known
                return [_topic(one, is_known=is_known) for one in found], count

            topics, count = await read_in_round(self._rounds, read)
            reply.topics.extend(topics)
            page = page[count:]
        return reply


def _status(engine: Engine) -> pb.GetStorageReply:
    space = engine.log_space
    counts = space.find_bytes()
    derived = space.derived_bytes
    return pb.GetStorageReply(
        is_full=engine.room.is_full,
        free_bytes=max(engine.room.free_bytes, 0),
        total_bytes=engine.disk.total_bytes(),
        reserve_bytes=engine.config.disk_reserve_bytes,
        log=None if counts is None else pb.LogBytes(**counts._asdict()),
        derived_bytes=pb.DerivedBytes(queues=derived.queues, index=derived.index),
        floor_offset=space.floor_offset,
        floor_stored_at_ms=space.floor_stored_at_ms(),
    )


def _topic(found: TopicSpace, *, is_known: bool) -> pb.TopicStorage:
    kept = found.retention
    topic = pb.TopicStorage(
        name=found.name,
        retention=pb.TopicRetention(ms=kept.ms, bytes=kept.bytes, frees_acked=kept.frees_acked),
        waits_for_archive=found.waits_for_archive,
    )
    if is_known:
        topic.live_bytes, topic.log_bytes = found.live_bytes, found.log_bytes
        topic.freed_by_deletion_bytes = found.freed_by_deletion_bytes
    return topic
