"""A world in which a consumer group fails messages, and an operator settles the dead letters."""

from __future__ import annotations

import json

from tests.support.worlds.engine_world import GROUP, TOPIC, PoppedMessage, World
from tidemill.broker.engine.dead_letter.bulk import LetterCount, LetterFilter
from tidemill.broker.engine.dead_letter.letters import FoundLetter, LetterOutcome
from tidemill.broker.engine.layout.operation import Operation, OperationBegun, OperationKind
from tidemill.broker.engine.metadata.catalog import ConsumerGroup

DEAD = f"%DLQ%{GROUP}"


class LetterWorld(World):
    """One engine with dead letters."""

    def found_group(self, name: str = GROUP) -> ConsumerGroup:
        group = self.engine.catalog.find_group(name)
        assert group is not None
        return group

    def fail(self, *popped: PoppedMessage) -> None:
        """Let the client forward messages to the dead-letter topic."""
        for one in popped:
            self.engine.commands.dead_letter(one.delivery, self.now_ms)
        self.commit()

    def dead(self, *texts: str, topic: str = TOPIC, size: int = 0, **options: object) -> None:
        """Send messages and let the group fail them."""
        self.group(**options)  # type: ignore[arg-type]  # the caller's business
        self.send(*texts, topic=topic, size=size)
        while popped := self.pop(32, topic=topic):
            self.fail(*popped)

    def replay(self, *offsets: int) -> list[LetterOutcome]:
        group, letters = self.found_group(), self.engine.dead_letters
        outcomes = [letters.replay(group, offset, self.now_ms) for offset in offsets]
        self.commit()
        return outcomes

    def discard(self, *offsets: int) -> list[LetterOutcome]:
        outcomes = self.engine.dead_letters.discard(self.found_group(), offsets, self.now_ms)
        self.commit()
        return outcomes

    def begin_operation(
        self, kind: OperationKind, *, rate_per_s: int = 1_000, group: str = GROUP, **wanted: object
    ) -> Operation:
        """Begin an operation on the dead letters that match, as a count has found them."""
        found, engine = self.found_group(group), self.engine
        letter_filter = LetterFilter(**wanted)  # type: ignore[arg-type]  # the caller's business
        count = LetterCount(engine.letter_inspection, found, letter_filter, as_of_ms=self.now_ms)
        while count.step():
            pass
        assert count.topic is not None
        details = {"filter": letter_filter._asdict(), "by": "ops", "user": "", "key": ""}
        entry = OperationBegun(
            kind,
            found.id,
            count.topic.id,
            self.now_ms,
            count.begin,
            count.end,
            count.count,
            rate_per_s,
            json.dumps(details),
        )
        operation = engine.operations.begin(entry, self.now_ms)
        self.commit()
        return operation

    def states(self) -> list[str]:
        """Return the states of all dead letters that are stored."""
        topic = self.engine.dead_letters.topic_of(self.found_group())
        if topic is None:
            return []
        queue = self.engine.dead_letters.queue_of(topic)
        letters = self.engine.catalog.settled_letters
        offsets = range(queue.min_offset, queue.max_offset)
        return [letters.state_of(topic.id, offset).name for offset in offsets]

    def letter(self, offset: int) -> FoundLetter:
        topic = self.engine.dead_letters.topic_of(self.found_group())
        assert topic is not None
        found = self.engine.dead_letters.read(topic, offset)
        assert found is not None
        return found
