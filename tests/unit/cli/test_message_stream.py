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
from tidemill.cli.line_source import BATCH_LINES_MAX, FIRST_BATCH_LINES, LINE_BYTES_MAX
from tidemill.cli.message_stream import ERRORS_SHOWN_MAX

STORED = {"outcome": "STORED", "message": {"messageId": "01"}}
REFUSED = {"outcome": "REFUSED", "detail": "over a quota"}
UNKNOWN = {"outcome": "UNKNOWN", "detail": "the broker did not answer"}
NOT_SENT = {"outcome": "NOT_SENT"}


class Api:
    """An API that takes batches. The texts `refused`, `unknown` and `lost` have these outcomes."""

    def __init__(self) -> None:
        self.address = ""
        self.batches: list[list[Any]] = []
        self.lines_max = BATCH_LINES_MAX  # larger batches are too large for the process

    @property
    def bodies(self) -> list[Any]:
        """The messages of all batches."""
        return [message for batch in self.batches for message in batch]

    def answer(self, request: ApiRequest) -> ApiAnswer:
        assert (request.method, request.path) == ("POST", "/topics/orders/messages:batch")
        if len(request.body) > self.lines_max:
            return refusal("the body has too many bytes", 413)
        self.batches.append(request.body)
        texts = [message.get("body") for message in request.body]
        if "lost" in texts:
            return LOST
        outcomes = [{"refused": REFUSED, "unknown": UNKNOWN}.get(text, STORED) for text in texts]
        if "unknown" in texts:
            after = texts.index("unknown") + 1
            outcomes[after:] = [NOT_SENT] * len(outcomes[after:])
        return ApiAnswer({"outcomes": outcomes})

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
    assert api.bodies[1]["idempotencyKey"] == "k"


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


def test_a_batch_without_an_answer_ends_the_command(api: Api) -> None:
    first = "one\n" * FIRST_BATCH_LINES
    done = api.send(first + "two\nlost\nthree\n" + "four\n" * BATCH_LINES_MAX)
    assert (done.exit_code, len(api.batches)) == (5, 2)
    last = FIRST_BATCH_LINES + len(api.batches[1])
    assert f"lines {FIRST_BATCH_LINES + 1} to {last}: no answer" in done.stderr
    assert "they may be stored. The next lines are not sent" in done.stderr
    assert done.stdout == f"{FIRST_BATCH_LINES} messages sent, 0 failed\n"
    alone = api.send("lost\n")
    assert alone.exit_code == 3
    assert "line 1: no answer" in alone.stderr


@pytest.mark.parametrize(("lines", "sent"), [("one\nunknown\ntwo\n", 1), ("unknown\none\n", 0)])
def test_a_line_with_an_unknown_outcome_ends_the_command(api: Api, lines: str, sent: int) -> None:
    done = api.send(lines + "more\n" * BATCH_LINES_MAX)
    assert (done.exit_code, len(api.batches)) == (5, 1)
    assert f"line {sent + 1}: the broker did not answer" in done.stderr
    assert "The next lines are not sent" in done.stderr
    assert done.stdout == f"{sent} messages sent, 0 failed\n"


def test_many_lines_are_few_calls_in_their_order(api: Api) -> None:
    texts = [str(n) for n in range(1_000)]
    assert api.send("\n".join(texts)).exit_code == 0
    assert [each["body"] for each in api.bodies] == texts
    assert max(len(batch) for batch in api.batches) <= BATCH_LINES_MAX
    assert len(api.batches) < len(texts)


def test_failures_are_reported_in_the_order_of_the_lines(api: Api) -> None:
    lines = ['{"body": "refused"}', "[]", '{"body": "a"}', '{"body": "refused"}']
    done = api.send("\n".join(lines), "--json-lines", "-o", "json")
    assert [each["line"] for each in json.loads(done.stdout)["errors"]] == [1, 2, 4]


def test_a_batch_that_is_too_large_for_the_process_is_divided(api: Api) -> None:
    api.lines_max = 3
    assert api.send("".join(f"{n}\n" for n in range(10))).exit_code == 0
    assert [each["body"] for each in api.bodies] == [str(n) for n in range(10)]


def test_a_batch_has_at_most_eight_mebibytes(api: Api) -> None:
    text = "x" * (3 << 20)
    assert api.send(f"{text}\n" * 3).exit_code == 0
    assert [len(batch) for batch in api.batches] == [2, 1]


def test_a_refused_batch_fails_with_each_of_its_lines() -> None:
    with scripted_api(lambda _: refusal("no right", 403)) as address:
        arguments = ["--admin", address, "message", "send", "orders", "-"]
        done = CliRunner().invoke(app, arguments, input="a\nb\n")
    assert (done.exit_code, done.stdout) == (1, "0 messages sent, 2 failed\n")
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["line 1", "line 2"]


def test_a_line_that_is_too_long_fails_alone(api: Api) -> None:
    done = api.send(b"a" * (LINE_BYTES_MAX + 1) + b"\nb\n")
    assert (done.exit_code, [each["body"] for each in api.bodies]) == (5, ["b"])


def test_a_repeat_is_counted() -> None:
    repeat = {"outcomes": [{**STORED, "outcome": "DUPLICATE"}]}
    with scripted_api(lambda _: ApiAnswer(repeat)) as address:
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
