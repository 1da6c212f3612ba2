"""The verdict on the answers to operators, and the questions that they ask."""

from __future__ import annotations

import random

import httpx
import pytest

from tests.support.clients.looping_clients import Disturbance
from tests.support.clients.random_operators import (
    BACK_US,
    DRY_RUNS,
    GETS,
    NO_ANSWER,
    Answer,
    RandomOperator,
    judge_answers,
)

KILL = Disturbance(
    "kill all masters and admin: broker-0-1 admin", 1_000, 2_000, frozenset({"normal"})
)
MOVE = Disturbance("move", 1_000, 2_000)
LATER = KILL.ended + BACK_US + 1
QUESTIONS = 2_000  # enough to ask each kind with known values


class RecordingRest:
    """A REST API that answers each question with the same names."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def call(self, method: str, path: str, body: dict[str, object] | None = None) -> httpx.Response:
        self.asked.add(f"{method} {path} {(body or {}).get('topic', '')}")
        found = {
            "topics": [{"name": "t"}],
            "groups": [{"name": "g"}],
            "items": [{"name": "b"}],
            "timers": [{"timerId": 7, "messageId": "m"}],
            "clients": [{"clientId": "c"}],
        }
        return httpx.Response(httpx.codes.OK, json=found)


@pytest.mark.parametrize("status", [NO_ANSWER, 502, 503, 504])
def test_a_temporary_error_is_allowed_only_while_a_process_is_down(status: int) -> None:
    during = Answer("GET topics", 1_500, 1_600, status)
    assert judge_answers([during], [KILL])[0] == []
    assert judge_answers([during], [MOVE])[0]
    assert judge_answers([during._replace(begun=LATER, ended=LATER + 1)], [KILL])[0]


@pytest.mark.parametrize(
    ("killed", "call"),
    [("proxy-0", "GET topics"), ("controller-0", "GET groups"), ("proxy-0", "GET replicas")],
)
def test_a_process_that_the_question_does_not_need_allows_no_error(killed: str, call: str) -> None:
    gap = KILL._replace(what=f"kill {killed}")
    assert judge_answers([Answer(call, 1_500, 1_600, 503)], [gap])[0]
    needing = {"proxy-0": "GET clients", "controller-0": "GET replicas"}[killed]
    assert judge_answers([Answer(needing, 1_500, 1_600, 503)], [gap])[0] == []


def test_a_silent_client_is_not_an_error_of_the_server() -> None:
    stack = Answer("POST clients/c:stack?timeoutMs=500", LATER, LATER + 1, 504)
    assert judge_answers([stack], [])[0] == []
    assert judge_answers([stack._replace(status=503)], [])[0]


def test_an_internal_error_is_never_allowed() -> None:
    [found] = judge_answers([Answer("GET topics", 1_500, 1_600, 500, "why")], [KILL])[0]
    assert "GET topics" in found
    assert "500 why" in found


def test_other_answers_are_counted() -> None:
    answers = [Answer("GET topics", 1, 2, status) for status in (200, 200, 404)]
    forbidden, counts = judge_answers(answers, [])
    assert not forbidden
    assert counts == {200: 2, 404: 1}


def test_an_operator_asks_every_question_about_what_it_has_seen() -> None:
    rest = RecordingRest()
    operator = RandomOperator(rest, random.Random(1))
    for _ in range(QUESTIONS):
        operator.ask()
    known = {"topic": "t", "group": "g", "broker": "b", "timerId": "7", "clientId": "c"}
    known["messageId"] = "m"
    expected = {f"GET {path.format_map(known)} " for path in GETS}
    for method, path, body in DRY_RUNS:
        expected.add(f"{method} {path.format_map(known)} {'t' if 'topic' in body else ''}")
    assert expected <= rest.asked
