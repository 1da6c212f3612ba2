"""The topics and consumer groups that a request names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from tidemill.broker.server.wire import config_log
from tidemill.common.errors import (
    AlreadyExists,
    Forbidden,
    GroupNotFound,
    PreconditionFailed,
    QueueNotFound,
    TopicNotFound,
)
from tidemill.message.resource_names import HIDDEN_TOPIC_PREFIX, check_own_topic
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup, Topic


def find_topic(engine: Engine, name: str) -> Topic:
    """Return the topic of that name. Raises TopicNotFound."""
    topic = engine.catalog.find_topic(name)
    if topic is None or name.startswith(HIDDEN_TOPIC_PREFIX):
        raise TopicNotFound(f"there is no topic {name!r}")
    return topic


def use_topic(engine: Engine, name: str, now_ms: int) -> Topic:
    """Return a topic for sending. Create it if it is missing and clients may create topics."""
    topic = engine.catalog.find_topic(name)
    if topic is None or name.startswith(HIDDEN_TOPIC_PREFIX):
        check_own_topic(name)
        engine.administration.ensure(name, "", now_ms)
        topic = engine.catalog.find_topic(name)
        assert topic is not None, "ensure creates the topic"
        config_log.topic_created_by_use(topic, engine.catalog.topic_ids)
    if topic.is_system:
        raise Forbidden(f"only the broker stores messages in {name}; send to another topic")
    return topic


def check_existence(
    existence: pb.Existence.ValueType, name: str, *, is_topic: bool, exists: bool
) -> None:
    """Check that a topic or consumer group is new or exists, as the request demands.

    Raises AlreadyExists, TopicNotFound, GroupNotFound.
    """
    kind = "topic" if is_topic else "consumer group"
    if existence == pb.EXISTENCE_MUST_BE_NEW and exists:
        raise AlreadyExists(f"the {kind} {name!r} exists, and this request may only create it")
    if existence == pb.EXISTENCE_MUST_EXIST and not exists:
        error = TopicNotFound if is_topic else GroupNotFound
        raise error(f"there is no {kind} {name!r}, and this request may not create it")


class _ChangeRequest(Protocol):
    """A request that may name the version that it expects."""

    @property
    def expected(self) -> pb.ExpectedVersion:
        """The expected version, if it is set."""

    def HasField(self, _name: Literal["expected"], /) -> bool:
        """Return whether the field is set."""


def check_expected(
    request: _ChangeRequest, found: Topic | ConsumerGroup | None, *, also_of_copy: bool = False
) -> None:
    """Check that a topic or consumer group has the version that the request expects.

    Only the home compares a change at all broker groups: a copy may be late, and its broker group
    would refuse the change alone. `also_of_copy` is for a change at single broker groups.
    Raises PreconditionFailed.
    """
    if not request.HasField("expected"):
        return
    expected = request.expected
    if found is None:
        raise PreconditionFailed("it does not exist any more; nothing was changed")
    if found.home_id and not also_of_copy:
        return
    present, wanted = (found.home_id or found.id, found.version), (expected.id, expected.version)
    if present == wanted:
        return
    versions = (
        f"{found.name!r} has the version {present[0]}.{present[1]}, and the request expects"
        f" {wanted[0]}.{wanted[1]}; nothing was changed"
    )
    if found.home_id and present < wanted:
        raise PreconditionFailed(
            f"{versions}: this broker group has not got the last change from the home yet; repeat"
            " the request"
        )
    raise PreconditionFailed(f"{versions}: read it again")


def find_group(engine: Engine, name: str) -> ConsumerGroup:
    """Return the consumer group of that name. Raises GroupNotFound."""
    group = engine.catalog.find_group(name)
    if group is None:
        raise GroupNotFound(f"there is no consumer group {name!r}")
    return group


def check_queue_id(topic: Topic, queue_id: int) -> None:
    """Raise QueueNotFound unless the topic has this queue."""
    if queue_id >= topic.queues:
        raise QueueNotFound(
            f"topic {topic.name!r} has the queues 0 to {topic.queues - 1}, not {queue_id}"
        )
