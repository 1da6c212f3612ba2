"""Warnings of a dry run of a replay: why consumers may not get the messages as expected."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, final

from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.server.round.polled_filters import FILTER_LIFE_MS

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.layout.numbers import GroupId, TopicId
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup
    from tidemill.broker.server.round.turn import Turn

WARNINGS_MAX: Final = 16


@final
class ReplayWarnings:
    """The warnings about some messages, each text once."""

    def __init__(self, engine: Engine, turn: Turn) -> None:
        self._engine = engine
        self._turn = turn
        self._pairs: dict[tuple[GroupId, TopicId], set[str]] = {}  # with the tags; "": without

    def note(self, group: ConsumerGroup, topic_id: TopicId, tag: str) -> None:
        """Note a message of a topic that its group would get."""
        self._pairs.setdefault((group.id, topic_id), set()).add(tag)

    def texts(self) -> list[str]:
        """Return the warnings, at most `WARNINGS_MAX`."""
        texts: list[str] = []
        for (group_id, topic_id), tags in self._pairs.items():
            texts += self._of_group(group_id)
            texts += self._of_pair(group_id, topic_id, tags)
        return list(dict.fromkeys(texts))[:WARNINGS_MAX]

    def _of_group(self, group_id: GroupId) -> list[str]:
        group = self._engine.catalog.groups[group_id]
        if group.paused is None or not group.is_paused(self._turn.now_ms):
            return []
        # A pause is at most 30 days long. `common.times` imports the library of the command line.
        end = datetime.fromtimestamp(group.paused.until_ms // 1_000, UTC)
        shown = f"{end:%Y-%m-%d %H:%M:%S}Z"
        return [f"group {group.name} is paused until {shown}: it gets the messages after that"]

    def _of_pair(self, group_id: GroupId, topic_id: TopicId, tags: set[str]) -> list[str]:
        group = self._engine.catalog.groups[group_id]
        topic = self._engine.catalog.topics[topic_id]
        filters = self._turn.polls.filters.filters_of(
            group_id, topic_id, monotonic_ms=self._turn.monotonic_ms
        )
        texts = []
        if filters is None:
            texts.append(
                f"no consumer of group {group.name} has polled topic {topic.name} in the last"
                f" {FILTER_LIFE_MS // 60_000} minutes: the messages wait for one"
            )
        else:
            excluded = sorted(tag for tag in tags if filters and tag not in filters)
            if excluded:
                names = ", ".join([tag or "(no tag)" for tag in excluded[:WARNINGS_MAX]])
                texts.append(
                    f"the filter of group {group.name} on topic {topic.name} excludes the tag"
                    f" {names}: the group skips these messages"
                )
        if group.is_ordered:
            order = "message group" if topic.type is TopicType.FIFO else "queue"
            texts.append(
                f"group {group.name} is FIFO: replayed messages of topic {topic.name} come after"
                f" newer messages of their {order}"
            )
        return texts
