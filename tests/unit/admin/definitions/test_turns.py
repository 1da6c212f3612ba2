"""The work on a large file of definitions takes turns with other work of the admin process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from tidemill.admin.definitions.export import CurrentDefinitions, reading
from tidemill.admin.definitions.parsing import ERRORS_MAX, parse_definitions, parsing
from tidemill.admin.definitions.plan import PlannedChange, planning
from tidemill.admin.http.request_access import OPEN
from tidemill.admin.json.definitions import Definitions
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

COUNT = 200
FILE = {
    "topics": [{"name": f"topic-{n}", "queues": 8} for n in range(COUNT)],
    "groups": [{"name": f"group-{n}", "maxAttempts": 5} for n in range(COUNT)],
}


def longest_turn(steps: Iterator[None], count: Any) -> int:
    """Return the largest number of objects that one step adds to `count`."""
    longest = before = 0
    for _ in steps:
        longest, before = max(longest, count() - before), count()
    return longest


def parsed(given: Any) -> Definitions:
    return asyncio.run(parse_definitions(json.dumps(given).encode()))


def test_a_step_parses_one_object() -> None:
    lists: dict[str, list[Any]] = {}
    steps = parsing(FILE, lists, [])
    assert longest_turn(steps, lambda: sum(map(len, lists.values()))) == 1
    assert [len(each) for each in lists.values()] == [COUNT, COUNT]


def test_a_step_reads_one_object() -> None:
    topics = [
        pb.TopicConfig(name=f"t{n}", type=pb.TOPIC_TYPE_NORMAL, queues=1) for n in range(COUNT)
    ]
    objects: dict[str, Any] = {}
    steps = reading({"topics": topics, "groups": []}, OPEN, objects, {})
    assert longest_turn(steps, lambda: sum(len(one.texts) for one in objects.values())) == 1
    assert [json.loads(text)["name"] for text in objects["topics"].texts] == [
        f"t{n}" for n in range(COUNT)
    ]


@pytest.mark.parametrize("current", [{}, FILE])
def test_a_step_plans_one_object(current: dict[str, Any]) -> None:
    changes: list[PlannedChange] = []
    steps = planning(CurrentDefinitions(parsed(current), {}), parsed(FILE), changes, prune=True)
    number = 0

    def counted() -> Iterator[None]:
        nonlocal number
        for _ in steps:
            number += 1
            yield

    assert longest_turn(counted(), lambda: len(changes)) <= 1
    known = sum(len(each) for each in current.values())
    # Each known object is read, compared and looked at for the deletion.
    assert number == 2 * COUNT + 2 * known
    assert len(changes) == 2 * COUNT - known


def test_a_file_keeps_its_given_fields() -> None:
    file = parsed({**FILE, "users": None})
    assert file == Definitions.model_validate({**FILE, "users": None})
    assert file.model_fields_set == {"topics", "groups", "users"}
    assert file.model_dump(exclude_unset=True) == {"users": None} | Definitions.model_validate(
        FILE
    ).model_dump(exclude_unset=True)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"topics": [{"name": "a"}, {"name": "b", "queues": "many"}]}, ("topics", 1, "queues")),
        ({"topics": {}}, ("topics",)),
        ({"topics": [7]}, ("topics", 0)),
        ({"version": 2, "topics": []}, ("version",)),
        ([], ()),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(given: Any, place: tuple[Any, ...]) -> None:
    with pytest.raises(RequestValidationError) as refused:
        parsed(given)
    assert refused.value.errors()[0]["loc"][: len(place) + 1] == ("body", *place)


def test_many_wrong_objects_give_the_first_errors() -> None:
    with pytest.raises(RequestValidationError) as refused:
        parsed({"topics": [{}] * 1_000})
    assert len(refused.value.errors()) == ERRORS_MAX


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestValidationError):
        asyncio.run(parse_definitions(body))
