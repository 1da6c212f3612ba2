"""Options of the root anywhere, and commands that repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app
from tidemill.cli.root_group import move_shared
from tidemill.common.exit_codes import EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_USAGE

GROUPS: dict[str, Any] = {"items": []}


class ShortLivedApi:
    """An API that answers some requests, and then ends the command."""

    def __init__(self, answers: int) -> None:
        self.left = answers

    def answer(self, _request: ApiRequest) -> ApiAnswer:
        self.left -= 1
        return ApiAnswer(GROUPS) if self.left >= 0 else refusal("no more answers")


def run(api: ShortLivedApi, *arguments: str) -> Result:
    with scripted_api(api.answer) as address:
        return CliRunner().invoke(app, [*arguments, "--admin", address])


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ("topic list -o json", "-o json topic list"),
        ("topic --admin=x list --watch", "--admin=x --watch topic list"),
        ("group show g -w --interval 2s --yes", "-w --interval 2s group show g --yes"),
        ("message send t -- -o", "message send t -- -o"),
    ],
)
def test_options_of_the_root_stand_anywhere(given: str, moved: str) -> None:
    assert move_shared(given.split()) == moved.split()


def test_a_watched_list_repeats_until_it_fails() -> None:
    line = ("broker-group", "list", "--watch", "--interval", "10ms", "-o", "json")
    ended = run(ShortLivedApi(3), *line)
    assert ended.exit_code == EXIT_REFUSED
    assert list(documents(ended.stdout)) == [GROUPS] * 3


def documents(text: str) -> Iterator[Any]:
    """Yield the JSON documents of a text."""
    decoder = json.JSONDecoder()
    while text := text.lstrip():
        document, end = decoder.raw_decode(text)
        yield document
        text = text[end:]


def test_ctrl_c_ends_a_watch_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_duration_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    ended = run(ShortLivedApi(9), "broker-group", "list", "--watch")
    assert ended.exit_code == EXIT_INTERRUPTED


@pytest.mark.parametrize(
    "command", ["topic delete a --yes", "doctor", "broker-group drain b --yes"]
)
def test_a_change_is_not_repeated(command: str) -> None:
    api = ShortLivedApi(9)
    ended = run(api, *command.split(), "--watch")
    assert (ended.exit_code, api.left) == (EXIT_USAGE, 9)
    assert "--watch is for commands that list or show something" in ended.stderr


@pytest.mark.parametrize("interval", ["0s", "2h", "soon"])
def test_an_interval_has_limits(interval: str) -> None:
    ended = run(ShortLivedApi(9), "broker-group", "list", "--watch", "--interval", interval)
    assert ended.exit_code == EXIT_USAGE
