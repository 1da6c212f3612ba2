"""Filter expressions of consumers: which messages of a topic a group asks for."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from tidemill.common.errors import IllegalFilter, IllegalTag
from tidemill.message import limits
from tidemill.message.resources import resource_name
from tidemill.message.rules import check_tag
from tidemill.message.sql92.grammar import parse
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

_EVERYTHING = frozenset({"", "*"})
_SHOWN_CHARS = 100  # of a rejected filter, in the error
_PARSED_MAX: Final = 1_000  # SQL filters: two texts of about 4 KB each


class WantedMessages(NamedTuple):
    """The messages that a filter asks for; without tags and SQL, every message."""

    tags: tuple[str, ...] = ()
    sql: str = ""  # in its canonical form


EVERY_MESSAGE: Final = WantedMessages()


def check_filters(settings: v2.Settings, topic: str = "") -> None:
    """Check the filters in the settings of a client, or only that of `topic`, a full name.

    Raises IllegalFilter. A client that learned it only from its receives would be silent: push
    consumers report errors of receives nowhere but in a log file.
    """
    for entry in settings.subscription.subscriptions:
        if not topic or resource_name(entry.topic).full == topic:
            wanted_by(entry.expression)


def wanted_by(expression: v2.FilterExpression) -> WantedMessages:
    """Return the messages that a filter asks for. Raises IllegalFilter.

    An expression without a type is a tag filter, as in RocketMQ: Go clients of 2023 send no type.
    """
    if expression.type == v2.SQL:
        limits.SQL_FILTER.check_text(expression.expression)
        return WantedMessages(sql=_canonical(expression.expression))
    limits.FILTER.check_text(expression.expression)
    text = expression.expression.strip()
    if text in _EVERYTHING:
        return EVERY_MESSAGE
    # Nothing between two bars is nothing that is asked for, as in the reference.
    tags = [tag.strip() for tag in text.split("||") if tag.strip()]
    limits.FILTER_TAGS.check_count(len(tags))
    # The star among tags asks for everything.
    if "*" in tags:
        return EVERY_MESSAGE
    if not tags:
        raise IllegalFilter(f"the tag filter {text[:_SHOWN_CHARS]!r} names no tag")
    for tag in tags:
        try:
            check_tag(tag)
        except IllegalTag as error:
            raise IllegalFilter(
                f"the tag filter {text[:_SHOWN_CHARS]!r} cannot be used: {error.message}"
            ) from None
    return WantedMessages(tags=tuple(sorted(set(tags))))


@functools.lru_cache(_PARSED_MAX)
def _canonical(text: str) -> str:
    return parse(text).canonical()
