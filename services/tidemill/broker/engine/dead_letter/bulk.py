"""Replays and discards of the dead letters of a consumer group that match a filter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

from tidemill.broker.engine.dead_letter.authors import SettlementAuthors
from tidemill.broker.engine.dead_letter.inspection import (
    BYTES_A_STEP,
    LETTERS_A_STEP,
    LetterInspection,
    LetterStatus,
    reason_of,
)
from tidemill.broker.engine.dead_letter.letters import DeadLetters, FoundLetter, LetterOutcome
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.dead_letter import DeadLetterState
from tidemill.broker.engine.layout.numbers import GroupId
from tidemill.broker.engine.layout.operation import ItemFailure, Operation, OperationKind
from tidemill.broker.engine.metadata.catalog import Catalog, ConsumerGroup, Topic
from tidemill.broker.engine.operation.runner import OperationTurn, WorkResult
from tidemill.common.errors import (
    Conflict,
    GroupNotFound,
    MessageBodyTooLarge,
    Repairing,
    TopicNotFound,
)
from tidemill.message import stored_message

SAMPLE_MAX: Final = 10  # dead letters that a count shows
TOO_LARGE: Final = "TOO_LARGE"  # the outcome of a message that no longer fits into a segment
PAIRS_MAX: Final = 1_000  # topics and tags that a count remembers


class LetterFilter(NamedTuple):
    """The dead letters that an operation settles. An empty text matches everything."""

    topic: str = ""
    reason: str = ""
    tag: str = ""
    from_ms: int = 0
    to_ms: int = 0  # exclusive; 0: no end


def filter_of(operation: Operation) -> LetterFilter:
    """Return the filter of an operation."""
    details: dict[str, Any] = json.loads(operation.details)
    return LetterFilter(**details["filter"])


@final
class LetterMatches:
    """The open dead letters of a group that match a filter."""

    def __init__(
        self,
        letters: DeadLetters,
        catalog: Catalog,
        topic: Topic,
        wanted: LetterFilter,
        *,
        as_of_ms: int,
    ) -> None:
        self._letters = letters
        self._settled = catalog.settled_letters
        self._topic = topic
        self._wanted = wanted
        self._as_of_ms = as_of_ms
        self._tag_hash = stored_message.tag_hash(wanted.tag) if wanted.tag else 0

    def find(self, offset: int) -> FoundLetter | None:
        """Return an open dead letter that matches. Raises Repairing."""
        wanted = self._wanted
        if self._settled.state_of(self._topic.id, offset) is not DeadLetterState.OPEN:
            return None
        try:
            queue = self._letters.queue_of(self._topic)
            if not queue.min_offset <= offset < queue.max_offset:
                return None
            if self._tag_hash and queue.entry(offset)[2] != self._tag_hash:
                return None
            found = self._letters.read(self._topic, offset)
        except LookupError:
            return None
        except BlockFileDamaged as error:
            raise Repairing from error
        if found is None:
            return None
        # The time of a damaged one is unknown. It counts as old.
        at_ms = 0 if found.record is None else found.record.header.stored_at_ms
        if at_ms > self._as_of_ms or at_ms < wanted.from_ms:
            return None
        if wanted.to_ms and at_ms >= wanted.to_ms:
            return None
        if wanted.topic and found.cause.origin != wanted.topic:
            return None
        return None if wanted.reason and reason_of(found) != wanted.reason else found


@final
class LetterCount:
    """The count of a dry run: call `step` until it returns False, then read the result."""

    def __init__(
        self,
        inspection: LetterInspection,
        group: ConsumerGroup,
        wanted: LetterFilter,
        *,
        as_of_ms: int,
    ) -> None:
        letters = inspection.letters
        self.topic = topic = letters.topic_of(group)  # None: the group has no dead letters yet
        self._inspection = inspection
        self._authors = SettlementAuthors(inspection.catalog)
        self.begin = self.end = self._position = 0
        if topic is not None:
            queue = letters.queue_of(topic)
            self.begin = self._position = int(queue.min_offset)
            self.end = int(queue.max_offset)
            self._matches = LetterMatches(
                letters, inspection.catalog, topic, wanted, as_of_ms=as_of_ms
            )
        self.count = self.size_bytes = 0
        self.sample: list[LetterStatus] = []  # the oldest ones
        self.pairs: set[tuple[int, str]] = set()  # topic ids and tags, for warnings

    def step(self) -> bool:
        """Do one slice. Raises Repairing, and Conflict if the topic was deleted meanwhile."""
        if self.topic is not None and self.topic.id not in self._inspection.catalog.topics:
            raise Conflict(
                f"topic {self.topic.name} was deleted while its dead letters were counted; count"
                f" again"
            )
        size = 0
        for _ in range(LETTERS_A_STEP):
            if self._position >= self.end:
                return False
            found = self._matches.find(self._position)
            self._position += 1
            if found is None:
                continue
            blob = b"" if found.record is None else found.record.tail
            self.count += 1
            size += len(blob)
            self.size_bytes += len(blob)
            if len(self.sample) < SAMPLE_MAX:
                self.sample.append(self._inspection.describe(found, self._authors))
            if blob and len(self.pairs) < PAIRS_MAX:
                self.pairs.add((found.cause.root_topic_id, stored_message.tag_of(blob)))
            if size >= BYTES_A_STEP:
                break
        return True


@final
class LetterWork:
    """The work of operations on dead letters."""

    def __init__(self, letters: DeadLetters, catalog: Catalog) -> None:
        self._letters = letters
        self._catalog = catalog

    def run(self, operation: Operation, position: int, turn: OperationTurn) -> WorkResult:
        """Settle some dead letters of an operation. Raises ServiceError."""
        group = self._catalog.groups.get(GroupId(operation.subject_id))
        if group is None:
            raise GroupNotFound("the consumer group was deleted")
        topic = self._letters.topic_of(group)
        if topic is None or topic.id != operation.topic_id:
            raise TopicNotFound("the dead-letter topic was deleted, with all that were counted")
        matches = LetterMatches(
            self._letters, self._catalog, topic, filter_of(operation), as_of_ms=operation.as_of_ms
        )
        chosen: list[int] = []
        size = looked = 0
        while position < operation.end and looked < LETTERS_A_STEP and len(chosen) < turn.items_max:
            found = matches.find(position)
            if found is not None:
                chosen.append(position)
                size += 0 if found.record is None else len(found.record.tail)
            position += 1
            looked += 1
            if size >= BYTES_A_STEP:
                break
        if operation.kind == OperationKind.DISCARD and chosen:
            self._letters.discard(group, chosen, turn.now_ms, operation_id=operation.id)
        if operation.kind == OperationKind.REPLAY:
            return self._replay(operation, group, chosen, position, turn.now_ms)
        return WorkResult(position, len(chosen))

    def _replay(
        self,
        operation: Operation,
        group: ConsumerGroup,
        chosen: Sequence[int],
        position: int,
        now_ms: int,
    ) -> WorkResult:
        """Replay dead letters up to a position."""
        changed_count = 0
        failures: list[ItemFailure] = []
        for offset in chosen:
            # The record of failures is before those of later dead letters.
            if failures and isinstance(self._letters.plan_replay(group, offset), FoundLetter):
                return WorkResult(offset, changed_count, failures)
            try:
                outcome = self._letters.replay(group, offset, now_ms, operation_id=operation.id)
            except MessageBodyTooLarge:
                failures.append(ItemFailure(offset, TOO_LARGE))
                continue
            if outcome is LetterOutcome.REPLAYED:
                changed_count += 1
            else:
                failures.append(ItemFailure(offset, outcome))
        return WorkResult(position, changed_count, failures)
