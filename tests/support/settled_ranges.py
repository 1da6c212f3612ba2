"""The ranges of settled dead letters, as a snapshot has them."""

from __future__ import annotations

from tidemill.broker.engine.layout import dead_letter
from tidemill.broker.engine.layout.dead_letter import SettledRange
from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.metadata.settled_letters import SettledLetters


def ranges_of(letters: SettledLetters, topic_id: TopicId) -> list[SettledRange]:
    """Return the ranges of a topic, in order."""
    sections = [dead_letter.decode_ranges(section) for section in letters.freeze()]
    return [row for stated in sections if stated.topic_id == topic_id for row in stated.ranges]
