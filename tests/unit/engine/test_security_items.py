"""Security items: the command that changes them, and the log that keeps them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.offline_world import finish
from tests.support.security_items import MODE_ON, TableModel, change, delete, exhaust, put, table_of
from tests.support.worlds.engine_world import World
from tests.support.worlds.packed_worlds import (
    floors,
    forget_derived_files,
    move_floor,
    pack_all,
    small_world,
)
from tidemill.broker.engine.configuration import security as security_module
from tidemill.broker.engine.layout.config import decode_item
from tidemill.broker.engine.metadata.membership import Home
from tidemill.broker.engine.metadata.security_items import COUNTS_MAX
from tidemill.broker.engine.upkeep import checkpoint as checkpoint_module
from tidemill.broker.offline.check import check
from tidemill.broker.offline.copy import copy
from tidemill.common.errors import BadRequest, Conflict, Forbidden, ServiceError

HOME = Home(cluster_id="c", name="home", address="h:1")


def following() -> World:
    world = World()
    world.engine.following.accept_home(HOME, may_join=True, is_complete=True, now_ms=world.now_ms)
    world.commit()
    return world


def copy_table(source: World, target: World) -> None:
    """Copy the whole table of a home to a follower."""
    security, table = target.engine.security, source.engine.catalog.security
    for part in finish(security.plan_copy(table.items, version=table.version)):
        exhaust(security.copy(part, target.now_ms))
    security.note_version(table.version, target.now_ms)
    target.commit()


# ---------------------------------------------------------------- the command


def test_a_change_numbers_its_items_and_returns_the_version_of_the_table() -> None:
    world = World()
    assert change(world, put("a"), put("b"), MODE_ON) == 3
    assert change(world, put("a", "new"), delete("b")) == 5
    version, items = table_of(world.engine)
    assert version == 5
    assert {key: decode_item(item)["version"] for key, item in items.items()} == {
        ("security", ""): 3,
        ("user", "a"): 4,
    }


def test_a_dry_change_only_checks() -> None:
    world = World()
    end = world.engine.log.log_end
    assert change(world, put("a"), is_dry=True) == 1
    assert world.engine.log.log_end == end
    with pytest.raises(BadRequest):
        change(world, delete("a"), is_dry=True)


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([put("a"), {"op": "topic", "name": "t"}], "kind 'topic' are unknown; known are security"),
        ([put("a"), {"op": "securityVersion", "version": 1}], "'securityVersion' are unknown"),
        ([put("a"), {"op": ["user"], "user": {}}], "are unknown"),
        ([put("a"), {"op": "user", "user": {}}], "kind user has no name"),
        ([put("a"), put("")], "kind user has no name"),
        ([put("a"), {"op": "user", "name": 7, "user": {}}], "kind user has no name"),
        ([put("a"), put("é" * 128)], "has 256 bytes; at most 255"),
        ([put("a"), put("\ud800")], "not valid Unicode"),
        ([put("a"), {"op": "user", "name": "b"}], "user 'b' has no object in its field 'user'"),
        ([put("a"), {"op": "security", "security": None}], "security mode has no object"),
        ([put("a"), {**put("b"), "version": 1}], "has the fields name, op, user, version; it need"),
        ([put("a"), {**MODE_ON, "name": "b"}], "the security mode has the fields name, op, secur"),
        ([put("a"), put("b", "x" * 65_536)], r"user 'b' has 655\d\d bytes; at most 61440"),
        ([put("a"), {"op": "user", "name": "b", "user": {"x": [[]]}}], "nested deeper than 3"),
        ([put("a"), put("a")], "user 'a' is in the change twice"),
        ([put("a"), delete("b")], "user 'b' does not exist, so it cannot be deleted"),
        ([put("a"), delete("a", kind="role")], "role 'a' does not exist"),
        ([put(f"{n}") for n in range(257)], "has 257 items; at most 256"),
        ([put(f"{n}", "x" * 60_000) for n in range(18)], "more than 1048576 bytes; split it"),
    ],
)
def test_a_wrong_item_changes_nothing(
    items: list[dict[str, Any]], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security_module, "DEPTH_MAX", 3)
    world = World()
    change(world, put("known"))
    before, end = table_of(world.engine), world.engine.log.log_end
    with pytest.raises(BadRequest, match=text):
        change(world, *items)
    assert (table_of(world.engine), world.engine.log.log_end) == (before, end)


def refusal_of(world: World, **options: Any) -> ServiceError:
    before, end = table_of(world.engine), world.engine.log.log_end
    with pytest.raises(ServiceError) as caught:
        change(world, put("a"), **options)
    assert (table_of(world.engine), world.engine.log.log_end) == (before, end)
    return caught.value


def test_a_change_on_another_version_is_rejected() -> None:
    world = World()
    change(world, put("a"), put("b"))
    for version in (0, 1, 3):
        error = refusal_of(world, expected_version=version)
        assert isinstance(error, Conflict)
        assert f"have version 2, and this change was decided on version {version}" in error.message
        assert "read them again and repeat" in error.message


def test_a_follower_rejects_a_change_and_names_its_home() -> None:
    error = refusal_of(following())
    assert isinstance(error, Forbidden)
    assert "users, roles and security settings are changed at their home" in error.message
    assert "home at h:1" in error.message


def test_security_needs_level_3_at_all_broker_groups() -> None:
    error = refusal_of(World(feature_level=2))
    assert isinstance(error, Conflict)
    assert "these broker groups are below it: broker-0;" in error.message
    world = World()
    groups = world.engine.broker_groups
    groups.found({"broker-0": "h:1", "broker-1": "h:2", "broker-2": "h:3"}, world.now_ms)
    groups.feature_levels.update({"broker-1": 2, "broker-2": 3})
    world.commit()
    assert "below it: broker-1;" in refusal_of(world).message
    groups.feature_levels["broker-1"] = 3
    assert change(world, put("a")) == 1


@pytest.mark.parametrize("kind", COUNTS_MAX)
def test_each_kind_has_a_limit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COUNTS_MAX, kind, 2)
    world = World()
    change(world, put("a", kind=kind), put("b", kind=kind))
    with pytest.raises(BadRequest, match=f"there would be 3 items of kind {kind}; at most 2"):
        change(world, put("a", "new", kind=kind), put("c", kind=kind))
    change(world, put("a", "new", kind=kind))
    change(world, put("c", kind=kind), delete("a", kind=kind))
    assert [key[1] for key in table_of(world.engine)[1]] == ["b", "c"]


def test_the_changes_of_a_round_are_reported_in_order() -> None:
    world = World()
    change(world, put("a"), put("b"))
    world.engine.take_config_changes()
    change(world, put("a", "new"), delete("b"), put("c"))
    change(world, put("a", "newest"))
    changes = world.engine.take_config_changes()
    assert changes
    assert changes.security_version == 6
    items = [decode_item(item) for item in changes.security_items.values()]
    assert [(item["op"], item["name"], item["version"]) for item in items] == [
        ("deleteUser", "b", 4),
        ("user", "c", 5),
        ("user", "a", 6),
    ]
    assert not world.engine.take_config_changes()


def test_pages_are_limited_in_items_and_bytes() -> None:
    world = World()
    change(world, *(put(name, "x" * 100) for name in "dbaec"), put("z", kind="role"))
    security = world.engine.catalog.security

    def names(after: str | None, limit: int, bytes_max: int = 1 << 20) -> tuple[str, bool]:
        page = security.page("user", after, limit=limit, bytes_max=bytes_max)
        return "".join(decode_item(item)["name"] for item in page.items), page.has_more

    assert names(None, 2) == ("ab", True)
    assert names("b", 3) == ("cde", False)
    assert names("bb", 1) == ("c", True)
    assert names("e", 5) == ("", False)
    assert names(None, 5, bytes_max=400) == ("ab", True)
    assert names(None, 5, bytes_max=1) == ("a", True)


# ---------------------------------------------------------------- the log


@pytest.mark.parametrize("snapshot", [False, True])
def test_the_table_survives_starts_and_failovers(
    snapshot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "SECURITY_BYTES_A_SECTION", 256)
    world, model = World(is_followed=True), TableModel()
    kinds = list(COUNTS_MAX)
    items = [put(f"name {n}", "x" * n, kind=kinds[n % 5]) for n in range(40)]
    later = [put("name 0", "new"), delete("name 1", kind="role"), MODE_ON, put("last")]
    for part in (items, later, [delete("last")]):
        change(world, *part)
        model.change(*part)
    if snapshot:
        world.checkpoint()
    for power_cut in (False, True):
        world.restart(power_cut=power_cut)
        assert bool(world.report.snapshot) == snapshot
        assert table_of(world.engine) == model.table
        assert not world.engine.take_config_changes()
    world = World(is_followed=True)
    change(world, *items)
    before = table_of(world.engine)
    world.fail_over()
    assert table_of(world.engine) == before


@pytest.mark.parametrize("is_deleted", [False, True])
def test_the_state_floor_keeps_items_and_the_version(is_deleted: bool) -> None:
    """Also if the newest change is a deletion, whose record is before the floor."""
    world = small_world()
    change(world, put("a"), put("b"), MODE_ON)
    if is_deleted:
        change(world, delete("b"))
    for _ in range(2):
        end = len(world.engine.log.segments) + 4
        while len(world.engine.log.segments) < end:
            world.send("gone", topic="gone", size=4_000)
        world.purge("gone")
        world.checkpoint()
        before = table_of(world.engine)
        world.engine.take_config_changes()
        move_floor(world, floors(world)[-1])
        pack_all(world)
        assert table_of(world.engine) == before
        assert not world.engine.take_config_changes().has_security, "nothing has changed"
        forget_derived_files(world)
        world.open()
        assert table_of(world.engine) == before
        change(world, put("later"))
    assert world.engine.catalog.security.version == 5 + is_deleted


def test_a_stated_item_does_not_set_the_version_back() -> None:
    """The floor moves while changes go on, so the log has old items behind newer ones."""
    world = small_world()
    change(world, put("old"))
    end = len(world.engine.log.segments) + 4
    while len(world.engine.log.segments) < end:
        world.send("gone", topic="gone", size=4_000)
    world.purge("gone")
    world.checkpoint()
    numbers = itertools.count()
    for files in world.engine.retention.move_floor(floors(world)[-1], world.now_ms):
        for file in files:
            file.sync()
        change(world, put(f"new {next(numbers)}"))
    before = table_of(world.engine)
    assert before[0] > 3
    world.restart()
    assert table_of(world.engine) == before


def test_an_offline_check_and_a_copy_read_the_items() -> None:
    world = World()
    change(world, put("a"), MODE_ON)
    world.checkpoint()
    change(world, put("b"), delete("a"))
    before = table_of(world.engine)
    world.disk = world.disk.after_kill()
    assert finish(check(world.disk, world.config.timer)).findings == []
    finish(copy(world.disk, target := FaultyDisk(Random(1))))
    assert table_of(World(target.after_kill()).engine) == before


# ---------------------------------------------------------------- at a follower


def home_with(*parts: list[dict[str, Any]]) -> World:
    world = World()
    for part in parts:
        change(world, *part)
    return world


def test_a_follower_records_changes_with_the_versions_of_the_home() -> None:
    home, follower = home_with([put("a"), put("b"), MODE_ON]), following()
    copy_table(home, follower)
    assert table_of(follower.engine) == table_of(home.engine)
    home.engine.take_config_changes()
    change(home, put("a", "new"), delete("b"), put("c"))
    changed = home.engine.take_config_changes().security_items.values()
    exhaust(follower.engine.security.follow(changed, 6, follower.now_ms))
    follower.commit()
    assert table_of(follower.engine) == table_of(home.engine)
    end = follower.engine.log.log_end
    copy_table(home, follower)
    exhaust(follower.engine.security.follow(changed, 6, follower.now_ms))
    assert follower.engine.log.log_end == end, "a repeated table records nothing"
    follower.restart()
    assert table_of(follower.engine) == table_of(home.engine)


@pytest.mark.parametrize("later", [0, 1, 9])
def test_a_follower_follows_a_home_that_was_restored_from_a_backup(later: int) -> None:
    """Its version may be lower, the same or higher; the items differ."""
    home, follower = home_with([put("a"), put("b")], [put("c")]), following()
    backup = home.disk.after_kill()
    change(home, put("a", "lost"), put("lost"), MODE_ON, delete("b"))
    copy_table(home, follower)
    restored = World(backup)
    for n in range(later):
        change(restored, put("c", f"{n}"))
    copy_table(restored, follower)
    assert table_of(follower.engine) == table_of(restored.engine)
    assert follower.engine.catalog.security.version == 3 + later
    follower.restart()
    assert table_of(follower.engine) == table_of(restored.engine)


def test_a_table_under_copy_is_never_behind_its_version() -> None:
    """All changes of the home up to the version are in the table, except items put again later."""
    home, follower = home_with([put(name) for name in "abcdef"]), following()
    copy_table(home, follower)
    change(home, put("c", "new"), delete("a"), put("b", "new"), put("g"), delete("f"))
    change(home, put("c", "2"))
    security, table = follower.engine.security, home.engine.catalog.security
    copied = follower.engine.catalog.security
    versions = []
    parts = finish(security.plan_copy(table.items, version=table.version))
    for item in itertools.chain.from_iterable(parts):
        exhaust(security.copy([item], follower.now_ms))
        versions.append(copied.version)
        assert copied.items.keys() <= table.items.keys() | {("user", "a"), ("user", "f")}
        for key, encoded in table.items.items():
            if decode_item(encoded)["version"] <= copied.version:
                assert copied.find(key) == encoded
    assert versions == [6, 6, 9, 10, 12]


def test_a_follower_below_level_3_records_no_items() -> None:
    home, follower = home_with([put("a")]), World(feature_level=2)
    follower.engine.following.accept_home(
        HOME, may_join=True, is_complete=True, now_ms=follower.now_ms
    )
    follower.commit()
    end = follower.engine.log.log_end
    copy_table(home, follower)
    items = home.engine.catalog.security.items.values()
    exhaust(follower.engine.security.follow(items, 1, follower.now_ms))
    assert follower.engine.log.log_end == end
    assert table_of(follower.engine) == (0, {})


def test_a_member_that_leaves_forgets_the_table() -> None:
    home, follower = home_with([put("a"), MODE_ON]), following()
    copy_table(home, follower)
    draining = replace(HOME, is_draining=True)
    follower.engine.following.accept_home(
        draining, may_join=False, is_complete=True, now_ms=follower.now_ms
    )
    exhaust(follower.engine.following.leave("c", follower.now_ms))
    follower.commit()
    assert table_of(follower.engine) == (0, {})
    follower.engine.following.accept_home(
        HOME, may_join=True, is_complete=True, now_ms=follower.now_ms
    )


def test_a_broker_with_users_of_its_own_does_not_join() -> None:
    world = home_with([put("a")])
    with pytest.raises(Conflict, match="users of its own"):
        world.engine.following.accept_home(
            HOME, may_join=True, is_complete=True, now_ms=world.now_ms
        )


@pytest.mark.parametrize(
    "encoded",
    [
        b"{",
        b"\xff",
        b"[]",
        b"{}",
        b'{"op":[],"version":1}',
        b'{"op":"topic","version":1}',
        b'{"op":"user","name":"a","version":"1","user":{}}',
        b'{"op":"user","name":"a","version":1}',
        b'{"op":"securityVersion","version":1}',
    ],
)
def test_an_unreadable_item_of_a_home_is_rejected(encoded: bytes) -> None:
    follower = following()
    with pytest.raises(BadRequest, match="the home sent an unreadable security item"):
        exhaust(follower.engine.security.follow([encoded], 1, follower.now_ms))


def test_long_work_is_done_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_module, "KEYS_A_SLICE", 16)
    monkeypatch.setattr(security_module, "BYTES_A_SLICE", 10_000)
    home, follower = World(), following()
    items = [put(f"{n}", "x" * 100) for n in range(200)]
    steps = home.engine.security.change(items, expected_version=0, now_ms=home.now_ms)
    assert sum(1 for _ in steps) > 40
    table = home.engine.catalog.security
    planning = follower.engine.security.plan_copy(table.items, version=table.version)
    assert sum(1 for _ in planning) > 20
    copy_table(home, follower)
    assert table_of(follower.engine) == table_of(home.engine)
