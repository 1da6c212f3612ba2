"""Operators that ask every question of the REST API at random, and the verdict on the answers.

A question names topics, consumer groups, messages, timers and clients of earlier answers. Some of
them are gone by then, so an answer may be a client error. A server error is allowed only while a
process is down.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import httpx

from tests.support.clients.looping_clients import US_PER_S, Disturbance
from tests.support.processes.processes import ADMIN_S, Standalone

OPERATORS = 2
PAUSE_S = 0.1  # between two questions of an operator
KNOWN_MAX = 200  # values of each kind that an operator remembers
BACK_US = 10 * US_PER_S  # time after the return of a process in which its questions may fail
TEMPORARY = frozenset({502, 503, 504})
NO_ANSWER = 0  # status if the connection failed
NS_PER_US = 1000
GONE = "gone"  # a name, id or group that does not exist

STACK = ":stack?timeoutMs=500"  # of a client, which need not answer

# Paths with the kinds of their values. `{broker}` is a broker group.
GETS = (
    "broker-groups",
    "broker-groups/{broker}",
    "clients",
    "clients?group={group}",
    "clients?topic={topic}",
    "clients/{clientId}",
    "groups",
    "groups/{group}",
    "groups/{group}/deliveries",
    "groups/{group}/deliveries?topic={topic}&pageSize=2",
    "groups/{group}/progress",
    "groups/{group}/scaling",
    "groups/{group}/scaling?topic={topic}",
    "messages/{messageId}/trace",
    "replicas",
    "replicas/{broker}",
    "timers",
    "timers?topic={topic}&pageSize=2",
    "timers/{timerId}?broker={broker}",
    "topics",
    "topics?includeSystem=true",
    "topics/{topic}",
    "topics/{topic}/messages?key={messageId}",
    "topics/{topic}/messages/{messageId}",
    "topics/{topic}/queues/0/messages?broker={broker}",
    "topics/{topic}/queues/1/messages?broker={broker}&fromOffset=5&limit=3",
)
# Writes that change nothing, with their bodies.
DRY_RUNS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("DELETE", "topics/{topic}?dryRun=true", {}),
    ("DELETE", "groups/{group}?dryRun=true", {}),
    ("DELETE", "broker-groups/{broker}?dryRun=true", {}),
    ("POST", "groups/{group}:resetOffset", {"topic": "{topic}", "to": "latest", "dryRun": True}),
    ("POST", "groups/{group}:forgetPullOffsets", {"topic": "{topic}", "dryRun": True}),
    ("POST", "groups/{group}/deliveries:release", {"all": True, "dryRun": True}),
    ("POST", "timers/{timerId}:cancel?broker={broker}&dryRun=true", {}),
    ("POST", f"clients/{{clientId}}{STACK}", {}),
)


class Answer(NamedTuple):
    """An answer of the REST API, with the begin and the end of its call in microseconds."""

    call: str
    begun: int
    ended: int
    status: int
    text: str = ""


class RestApi(Protocol):
    """The calls that an operator needs."""

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Call and return the answer. Raises httpx.TransportError if there is none."""
        ...


