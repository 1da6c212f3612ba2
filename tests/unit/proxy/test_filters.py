"""Filter expressions: the selected tags, and rejected expressions."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.common.errors import IllegalFilter, IllegalTag
from tidemill.message import limits
from tidemill.message.rules import check_tag
from tidemill.proxy.filters import EVERY_MESSAGE, WantedMessages, wanted_by
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
def test_a_tag_filter_selects_its_tags(expression: str, tags: list[str]) -> None:
    wanted = wanted_by(v2.FilterExpression(type=v2.TAG, expression=expression))
    assert wanted == WantedMessages(tags=tuple(tags))


@given(st.text().filter(lambda tag: tag != "*"))
@example(" a")
@example("t" * limits.TAG.limit)
@example("t" * (limits.TAG.limit + 1))
def test_a_filter_can_select_every_tag_that_a_send_accepts(tag: str) -> None:
    try:
        check_tag(tag)
    except IllegalTag:
        return
    assert wanted_by(v2.FilterExpression(type=v2.TAG, expression=tag)).tags == (tag,)


def test_the_filter_of_all_messages_selects_the_tag_star() -> None:
    check_tag("*")
    assert wanted_by(v2.FilterExpression(type=v2.TAG, expression="*")).tags == ()


def test_a_tag_may_have_all_bytes_that_the_properties_may_have() -> None:
    longest = "t" * limits.PROPERTIES.limit
    check_tag(longest)
    assert wanted_by(v2.FilterExpression(type=v2.TAG, expression=longest)).tags == (longest,)


def test_an_empty_filter_selects_all_messages() -> None:
    assert wanted_by(v2.FilterExpression()) == EVERY_MESSAGE


@pytest.mark.parametrize("expression", ["||", " || ", "a|b", "a\x00", "x" * 16_385])
def test_an_invalid_tag_filter_is_rejected(expression: str) -> None:
    with pytest.raises(IllegalFilter):
        wanted_by(v2.FilterExpression(type=v2.TAG, expression=expression))


def test_an_expression_without_a_type_is_a_tag_filter() -> None:
    """Go clients of 2023 send no type."""
    assert wanted_by(v2.FilterExpression(expression="b||a")).tags == ("a", "b")


def test_an_sql_filter_goes_to_the_broker_in_its_canonical_form() -> None:
    wanted = wanted_by(v2.FilterExpression(type=v2.SQL, expression=" 5<a and\nb in ('y','x')"))
    assert wanted == WantedMessages(sql="a > 5 AND b IN ('x', 'y')")


@pytest.mark.parametrize("expression", ["", "*", "a", "a LIKE 'x%'", f"a = '{'x' * 4_096}'"])
def test_an_invalid_sql_filter_is_rejected(expression: str) -> None:
    with pytest.raises(IllegalFilter, match=r"^(SQL filter, column|an SQL filter has at most)"):
        wanted_by(v2.FilterExpression(type=v2.SQL, expression=expression))
