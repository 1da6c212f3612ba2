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
    is_order_lost: set[tuple[str, str]] = set()
    filters: dict[tuple[str, str], list[pb.PolledFilter]] = {}
    for _, reply in answers.answers:
        for conflict in reply.conflicts:
            pair = conflict.group, conflict.topic
            if conflict.is_order_lost:
                is_order_lost.add(pair)
            if conflict.filters:
                filters.setdefault(pair, []).extend(conflict.filters)
    shown = [
        ConflictView(kind="filter", topic=topic, group=group, filters=_newest(found))
        for (group, topic), found in filters.items()
    ]
    shown += [
        ConflictView(kind="order", topic=topic, group=group) for group, topic in is_order_lost
    ]
    return sorted(shown, key=lambda each: (each.group, each.topic, each.kind))


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
