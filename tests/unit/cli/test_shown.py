"""How the command line shows values to human eyes."""

from __future__ import annotations

import pytest

from tidemill.cli.messages import printable
from tidemill.common.times import age


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (59, "59 s"), (200, "3 m 20 s"), (7_260, "2 h 1 m"), (180_000, "2 d 2 h")],
)
def test_an_age_has_its_two_largest_units(seconds: int, shown: str) -> None:
    assert age(1_000, 1_000 + seconds * 1000) == shown


def test_the_age_of_a_missing_time_is_none() -> None:
    assert age(None, 1_000) is None


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable("é\x1b[31m\n\t\u202e.") == "é\\x1b[31m\\n\\t\\u202e."
