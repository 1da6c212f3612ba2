"""Numbers of lists, which may be unknown."""

from __future__ import annotations

from typing import get_args

import pytest

from tidemill.admin.activity.rows import GROUP_FIELDS, TOPIC_FIELDS
from tidemill.cli import numbers
from tidemill.cli.numbers import list_query, number, warn_unknown


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "?"), (0, "0"), (12, "12"), (0.0, "0.0"), (0.04, "<0.1"), (2.26, "2.3")],
)
def test_only_zero_is_shown_as_zero(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_sort_is_passed_on() -> None:
    assert list_query(None, None) == {}
    assert list_query("-lag", "a.") == {"sort": "-lag", "prefix": "a."}


def test_the_help_names_each_field() -> None:
    for option, fields in ((numbers.TopicSort, TOPIC_FIELDS), (numbers.GroupSort, GROUP_FIELDS)):
        text = get_args(option)[1].help
        assert all(field in text for field in fields)


def test_each_reason_of_unknown_numbers_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    warn_unknown([{"unknown": "too new"}, {}, {"unknown": "too new"}])
    captured = capsys.readouterr()
    assert captured.err.count("too new") == 1
    assert "2 rows" in captured.err
