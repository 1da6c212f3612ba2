"""REST models of the levels of a PRIORITY topic, summed over broker groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from tidemill.admin.json.topics import LevelReaderView, LevelView
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def levels_of(
    statuses: Sequence[pb.TopicStatus], *, is_shown: Callable[[str], bool]
) -> list[LevelView] | None:
    """Return the levels of a topic, with the shown consumer groups; None without levels."""
    if statuses[0].topic.type != pb.TOPIC_TYPE_PRIORITY:
        return None
    messages: dict[int, int] = defaultdict(int)
    progress: dict[tuple[int, str], list[pb.LevelProgress]] = defaultdict(list)
    for status in statuses:
        for queue in status.queues:
            messages[queue.queue_id] += queue.max_offset - queue.min_offset
        for reader in status.readers:
            for level in reader.levels:
                progress[level.level, reader.group].append(level)
    names = {reader.group for status in statuses for reader in status.readers}
    groups = sorted(filter(is_shown, names))
    return [
        LevelView(
            level=level,
            messages=count,
            groups=[_reader_of(group, progress[level, group]) for group in groups],
        )
        for level, count in sorted(messages.items())
    ]


def _reader_of(group: str, parts: Sequence[pb.LevelProgress]) -> LevelReaderView:
    """Sum the progress of a consumer group in a level. Parts of idle levels are missing."""
    oldest_ms = [part.oldest_ready_at_ms for part in parts if part.oldest_ready_at_ms]
    return LevelReaderView(
        group=group,
        ready=sum(part.ready_count for part in parts),
        blocked=sum(part.blocked_count for part in parts),
        in_flight=sum(part.in_flight_count for part in parts),
        oldest_ready_at_ms=min(oldest_ms, default=None),
    )
