"""Dead letters as the items of operations: their filter, count, samples and warnings."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Final, final

from tidemill.broker.engine.dead_letter.bulk import LetterCount, LetterFilter
from tidemill.broker.engine.layout.message import Reason
from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.server.admin.lookup import find_group
from tidemill.broker.server.admin.operation_subjects import BulkStart
from tidemill.broker.server.round.replay_warnings import WARNINGS_MAX, ReplayWarnings
from tidemill.broker.server.wire.dead_letters import letter_of
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.turn import Turn

TOPIC_DELETED: Final = (
    "the topic of some dead letters was deleted: they stay open; copy them to another topic"
)
BODY_LOST: Final = (
    "the body of some dead letters is lost: they stay open; copy them with a new body"
)
_DAMAGED: Final = Reason.DAMAGED.name.lower()


@final
class LetterSubject:
    """The open dead letters of a consumer group."""

    noun = "dead letters"

    def check(self, engine: Engine, _turn: Turn, request: pb.BeginOperationRequest) -> Hashable:
        """Return the group and the filter. Raises GroupNotFound, Conflict."""
        group = find_group(engine, request.group)
        engine.dead_letters.check_level()
        return group.id, _filter(request)

    def begin_count(
        self, engine: Engine, _turn: Turn, request: pb.BeginOperationRequest, as_of_ms: int
    ) -> LetterCount:
        """Begin a count of the dead letters that match."""
        group = find_group(engine, request.group)
        return LetterCount(engine.letter_inspection, group, _filter(request), as_of_ms=as_of_ms)

    def check_count(self, count: LetterCount) -> None:
        """Accept each count: it has all dead letters that match."""

    def describe(
        self,
        engine: Engine,
        turn: Turn,
        request: pb.BeginOperationRequest,
        count: LetterCount,
        reply: pb.BeginOperationReply,
    ) -> None:
        """Add the oldest ones, and why consumers may not get the messages as expected."""
        reply.sample.extend([letter_of(status) for status in count.sample])
        if request.kind != pb.OPERATION_KIND_REPLAY:
            return
        group, warnings = find_group(engine, request.group), ReplayWarnings(engine, turn)
        texts = []
        for topic_id, tag in sorted(count.pairs):
            if engine.catalog.is_alive(TopicId(topic_id)):
                warnings.note(group, TopicId(topic_id), tag)
            else:
                texts.append(TOPIC_DELETED)
        if any(status.reason == _DAMAGED for status in count.sample):
            texts.append(BODY_LOST)
        texts = list(dict.fromkeys([*texts, *warnings.texts()]))
        reply.warnings.extend(texts[:WARNINGS_MAX])

    def start(
        self, engine: Engine, _turn: Turn, request: pb.BeginOperationRequest, count: LetterCount
    ) -> BulkStart:
        """Return the begin of an operation on the dead letters of a count."""
        assert count.topic is not None, "it has dead letters"
        wanted = _filter(request)._asdict()
        facts = {
            "deadLetters": count.count,
            "filter": {name: value for name, value in wanted.items() if value},
        }
        group = find_group(engine, request.group)
        return BulkStart(group.id, count.topic.id, {"filter": wanted}, facts)


def _filter(request: pb.BeginOperationRequest) -> LetterFilter:
    wanted = request.filter
    return LetterFilter(wanted.topic, wanted.reason, wanted.tag, wanted.from_ms, wanted.to_ms)
