"""Dedup keys: those of a topic, one of them, and the end of one before its window is over."""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

from fastapi import APIRouter, Path, Query

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerAnswer, Brokers
from tidemill.admin.json.dedup import (
    BrokerGroupDedupView,
    DedupKeyDeletionView,
    DedupKeyView,
    DedupStatusView,
)
from tidemill.admin.json.render import topic_of
from tidemill.admin.routes import Caller, ChangeAuthor, Cluster, DryRun, TopicName
from tidemill.message.dedup_key import KEY_BYTES_MAX
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["dedup keys"])

_COUNTS: Final = (
    "keys",
    "pending_keys",
    "bytes",
    "bytes_max",
    "hits",
    "mismatches",
    "rejected",
    "replaced",
)
Key = Annotated[
    str,
    Path(
        min_length=1,
        max_length=KEY_BYTES_MAX,
        description="The key, percent-encoded. It may contain slashes.",
    ),
]
MessageGroup = Annotated[
    str,
    Query(
        alias="messageGroup",
        max_length=KEY_BYTES_MAX,
        description="Message group of the messages. Keys of different message groups are different"
        " keys. Default: no message group.",
    ),
]


class FoundKey(NamedTuple):
    """A known key, and the unreachable broker groups."""

    answer: BrokerAnswer[pb.DedupKeyStatus]
    unreachable: list[str]


@router.get("/topics/{topic}/dedup", response_model_exclude_none=True)
async def get_dedup(topic: TopicName, cluster: Cluster) -> DedupStatusView:
    """Show the number and the memory of the dedup keys of a topic, in sum and by broker group.

    The answer is 409 if the topic has no deduplication.
    """
    found = await cluster.call_all(calls.GET_DEDUP, pb.GetDedupRequest(topic=topic))
    groups = [_counts_of(broker, status) for broker, status in found.answers]
    config = topic_of(found.answers[0].value.topic)
    assert config.dedup is not None, "the broker has checked it"
    oldest = [group.oldest_at_ms for group in groups if group.oldest_at_ms is not None]
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in groups) for name in _COUNTS}
    return DedupStatusView(
        topic=topic,
        dedup=config.dedup,
        oldest_at_ms=min(oldest, default=None),
        **sums,
        broker_groups=groups,
        unreachable=found.unreachable or None,
    )


@router.get("/topics/{topic}/dedup/{key:path}", response_model_exclude_none=True)
async def get_dedup_key(
    topic: TopicName, key: Key, cluster: Cluster, message_group: MessageGroup = ""
) -> DedupKeyView:
    """Show the first message with a dedup key, and the end of the window.

    The answer is 404 if the key is free: no message has it, or its window is over.
    """
    found = await _find(cluster, topic, key, message_group)
    return DedupKeyView(
        **_key_of(key, message_group, found.answer), unreachable=found.unreachable or None
    )


@router.delete("/topics/{topic}/dedup/{key:path}", response_model_exclude_none=True)
async def delete_dedup_key(
    topic: TopicName,
    key: Key,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    message_group: MessageGroup = "",
    dry_run: DryRun = False,
) -> DedupKeyDeletionView:
    """Free a dedup key: the next message with this key is stored, also if it is a repeat.

    The key of a pending delayed message or of an open half message cannot be freed. Cancel the
    message or roll it back instead.
    """
    found = await _find(cluster, topic, key, message_group)
    member = await cluster.member(found.answer.broker)
    request = pb.FreeDedupKeyRequest(
        topic=topic,
        key=key,
        message_group=message_group,
        dry_run=dry_run,
        requested_by=caller,
        audit=author.of(f"Topic:{topic}"),
    )
    freed = await member.client.call(calls.FREE_DEDUP_KEY, request)
    return DedupKeyDeletionView(
        **_key_of(key, message_group, BrokerAnswer(member.name, freed)),
        unreachable=found.unreachable or None,
        dry_run=dry_run,
        by=caller,
    )


async def _find(cluster: Brokers, topic: str, key: str, message_group: str) -> FoundKey:
    """Return a key, of the oldest message if several broker groups know it.

    Raises DedupKeyNotFound, or BrokerGroupUnreachable if an unreachable one may know the key.
    """
    request = pb.GetDedupKeyRequest(topic=topic, key=key, message_group=message_group)
    found = await cluster.call_all(calls.GET_DEDUP_KEY, request)
    return FoundKey(
        min(found.answers, key=lambda answer: answer.value.stored_at_ms), found.unreachable
    )


def _counts_of(broker: str, status: pb.DedupStatus) -> BrokerGroupDedupView:
    return BrokerGroupDedupView(
        broker=broker,
        keys=status.keys,
        pending_keys=status.pending_keys,
        bytes=status.memory_bytes,
        bytes_max=status.memory_bytes_max,
        oldest_at_ms=status.oldest_at_ms or None,
        hits=status.hits,
        mismatches=status.mismatches,
        rejected=status.rejected,
        replaced=status.replaced,
    )


def _key_of(
    key: str, message_group: str, answer: BrokerAnswer[pb.DedupKeyStatus]
) -> dict[str, Any]:
    status = answer.value
    return {
        "key": key,
        "message_group": message_group or None,
        "broker": answer.broker,
        "message_id": status.message_id or None,
        "stored_at_ms": status.stored_at_ms,
        "window_end_ms": status.window_end_ms,
        "timer_id": status.timer_id if status.HasField("timer_id") else None,
        "transaction_id": status.transaction_id or None,
    }
