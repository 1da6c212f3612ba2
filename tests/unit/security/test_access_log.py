"""The ring of refused calls and accesses, and the limits of its lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.disk.offline_world import finish
from tidemill.admin.json.audit import AuditRecordView
from tidemill.security.access_log import (
    ACCESS,
    CALLERS_MAX,
    LINES_PER_S_MAX,
    REFUSAL,
    RING_RECORDS_MAX,
    TEXT_CHARS_MAX,
    AccessLog,
    AccessRecord,
    RecordFilter,
)
from tidemill.security.acl import Action
from tidemill.security.audit_results import AuditAction

START_MS = 1_795_750_000_000


class World:
    """An access log with its time and its lines."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.lines: list[dict[str, Any]] = []
        self.log = AccessLog(
            "proxy-0", lambda: START_MS + self.now_ms, lambda: self.now_ms, self.lines.append
        )

    def refuse(self, user: str = "ops", kind: str = REFUSAL, **changed: Any) -> None:
        record = AccessRecord(
            kind,
            user=user,
            via="signature",
            address="10.1.2.3",
            call="SendMessage",
            resource="Topic:orders",
            action="Pub",
            result="refused",
            code=40100,
            reason="no right",
        )
        self.log.note(record._replace(**changed))

    def find(self, limit: int = 100, before: int = 0, **wanted: Any) -> list[dict[str, Any]]:
        found = finish(self.log.find_page(RecordFilter(**wanted), before=before, limit=limit))
        return [record.fields for record in found.records]


def test_a_refused_call_is_one_line_and_one_record() -> None:
    world = World()
    world.refuse()
    expected = {
        "id": f"proxy-0:{START_MS + 1}",
        "atMs": START_MS,
        "kind": "refusal",
        "user": "ops",
        "via": "signature",
        "from": "10.1.2.3",
        "process": "proxy-0",
        "call": "SendMessage",
        "resource": "Topic:orders",
        "action": "Pub",
        "result": "refused",
        "code": 40100,
        "reason": "no right",
        "count": 1,
    }
    assert world.lines == world.find() == [expected]


def test_repeated_refusals_of_a_second_are_counted() -> None:
    world = World()
    for _ in range(50):
        world.refuse()
    world.refuse(user="other")
    assert [line["count"] for line in world.lines] == [1, 1]
    world.now_ms = 999
    world.log.tick()
    assert len(world.lines) == 2
    world.now_ms = 1_000
    world.log.tick()
    assert [line["count"] for line in world.lines] == [1, 1, 49]
    # The line of the count begins the next second of this caller.
    world.refuse()
    assert len(world.lines) == 3
    world.now_ms = 2_000
    world.refuse()
    assert world.lines[-1]["count"] == 2
    assert world.log.counts[REFUSAL] == 53


def test_a_caller_without_a_name_is_known_by_its_address() -> None:
    world = World()
    world.refuse(user="")
    world.refuse(user="")
    world.refuse(user="", address="10.9.9.9")
    assert [line["from"] for line in world.lines] == ["10.1.2.3", "10.9.9.9"]


def test_refusals_with_different_causes_have_lines_of_their_own() -> None:
    world = World()
    for action, reason in (
        ("Pub", "no right from 10.1.2.3"),
        ("Create", "no right from 10.1.2.3"),
        ("", "user ops is disabled"),
        ("", "user ops is banned"),
    ):
        world.refuse(action=action, reason=reason)
        world.refuse(action=action, reason=reason)
    assert [line["count"] for line in world.lines] == [1, 1, 1, 1]


def test_a_user_without_a_right_has_one_line_for_all_its_addresses() -> None:
    """Thousands of clients of one user may lose a right at once."""
    world = World()
    for number in range(100):
        world.refuse(address=f"10.1.2.{number}", reason=f"no right from 10.1.2.{number}")
    assert len(world.lines) == 1


def test_accesses_have_one_line_per_minute() -> None:
    world = World()
    for second in range(61):
        world.now_ms = second * 1_000
        world.refuse(kind=ACCESS)
        world.log.tick()
    assert [line["count"] for line in world.lines] == [1, 60]


def test_lines_over_the_limit_of_a_second_are_counted_in_one_line() -> None:
    world = World()
    for number in range(LINES_PER_S_MAX + 30):
        world.refuse(user=f"user-{number}")
    assert len(world.lines) == LINES_PER_S_MAX
    world.now_ms = 1_000
    world.log.tick()
    assert world.lines[-1]["count"] == 30
    assert "over the limit" in world.lines[-1]["reason"]
    for record in world.find(limit=RING_RECORDS_MAX):
        AuditRecordView(**record)


