"""`tidemill message send TOPIC -`: lines of standard input as messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import LOST, ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app
from tidemill.cli.message_stream import ERRORS_SHOWN_MAX, LINE_BYTES_MAX

SENT = ApiAnswer({"messageId": "01", "queueId": 0, "queueOffset": 0}, 201)


class Api:
    """An API that takes messages. It refuses the body `refused`, and loses `lost`."""

    def __init__(self) -> None:
        self.address = ""
        self.bodies: list[Any] = []

    def answer(self, request: ApiRequest) -> ApiAnswer:
        assert (request.method, request.path) == ("POST", "/topics/orders/messages")
        self.bodies.append(request.body)
        special = {"refused": refusal("over a quota", 429), "lost": LOST}
        return special.get(request.body.get("body"), SENT)

    def send(self, lines: bytes | str, *options: str) -> Result:
        arguments = ["--admin", self.address, "message", "send", "orders", "-", *options]
        return CliRunner().invoke(app, arguments, input=lines)


@pytest.fixture
def api() -> Iterator[Api]:
    found = Api()
    with scripted_api(found.answer) as address:
        found.address = address
        yield found


def test_each_line_is_a_message_with_the_options(api: Api) -> None:
    done = api.send("one\r\n\ntwo", "--tag", "t", "--key", "k")
    assert (done.exit_code, done.stdout) == (0, "3 messages sent, 0 failed\n")
    common = {"tag": "t", "keys": ["k"], "properties": {}}
    assert api.bodies == [common | {"body": body} for body in ("one", "", "two")]


def test_bytes_that_are_not_text_are_sent_as_they_are(api: Api) -> None:
    assert api.send(b"\xff\n").exit_code == 0
    assert api.bodies[0]["bodyBase64"] == "/w=="


def test_json_lines_precede_the_options(api: Api) -> None:
    lines = '{"body": "a", "tag": "own"}\n{"body": "b", "idempotencyKey": "k"}\n'
    assert api.send(lines, "--json-lines", "--tag", "common").exit_code == 0
    assert [(each["body"], each["tag"]) for each in api.bodies] == [("a", "own"), ("b", "common")]
    assert "idempotencyKey" not in api.bodies[1]


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"body": "a", "idempotencyKey": " "}', ""])
def test_a_wrong_json_line_fails_alone(api: Api, line: str) -> None:
    done = api.send(f'{line}\n{{"body": "a"}}\n', "--json-lines")
    assert (done.exit_code, len(api.bodies)) == (5, 1)
    assert "line 1: " in done.stderr
    assert done.stdout == "1 messages sent, 1 failed\n"


def test_failed_lines_are_counted_and_the_first_ones_reported(api: Api) -> None:
    count = ERRORS_SHOWN_MAX + 2
    done = api.send("refused\n" * count + "one\n")
    assert done.exit_code == 5
    assert done.stderr.count("over a quota") == ERRORS_SHOWN_MAX
    assert done.stdout == f"1 messages sent, {count} failed\n"
    assert api.send("refused\n").exit_code == 1


def test_the_json_answer_has_the_errors(api: Api) -> None:
    arguments = ["--admin", api.address, "-o", "json", "message", "send", "orders", "-"]
    done = CliRunner().invoke(app, arguments, input="one\nrefused\n")
    answer = json.loads(done.stdout)
    assert (answer["sent"], answer["failed"], answer["errors"][0]["line"]) == (1, 1, 2)


def test_a_line_without_an_answer_ends_the_command(api: Api) -> None:
    done = api.send("one\nlost\ntwo\n")
    assert (done.exit_code, len(api.bodies)) == (5, 2)
    assert "line 2: no answer" in done.stderr
    assert api.send("lost\n").exit_code == 3


def test_a_line_that_is_too_long_fails_alone(api: Api) -> None:
    done = api.send(b"a" * (LINE_BYTES_MAX + 1) + b"\nb\n")
    assert (done.exit_code, [each["body"] for each in api.bodies]) == (5, ["b"])


def test_a_repeat_is_counted() -> None:
    with scripted_api(lambda _: ApiAnswer({"messageId": "01", "duplicate": True})) as address:
        done = CliRunner().invoke(
            app, ["--admin", address, "message", "send", "orders", "-"], input="a\n"
        )
    assert done.stdout == "1 messages sent, 1 of them as repeats, 0 failed\n"


def test_the_rate_is_a_limit(api: Api) -> None:
    begin_s = time.monotonic()
    assert api.send("a\n" * 4, "--rate", "50").exit_code == 0
    # Three pauses of 20 ms; a slow machine takes longer.
    assert time.monotonic() - begin_s >= 0.06


@pytest.mark.parametrize(
    "arguments",
    [("body", "--rate", "1"), ("body", "--json-lines"), ("-", "--idempotency-key", "k")],
)
def test_options_of_the_other_form_are_refused(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["message", "send", "orders", *arguments], input="a\n")
    assert done.exit_code == 2


def test_an_empty_input_sends_nothing(api: Api) -> None:
    assert (api.send("").exit_code, api.bodies) == (0, [])
