"""Unfinished files of an earlier process."""

from __future__ import annotations

from tests.support.worlds.engine_world import World

BEFORE_COUNT = 8  # bytes of a block file's header: magic and version


def test_an_unfinished_snapshot_is_ignored() -> None:
    """Its first bytes are right, and the checksum of zero rows is zero."""
    world = World()
    world.group()
    world.send("m0")
    world.checkpoint()
    (name,) = world.disk.names("snapshots")
    header = (world.disk.read(name) or b"")[:BEFORE_COUNT].ljust(64, b"\0")
    file = world.disk.open("snapshots/unfinished", create=True)
    file.write_at(0, [header])
    world.restart()
    assert world.report.snapshot == name
    assert world.bodies() == ["m0"]