class RestOfOperators:
    """Calls of the REST API, with all answers."""

    def __init__(self, running: Standalone) -> None:
        self.answers: list[Answer] = []
        self._base = f"{running.admin}/api/v1"
        self._client = httpx.Client(trust_env=False, timeout=ADMIN_S)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Call and record the answer. Raises httpx.TransportError if there is none."""
        begun = _now_us()
        try:
            answer = self._client.request(method, f"{self._base}/{path}", json=body or None)
        except httpx.TransportError as error:
            self._note(method, path, begun, NO_ANSWER, repr(error))
            raise
        self._note(method, path, begun, answer.status_code, answer.text)
        return answer

    def _note(self, method: str, path: str, begun: int, status: int, text: str) -> None:
        kept = text if status >= httpx.codes.BAD_REQUEST or status == NO_ANSWER else ""
        self.answers.append(Answer(f"{method} {path}", begun, _now_us(), status, kept))


class RandomOperator:
    """One operator with its questions and the values in the answers so far."""

    def __init__(self, rest: RestApi, rng: random.Random) -> None:
        self._rest = rest
        self._rng = rng
        self._known: dict[str, deque[str]] = defaultdict(lambda: deque([GONE], KNOWN_MAX))

    def run(self, stop: threading.Event) -> None:
        """Ask until `stop`."""
        while not stop.wait(PAUSE_S):
            self.ask()

    def ask(self) -> None:
        """Ask one question, and remember the values in its answer."""
        if self._rng.random() < len(DRY_RUNS) / (len(GETS) + len(DRY_RUNS)):
            method, path, template = self._rng.choice(DRY_RUNS)
        else:
            method, path, template = "GET", self._rng.choice(GETS), {}
        body = {
            name: self._filled(value) if isinstance(value, str) else value
            for name, value in template.items()
        }
        try:
            answer = self._rest.call(method, self._filled(path), body)
        except httpx.TransportError:
            return
        if answer.is_success and answer.content:
            self._learn(answer.json())

    def _filled(self, text: str) -> str:
        chosen = {
            kind: self._rng.choice(self._known[kind])
            for kind in ("broker", "clientId", "group", "messageId", "timerId", "topic")
        }
        return text.format_map(chosen)

    def _learn(self, found: object, kind: str = "") -> None:
        match found:
            case dict():
                for name, value in found.items():
                    self._learn(value, name)
            case list():
                for value in found:
                    # The items of a list of groups have a field `name`.
                    self._learn_item(value, kind)
            case str() | int() if kind in KINDS:
                known = self._known[KINDS[kind]]
                if str(found) not in known:
                    known.append(str(found))

    def _learn_item(self, value: object, kind: str) -> None:
        if isinstance(value, dict) and kind in NAMED:
            self._learn(value.get("name"), NAMED[kind])
        self._learn(value, kind)


KINDS = {
    "broker": "broker",
    "clientId": "clientId",
    "group": "group",
    "consumerGroup": "group",
    "messageId": "messageId",
    "timerId": "timerId",
    "topic": "topic",
}
NAMED = {"topics": "topic", "groups": "group", "items": "broker"}


@contextmanager
def random_operators(rest: RestOfOperators, seed: int) -> Iterator[None]:
    """Let operators ask during the block."""
    stop = threading.Event()
    operators = [
        threading.Thread(
            target=RandomOperator(rest, random.Random(f"{seed}/{number}")).run,
            args=(stop,),
            name=f"operator {number}",
            daemon=True,
        )
        for number in range(OPERATORS)
    ]
    for operator in operators:
        operator.start()
    try:
        yield
    finally:
        stop.set()
        for operator in operators:
            operator.join(2 * ADMIN_S)


def judge_answers(
    answers: Sequence[Answer], disturbances: Sequence[Disturbance]
) -> tuple[list[str], Counter[int]]:
    """Return the forbidden answers, as sentences, and the number of answers of each status.

    A temporary error is allowed while a process that the question needs is down, and shortly after
    its return. An official client may leave the question of an operator without an answer.
    """
    forbidden = []
    for one in answers:
        if one.status == httpx.codes.GATEWAY_TIMEOUT and one.call.endswith(STACK):
            is_allowed = True
        elif one.status == NO_ANSWER or one.status in TEMPORARY:
            needed = _needed_by(one)
            is_allowed = any(
                gap.fails
                and gap.begun <= one.ended
                and one.begun <= gap.ended + BACK_US
                and any(kind in gap.what for kind in needed)
                for gap in disturbances
            )
        else:
            is_allowed = one.status < httpx.codes.INTERNAL_SERVER_ERROR
        if not is_allowed:
            forbidden.append(
                f"{one.call} at {one.begun} took {(one.ended - one.begun) / US_PER_S:.1f} s: "
                f"{one.status} {one.text[:300]}"
            )
    return forbidden, Counter(one.status for one in answers)


def _needed_by(one: Answer) -> set[str]:
    """Return the kinds of processes that a question needs, as disturbances name them."""
    if one.status == NO_ANSWER:
        return {"admin"}
    of_path = {"clients": "proxy", "replicas": "controller", "broker-groups": "controller"}
    path = one.call.partition(" ")[2]
    return {"admin", "broker"} | {kind for start, kind in of_path.items() if path.startswith(start)}


def _now_us() -> int:
    return time.time_ns() // NS_PER_US
