"""`tidemill top`: the lines of its screen."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app
from tidemill.cli.top import shares, table

LONG = "billing-of-the-european-subsidiaries-with-a-name-that-fills-a-line-of-a-terminal"


@pytest.mark.parametrize(
    ("groups", "topics", "lines", "shown"),
    [
        (100, 100, 20, (10, 10)),
        (3, 100, 20, (3, 17)),
        (100, 4, 20, (16, 4)),
        (2, 2, 20, (2, 2)),
        (0, 0, 20, (0, 0)),
        (9, 9, 0, (1, 1)),
    ],
)
def test_the_lists_share_the_lines(
    groups: int, topics: int, lines: int, shown: tuple[int, int]
) -> None:
    assert shares(groups, topics, lines) == shown


def test_a_long_name_is_cut_at_the_width_of_the_terminal() -> None:
    rows = [("a" * 60, "1"), ("b", "123456")]
    lines = table(("GROUP", "LAG"), rows, 40)
    assert [len(line) for line in lines] == [40, 40, 40]
    assert lines[1] == "a" * 31 + "~" + "       1"
    assert table(("GROUP", "LAG"), rows, 100)[1].startswith("a" * 60 + " ")


def test_each_list_is_ordered_and_bounded_by_the_api() -> None:
    paths = []

    def answer(request: ApiRequest) -> ApiAnswer:
        paths.append(request.path)
        return ApiAnswer({"groups": [{"name": LONG, "lag": 7}], "topics": [{"name": "orders"}]})

    with scripted_api(answer) as address:
        shown = CliRunner().invoke(app, ["--admin", address, "top"])
        as_json = CliRunner().invoke(app, ["--admin", address, "-o", "json", "top", "--once"])
    assert shown.exit_code == 0
    assert paths[:2] == ["/groups?sort=-lag&pageSize=20", "/topics?sort=-inPerSecond&pageSize=20"]
    lines = shown.stdout.splitlines()
    assert " ".join(lines[2].split()) == (
        "GROUP LAG READY IN FLIGHT OLDEST IN/S OUT/S CONSUMERS DEAD DEAD 1H"
    )
    assert lines[3].split() == [LONG, "7", "?", "?", "-", *["?"] * 5]
    assert lines[6].split() == ["orders", "?", "?", "?", "?"]
    assert [each["name"] for each in json.loads(as_json.stdout)["groups"]] == [LONG]


def test_an_unreachable_api_ends_it() -> None:
    assert CliRunner().invoke(app, ["--admin", "http://127.0.0.1:1", "top"]).exit_code == 3
