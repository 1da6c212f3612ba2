"""The JSON of ways to consume a topic that are allowed and almost always a mistake."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from tidemill.admin.cluster.brokers import BrokerAnswers
from tidemill.admin.json.schema import Schema
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class PolledFilterView(Schema):
    """A filter that consumers of a group used within the last ten minutes."""

    expression: str = Field(description="The tags, or the SQL92 filter. * matches every message.")
    client_id: str = Field(description="Id of the client that polled with this filter last.")
    polled_ms: int = Field(description="Time since that poll, in ms.")


class TopicFilterView(PolledFilterView):
    """A filter that consumers of a group used for a topic within the last ten minutes."""

    topic: str = Field(description="Name of the topic.")


class ConflictView(Schema):
    """A conflict of a consumer group and a topic."""

    kind: Literal["filter", "order"] = Field(
        description="filter: consumers of the group use different filters, so messages that only"
        " one filter matches can be lost for the group. order: the topic is FIFO and the group is"
        " CONCURRENT, so the group receives the messages out of order."
    )
    topic: str = Field(description="Name of the topic.")
    group: str = Field(description="Name of the consumer group.")
    filters: list[PolledFilterView] | None = Field(
        None, description="The different filters. Missing for the kind order."
    )


def conflicts_of(answers: BrokerAnswers[pb.ConflictList]) -> list[ConflictView]:
    """Render the conflicts that the broker groups know, each once."""
    is_order_lost = {
        (conflict.group, conflict.topic)
        for _, reply in answers.answers
        for conflict in reply.conflicts
        if conflict.is_order_lost
    }
    shown = [
        ConflictView(kind="filter", topic=topic, group=group, filters=found)
        for (group, topic), found in _filters_of(answers).items()
        if len(found) > 1
    ]
    shown += [
        ConflictView(kind="order", topic=topic, group=group) for group, topic in is_order_lost
    ]
    return sorted(shown, key=lambda each: (each.group, each.topic, each.kind))


def topic_filters_of(answers: BrokerAnswers[pb.ConflictList]) -> list[TopicFilterView]:
    """Render the filters of one consumer group at all broker groups, by topic."""
    return [
        TopicFilterView(topic=topic, **each.model_dump())
        for (_, topic), found in sorted(_filters_of(answers).items())
        for each in found
    ]


def _filters_of(
    answers: BrokerAnswers[pb.ConflictList],
) -> dict[tuple[str, str], list[PolledFilterView]]:
    """Return the filters of all broker groups by consumer group and topic, each once."""
    filters: dict[tuple[str, str], list[pb.PolledFilter]] = {}
    for _, reply in answers.answers:
        for conflict in reply.conflicts:
            if conflict.filters:
                filters.setdefault((conflict.group, conflict.topic), []).extend(conflict.filters)
    return {pair: _newest(found) for pair, found in filters.items()}


def _newest(filters: Iterable[pb.PolledFilter]) -> list[PolledFilterView]:
    """Return each filter with its last poll at any broker group."""
    newest: dict[str, pb.PolledFilter] = {}
    for each in filters:
        expression = each.sql or " || ".join(each.tags) or "*"
        known = newest.setdefault(expression, each)
        if each.polled_ms < known.polled_ms:
            newest[expression] = each
    return [
        PolledFilterView(expression=expression, client_id=each.client_id, polled_ms=each.polled_ms)
        for expression, each in sorted(newest.items())
    ]
