"""Filter expressions: what they ask for, and which are refused."""

from __future__ import annotations

import pytest

from tidemill.common.errors import IllegalFilter, NotBuilt
from tidemill.proxy.filters import tags_of
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("*", []),
        ("", []),
        ("  ", []),
        (" * ", []),
        ("a", ["a"]),
        ("a||b", ["a", "b"]),
        ("a||||b||", ["a", "b"]),
        (" a ||  b ", ["a", "b"]),
        ("b||a||b", ["a", "b"]),
        ("a || *", []),
        ("tag with blanks", ["tag with blanks"]),
    ],
)
def test_a_tag_filter_asks_for_its_tags(expression: str, tags: list[str]) -> None:
    assert tags_of(v2.FilterExpression(type=v2.TAG, expression=expression)) == tags


def test_no_filter_asks_for_everything() -> None:
    assert tags_of(v2.FilterExpression()) == []


@pytest.mark.parametrize("expression", ["||", " || ", "a|b", "a\x00", "x" * 16_385])
def test_a_tag_filter_that_cannot_be_understood_is_refused(expression: str) -> None:
    with pytest.raises(IllegalFilter):
        tags_of(v2.FilterExpression(type=v2.TAG, expression=expression))


def test_an_expression_without_a_type_is_refused() -> None:
    with pytest.raises(IllegalFilter):
        tags_of(v2.FilterExpression(expression="a"))


def test_sql_is_not_served_yet() -> None:
    with pytest.raises(NotBuilt):
        tags_of(v2.FilterExpression(type=v2.SQL, expression="a > 1"))
