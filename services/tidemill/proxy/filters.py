"""Filter expressions of consumers: which messages of a topic a group asks for."""

from __future__ import annotations

from tidemill.common.errors import IllegalFilter, IllegalTag, NotBuilt
from tidemill.message import limits
from tidemill.message.rules import check_tag
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

_EVERYTHING = frozenset({"", "*"})


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
    if not tags:
        raise IllegalFilter(f"the tag filter {text!r} names no tag")
    for tag in tags:
        try:
            check_tag(tag)
        except IllegalTag as error:
            raise IllegalFilter(
                f"the tag filter {text!r} cannot be used: {error.message}"
            ) from None
    # The star among tags asks for everything.
    return [] if "*" in tags else sorted(set(tags))