def test_forgotten_callers_are_counted() -> None:
    world = World()
    for number in range(2 * CALLERS_MAX):
        for _ in range(3 if number < CALLERS_MAX else 1):
            world.refuse(user=f"user-{number}")
    for _ in range(40):
        world.now_ms += 1_000
        world.log.tick()
    assert sum(line.get("count", 1) for line in world.lines) == 4 * CALLERS_MAX


def test_texts_of_clients_are_short_and_printable() -> None:
    world = World()
    for number in range(3):
        world.refuse(resource="Topic:" + "x" * 100_000 + str(number))
    world.refuse(resource="Topic:\x1b[2J\nforged", user="")
    [short, forged] = world.lines
    assert len(short["resource"]) == TEXT_CHARS_MAX
    assert forged["resource"] == "Topic:?[2J?forged"
    keys = world.log._periods[REFUSAL]
    assert all(len(text) <= TEXT_CHARS_MAX for key in keys for text in key)
    kept = [period.record for period in keys.values()]
    assert all(len(record.resource) <= TEXT_CHARS_MAX for record in kept)


def test_the_ring_and_the_callers_are_bounded() -> None:
    world = World()
    for number in range(RING_RECORDS_MAX + 500):
        world.now_ms += 6
        world.refuse(user=f"user-{number}", reason="r" * 10_000)
    assert len(world.log._ring) == RING_RECORDS_MAX
    assert len(world.log._periods[REFUSAL]) <= CALLERS_MAX
    assert world.find(limit=1)[0]["user"] == f"user-{RING_RECORDS_MAX + 499}"
    assert len(world.find(limit=1)[0]["reason"]) == TEXT_CHARS_MAX


@pytest.mark.parametrize(
    ("wanted", "users"),
    [
        ({}, ["c", "b", "a"]),
        ({"user": "b"}, ["b"]),
        ({"resource": "Topic:pay*"}, ["c"]),
        ({"resource": "Topic:orders"}, ["b", "a"]),
        ({"action": "pub"}, ["c", "b", "a"]),
        ({"client_id": "client-of-b"}, ["b"]),
        ({"client_id": "client"}, []),
        ({"kind": ACCESS}, []),
        ({"result": "would_refuse"}, ["a"]),
        ({"from_ms": START_MS + 20}, ["c", "b"]),
        ({"to_ms": START_MS + 20}, ["a"]),
    ],
)
def test_filters_select_records(wanted: dict[str, Any], users: list[str]) -> None:
    world = World()
    for number, user in enumerate("abc", 1):
        world.now_ms = number * 10
        world.refuse(
            user=user,
            resource="Topic:payments" if user == "c" else "Topic:orders",
            result="would_refuse" if user == "a" else "refused",
            client_id=f"client-of-{user}",
        )
    assert [record["user"] for record in world.find(**wanted)] == users


def test_a_refusal_with_alternatives_has_each_of_its_actions() -> None:
    fields = {"kind": REFUSAL, "atMs": START_MS, "action": "Get or List"}
    assert [action for action in AuditAction if RecordFilter(action=action).matches(fields)] == [
        AuditAction.GET,
        AuditAction.LIST,
    ]


def test_the_actions_of_records_are_those_of_rights() -> None:
    assert [action.value for action in AuditAction] == [action.text for action in Action]


def test_a_change_of_a_client_belongs_to_the_client() -> None:
    kick = {"kind": "change", "atMs": START_MS, "resource": "Client:shop-7"}
    assert RecordFilter(client_id="shop-7").matches(kick)
    assert not RecordFilter(client_id="shop").matches(kick)
    topic = {"kind": "change", "atMs": START_MS, "resource": "Topic:shop-7"}
    assert not RecordFilter(client_id="shop-7").matches(topic)


def test_pages_continue_below_a_sequence() -> None:
    world = World()
    for number in range(1_000):
        world.now_ms += 10
        world.refuse(user=f"user-{number}")
    seen: list[str] = []
    before = 0
    while page := world.find(limit=300, before=before):
        seen += [record["user"] for record in page]
        before = int(page[-1]["id"].rpartition(":")[2])
    assert seen == [f"user-{number}" for number in reversed(range(1_000))]
    assert json.dumps(page) == "[]"
