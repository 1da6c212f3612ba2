"""BrokerAdmin's calls about dedup keys: those of a topic, and one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import structlog

from tidemill.broker.server.admin.lookup import find_topic
from tidemill.broker.server.admin.transactions import signer_of
from tidemill.broker.server.round.rpc import in_round, read_in_round
from tidemill.broker.server.wire import config_frames
from tidemill.broker.server.wire.audit_facts import audited
from tidemill.common.errors import BadRequest, Conflict
from tidemill.message.dedup_key import KEY_BYTES_MAX
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.dedup.inspection import KnownKey
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import Topic
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

log = structlog.get_logger()


@final
class DedupAdmin:
    """Describes dedup keys, and frees them."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def GetDedup(self, request: pb.GetDedupRequest) -> pb.DedupStatus:
        """Return the number and the memory of the keys of a topic."""

        def get(engine: Engine, _turn: Turn) -> pb.DedupStatus:
            topic = _checked_topic(engine, request.topic)
            usage = engine.key_inspection.usage_of(topic.id)
            return pb.DedupStatus(
                topic=config_frames.topic_config(topic),
                keys=usage.keys,
                memory_bytes=usage.memory_bytes,
                memory_bytes_max=usage.memory_bytes_max,
                oldest_at_ms=usage.oldest_at_ms,
                hits=usage.hits,
                mismatches=usage.mismatches,
                rejected=usage.rejected,
                replaced=usage.replaced,
                pending_keys=usage.pending_keys,
            )

        return await read_in_round(self._rounds, get)

    async def GetDedupKey(self, request: pb.GetDedupKeyRequest) -> pb.DedupKeyStatus:
        """Return the first message of a key. Fails if the key is free."""

        def get(engine: Engine, _turn: Turn) -> pb.DedupKeyStatus:
            topic = _checked_topic(engine, request.topic)
            known = engine.key_inspection.find(topic, _key(request.key), request.message_group)
            return _status(engine, topic, known)

        return await read_in_round(self._rounds, get)

    async def FreeDedupKey(self, request: pb.FreeDedupKeyRequest) -> pb.DedupKeyStatus:
        """Free a key; a dry run only checks it."""

        def free(engine: Engine, turn: Turn) -> pb.DedupKeyStatus:
            topic = _checked_topic(engine, request.topic)
            key, keys = _key(request.key), engine.key_inspection
            known = keys.find(topic, key, request.message_group)
            keys.check_free(known)
            if not request.dry_run:
                before = {
                    "key": request.key,
                    "messageId": known.first_id,
                    "storedAtMs": known.stored_at_ms,
                }
                if request.message_group:
                    before["messageGroup"] = request.message_group
                with audited(engine, request, before=before):
                    keys.free(topic, known, turn.now_ms)
            return _status(engine, topic, known)

        reply = await in_round(self._rounds, free)
        if not request.dry_run:
            log.info(
                "dedup key freed",
                topic=request.topic,
                message_id=reply.message_id,
                by=request.requested_by,
            )
        return reply


def _checked_topic(engine: Engine, name: str) -> Topic:
    """Return a topic with deduplication. Raises TopicNotFound, Conflict."""
    topic = find_topic(engine, name)
    if topic.dedup is None:
        waiting = ", ".join(topic.placement.before)
        raise Conflict(
            f"topic {name} has no deduplication; to turn it on"
            f"{f' when {waiting} has received that it is off' if waiting else ''}, run:"
            f" tidemill topic set {name} --dedup-window 2m"
        )
    return topic


def _key(text: str) -> bytes:
    key = text.encode()
    if not key:
        raise BadRequest(f"a dedup key has 1 to {KEY_BYTES_MAX} bytes")
    return key


def _status(engine: Engine, topic: Topic, known: KnownKey) -> pb.DedupKeyStatus:
    transaction_id = ""
    if known.half_id is not None and known.first_id:
        transaction_id = signer_of(engine).sign(known.half_id, topic.name, known.first_id)
    return pb.DedupKeyStatus(
        message_id=known.first_id,
        stored_at_ms=known.stored_at_ms,
        window_end_ms=known.window_end_ms,
        timer_id=known.timer_id,
        half_id=known.half_id or 0,
        body_crc=known.row.body_crc,
        transaction_id=transaction_id,
    )
