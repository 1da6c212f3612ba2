"""Decisions about rights, against a second evaluator, and the reading of entries."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.security.naive_acl import Line, is_allowed
from tidemill.common.errors import BadRequest
from tidemill.security.acl import (
    AccessEntry,
    Action,
    Resource,
    ResourceType,
    Subject,
    entry_of,
    parse_address,
    parse_entry,
    parse_range,
    parse_resource,
    topic_resource,
)
from tidemill.security.rights import Rights, find_verdict

PATTERNS = ("Topic:orders", "Topic:ord*", "Topic:*", "Group:ord*", "*", "Topic:o*")
ACTIONS = ("All", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List")
ADDRESSES = (None, "10.1.2.3", "::ffff:10.1.2.3", "2001:db8::7")
NAMES = ("orders", "ord", "order-items", "billing", "o")
RANGES = ("10.1.0.0/16", "10.1.2.3", "2001:db8::/32", "0.0.0.0/0", "192.168.0.0/24")


def no_address() -> None:
    """The address of a call that has none."""


def decide(
    lines: Sequence[Line], roles: Sequence[Line], *, action: str, resource: str, address: str | None
) -> bool:
    subjects = [Subject("User:u", _entries(lines)), Subject("Role:r", _entries(roles))]
    type_text, _, name = resource.partition(":")
    wanted = Action[action.upper()], Resource(ResourceType[type_text.upper()], name)
    found_address = parse_address(address) if address else None
    is_allowed = Rights(subjects).decide(*wanted, lambda: found_address)
    assert find_verdict(subjects, *wanted, found_address).is_allowed is is_allowed
    return is_allowed


def _entries(lines: Sequence[Line]) -> list[AccessEntry]:
    return [
        parse_entry(
            line.resource, line.actions, sources=line.sources, is_allowed=line.decision == "ALLOW"
        )
        for line in lines
    ]


def test_each_cell_of_the_matrix_is_decided_as_by_the_second_evaluator() -> None:
    """One entry of the cell beside an entry that allows everything to everybody, and without it."""
    cells = 0
    for pattern, action, address, name, is_role in itertools.product(
        PATTERNS, ACTIONS, ADDRESSES, NAMES, (False, True)
    ):
        for decision in ("ALLOW", "DENY", "none"):
            line = Line(pattern, (action,), ("10.1.0.0/16",), decision)
            given_lines = [] if decision == "none" else [line]
            for base in ([], [Line("*", ("All",), (), "ALLOW")]):
                users, roles = (base, given_lines) if is_role else ([*base, *given_lines], [])
                asked = "Pub" if action == "All" else action
                resource = f"Topic:{name}"
                expected = is_allowed(
                    [*users, *roles], action=asked, resource=resource, address=address
                )
                found = decide(users, roles, action=asked, resource=resource, address=address)
                assert found is expected, (users, roles, asked, resource, address)
                cells += 1
    assert cells == 2 * 5_760


lines = st.lists(
    st.builds(
        Line,
        st.sampled_from([*PATTERNS, "Topic:ord", "Topic:order-*", "Group:*", "Cluster:clients"]),
        st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=3).map(tuple),
        st.lists(st.sampled_from(RANGES), max_size=2).map(tuple),
        st.sampled_from(["ALLOW", "DENY"]),
    ),
    max_size=8,
)


@given(
    lines,
    lines,
    st.sampled_from(ACTIONS[1:]),
    st.sampled_from([*(f"Topic:{name}" for name in NAMES), "Group:ord", "Cluster:clients"]),
    st.sampled_from([*ADDRESSES, "192.168.0.9", "11.0.0.1"]),
)
def test_any_entries_are_decided_as_by_the_second_evaluator(
    users: list[Line], roles: list[Line], action: str, resource: str, address: str | None
) -> None:
    expected = is_allowed([*users, *roles], action=action, resource=resource, address=address)
    assert decide(users, roles, action=action, resource=resource, address=address) is expected


def test_the_deciding_entry_and_its_subject_are_named() -> None:
    allowing = parse_entry("Topic:*", ["Pub"])
    denying = parse_entry("Topic:pay*", ["All"], is_allowed=False)
    subjects = [Subject("User:orders", [allowing]), Subject("Role:no-money", [denying])]
    orders = parse_resource("Topic:orders")
    verdict = find_verdict(subjects, Action.PUB, parse_resource("Topic:payments"), None)
    assert verdict == (False, denying, "Role:no-money")
    assert find_verdict(subjects, Action.PUB, orders, None).subject == "User:orders"
    assert find_verdict(subjects, Action.SUB, orders, None).entry is None


def test_the_rights_on_all_topics_are_decided_by_entries_for_all_of_them() -> None:
    wide, narrow = parse_entry("Topic:*", ["Get"]), parse_entry("Topic:pay*", ["Get"])
    literal = parse_entry("Topic:pay", ["All"], is_allowed=False)
    any_type = parse_entry("*", ["Get"], sources=["10.0.0.0/8"])

    def allows(*entries: AccessEntry, address: str = "10.1.2.3") -> bool:
        rights = Rights([Subject("User:u", entries)])
        return rights.allows_all(Action.GET, ResourceType.TOPIC, lambda: parse_address(address))

    assert allows(wide)
    assert allows(any_type)
    assert allows(wide, narrow)
    assert not allows(narrow)
    assert not allows(wide, literal)
    assert not allows(any_type, literal)
    assert not allows(any_type, address="192.168.0.1")
    assert not allows(any_type, parse_entry("Topic:*", ["Get"], is_allowed=False))


@pytest.mark.parametrize(
    ("topic", "resource"),
    [
        ("orders", "Topic:orders"),
        ("%RETRY%billing+orders", "Group:billing"),
        ("%DLQ%billing", "Group:billing"),
        ("%RETRY%shop%billing+shop%orders", "Group:shop%billing"),
        ("%DLQ%TIMER", "Topic:%DLQ%TIMER"),
        ("%DLQ%HALF", "Topic:%DLQ%HALF"),
        ("shop%orders", "Topic:shop%orders"),
    ],
)
def test_topics_of_a_consumer_group_are_its_group(topic: str, resource: str) -> None:
    assert str(topic_resource(topic)) == resource


@pytest.mark.parametrize(
    "resource",
    ["", "orders", "Topic", "Topic:", "Queue:a", "Topic:a*b", "Topic:**", "Cluster:nothing", "**"],
)
def test_a_malformed_resource_is_refused(resource: str) -> None:
    with pytest.raises(BadRequest):
        parse_entry(resource, ["Pub"])


@pytest.mark.parametrize(
    "topic", ["%DLQ%billing", "%RETRY%billing+orders", "%DLQ%*", "%DLQ%TIMER", "%DLQ%HALF"]
)
def test_an_entry_that_would_never_decide_is_refused(topic: str) -> None:
    with pytest.raises(BadRequest, match="write Group:NAME"):
        parse_entry(f"Topic:{topic}", ["Sub"])


def test_one_dead_letter_topic_may_be_asked_about() -> None:
    assert str(parse_resource("Topic:%DLQ%billing")) == "Group:billing"
    assert str(parse_resource("topic:orders")) == "Topic:orders"


@pytest.mark.parametrize("actions", [[], ["Read"], ["Pub", ""]])
def test_malformed_actions_are_refused(actions: list[str]) -> None:
    with pytest.raises(BadRequest):
        parse_entry("Topic:a", actions)


@pytest.mark.parametrize("source", ["", "10.1.2.3/16", "10.1.2", "host", "10.1.0.0/33"])
def test_a_malformed_source_range_is_refused(source: str) -> None:
    with pytest.raises(BadRequest):
        parse_entry("Topic:a", ["Pub"], sources=[source])


def test_a_mapped_address_is_an_address_of_ip_4() -> None:
    assert str(parse_address("::ffff:10.1.2.3")) == "10.1.2.3"
    assert parse_range("::ffff:10.1.0.0/112") == parse_range("10.1.0.0/16")
    assert parse_address("unix:/run/socket") is None
    assert str(parse_address("fe80::1%eth0")) == "fe80::1"


@given(lines)
def test_entries_survive_their_storage(some: list[Line]) -> None:
    for entry in _entries(some):
        assert entry_of(entry.to_item()) == entry
