"""The table of users and roles, while items change."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tidemill.common.errors import BadRequest
from tidemill.security import table as table_module
from tidemill.security.acl import Action, parse_entry, parse_resource
from tidemill.security.identities import (
    READY_MADE_ROLES,
    AccessRole,
    User,
    UserType,
    check_secret,
    check_user_name,
    consumer_entries,
    producer_entries,
    role_of,
    user_of,
)
from tidemill.security.secret_keys import new_key_line, parse_keys
from tidemill.security.table import Mode, SecurityTable, mode_item

ORDERS = parse_resource("Topic:orders")


def no_address() -> None:
    """The address of a call that has none."""


class World:
    """Items and the table that reads them."""

    def __init__(self, floor: Mode = Mode.OFF) -> None:
        self.items: dict[tuple[str, str], bytes] = {}
        self.table = SecurityTable(lambda *key: self.items.get(key), floor=floor)

    def put(self, item: dict[str, Any]) -> None:
        key = item["op"], item.get("name", "")
        self.items[key] = json.dumps(item).encode()
        self.table.note_change(*key)

    def delete(self, kind: str, name: str) -> None:
        del self.items[kind, name]
        self.table.note_change(kind, name)

    def may(self, user: str, action: Action = Action.PUB) -> bool:
        known = self.table.user(user)
        return known is not None and known.decide(action, ORDERS, no_address)


def test_a_change_of_a_user_counts_at_once() -> None:
    world = World()
    assert not world.may("orders")
    user = User(name="orders", id=1, entries=producer_entries("orders"))
    world.put(user.to_item())
    assert world.may("orders")
    assert not world.may("orders", Action.SUB)
    world.put(replace(user, entries=()).to_item())
    assert not world.may("orders")
    world.put(replace(user, type=UserType.SUPER).to_item())
    assert world.may("orders", Action.DELETE)
    world.delete("user", "orders")
    assert world.table.user("orders") is None


def test_a_change_of_a_role_counts_for_its_users() -> None:
    world = World()
    world.put(User(name="a", id=1, roles=("sellers", "unknown")).to_item())
    assert not world.may("a")
    world.put(AccessRole(name="sellers", entries=producer_entries("orders")).to_item())
    assert world.may("a")
    denying = parse_entry("Topic:orders", ["Pub"], is_allowed=False)
    world.put(AccessRole(name="sellers", entries=(denying,)).to_item())
    assert not world.may("a")
    world.put(AccessRole(name="sellers", entries=producer_entries("orders")).to_item())
    world.delete("role", "sellers")
    assert not world.may("a")


def test_the_mode_is_the_stricter_one_of_record_and_floor() -> None:
    world = World(floor=Mode.PERMISSIVE)
    assert (world.table.recorded_mode, world.table.mode) == (Mode.OFF, Mode.PERMISSIVE)
    found = []
    for mode in (Mode.ON, Mode.OFF):
        world.put(mode_item(mode))
        found.append(world.table.mode)
    assert found == [Mode.ON, Mode.PERMISSIVE]


def test_an_unknown_mode_is_the_strictest_one() -> None:
    world = World()
    world.put({"op": "security", "security": {"mode": "stricter"}})
    assert world.table.mode is Mode.ON


def test_few_users_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "DECODED_USERS_MAX", 3)
    world = World()
    for number in range(10):
        world.put(User(name=f"u{number}", id=number, entries=producer_entries("orders")).to_item())
    assert all(world.may(f"u{number}") for number in (*range(10), *range(10)))
    assert len(world.table._users) == 3


def test_users_with_many_entries_are_decoded_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "DECODED_ENTRIES_MAX", 10)
    world = World()
    world.put(AccessRole(name="sellers", entries=producer_entries("orders") * 4).to_item())
    for number in range(5):
        world.put(User(name=f"u{number}", id=number, roles=("sellers",)).to_item())
    assert all(world.may(f"u{number}") for number in (*range(5), *range(5)))
    assert list(world.table._users) == ["u3", "u4"]
    world.put(AccessRole(name="sellers", entries=producer_entries("orders") * 11).to_item())
    assert world.may("u3")
    assert world.may("u4")
    assert list(world.table._users) == ["u4"], "one user is decoded, whatever its size"
    world.delete("user", "u4")
    assert world.table._entry_count == 0


def test_a_table_of_another_store_replaces_decoded_users() -> None:
    world = World()
    world.put(User(name="orders", id=1, entries=producer_entries("orders")).to_item())
    assert world.may("orders")
    world.items = {}
    world.table.note_all_changed()
    assert world.table.user("orders") is None
    assert not world.table._users


def test_ready_made_roles_differ_in_what_they_change() -> None:
    world = World()
    allowed = {}
    for name in READY_MADE_ROLES:
        world.put(User(name=name, id=1, roles=(name,)).to_item())
        allowed[name] = {action for action in Action if world.may(name, action)}
    assert allowed["viewer"] == {Action.GET, Action.LIST}
    assert allowed["operator"] == allowed["viewer"] | {Action.UPDATE}
    assert allowed["admin"] == set(Action)


def test_users_and_roles_survive_their_storage() -> None:
    keys = parse_keys(new_key_line("k1"))
    user = User(
        name="orders",
        id=9,
        is_enabled=False,
        secrets=(keys.seal(b"s" * 16, user_id=9, secret_id=3, created_at_ms=8),),
        entries=consumer_entries("billing", "orders"),
        roles=("viewer",),
        created_at_ms=1,
        changed_at_ms=2,
        changed_by="root",
    )
    assert user_of(json.dumps(user.to_item()).encode()) == user
    assert user.next_secret_id == 4
    role = AccessRole(
        name="r", entries=producer_entries("orders"), changed_at_ms=1, changed_by="root"
    )
    assert role_of(json.dumps(role.to_item()).encode()) == role


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ü", "x" * 65, "a\n"])
def test_a_malformed_user_name_is_refused(name: str) -> None:
    with pytest.raises(BadRequest):
        check_user_name(name)


@pytest.mark.parametrize("secret", ["short", "x" * 129, "fifteen chars +\n", "with a blank in it"])
def test_a_malformed_secret_is_refused_without_its_text(secret: str) -> None:
    with pytest.raises(BadRequest) as error:
        check_secret(secret)
    assert secret.strip() not in error.value.message
