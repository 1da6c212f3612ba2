"""Filter expressions of consumers: which messages of a topic a group asks for."""

from __future__ import annotations

from tidemill.common.errors import IllegalFilter, IllegalTag, NotBuilt
from tidemill.message import limits
from tidemill.message.resources import resource_name
from tidemill.message.rules import check_tag
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

_EVERYTHING = frozenset({"", "*"})
_SHOWN_CHARS = 100  # of a rejected filter, in the error


def check_filters(settings: v2.Settings, topic: str = "") -> None:
    """Check the filters in the settings of a client, or only that of `topic`, a full name.

    Raises IllegalFilter or NotBuilt. A client that learned it only from its receives would be
    silent: push consumers report errors of receives nowhere but in a log file.
    """
    for entry in settings.subscription.subscriptions:
        if not topic or resource_name(entry.topic).full == topic:
            tags_of(entry.expression)


def tags_of(expression: v2.FilterExpression) -> list[str]:
    """Return the tags that a filter asks for; none stands for every message."""
    limits.FILTER.check_text(expression.expression)
    text = expression.expression.strip()
    if expression.type == v2.SQL:
        raise NotBuilt("SQL filters are not served yet; filter by tag, or in the application")
    if text in _EVERYTHING:
        return []
    if expression.type != v2.TAG:
        raise IllegalFilter("the filter has an expression and no type; say TAG")
    # Nothing between two bars is nothing that is asked for, as in the reference.
    tags = [tag.strip() for tag in text.split("||") if tag.strip()]
    limits.FILTER_TAGS.check_count(len(tags))
    # The star among tags asks for everything.
    if "*" in tags:
        return []
    if not tags:
        raise IllegalFilter(f"the tag filter {text[:_SHOWN_CHARS]!r} names no tag")
    for tag in tags:
        try:
            check_tag(tag)
        except IllegalTag as error:
            raise IllegalFilter(
                f"the tag filter {text[:_SHOWN_CHARS]!r} cannot be used: {error.message}"
            ) from None
    return sorted(set(tags))
