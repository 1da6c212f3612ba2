"""Security items without a meaning, and the commands that change them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tests.support.disk.offline_world import finish
from tests.support.worlds.engine_world import World
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.config import encode_item
from tidemill.broker.engine.metadata.security_items import ItemKey, SecurityItems
from tidemill.security.item_counts import ItemCounts

MODE_ON = {"op": "security", "security": {"mode": "on"}}
MODE_OFF = {"op": "security", "security": {"mode": "off"}}


def put(name: str, text: str = "", *, kind: str = "user") -> dict[str, Any]:
    """Return an item of a change."""
    return {"op": kind, "name": name, kind: {"text": text}}


def delete(name: str, *, kind: str = "user") -> dict[str, Any]:
    """Return a deletion of a change."""
    return {"op": f"delete{kind.capitalize()}", "name": name}


def counts_of(kind: str, names: Iterable[str]) -> ItemCounts:
    """Count the items of one kind by their names."""
    counts = ItemCounts()
    for name in names:
        counts.add(kind, name)
    return counts


def exhaust(steps: Iterator[None]) -> None:
    """Run all steps."""
    for _ in steps:
        pass


def change_engine(engine: Engine, *items: dict[str, Any], now_ms: int, **options: Any) -> int:
    """Change the items at the present version; return the new one."""
    options.setdefault("expected_version", engine.catalog.security.version)
    return finish(engine.security.change(items, now_ms=now_ms, **options))


def change(world: World, *items: dict[str, Any], **options: Any) -> int:
    """Change the items at the present version in a round of its own; return the new version."""
    version = change_engine(world.engine, *items, now_ms=world.now_ms, **options)
    world.commit()
    return version


def table_of(engine: Engine) -> tuple[int, dict[ItemKey, bytes]]:
    """Return the version of a table, and its items."""
    security = engine.catalog.security
    check_table(security)
    return security.version, dict(security.items)


def check_table(security: SecurityItems) -> None:
    """Check the parts of a table against its items."""
    assert security.size_bytes == sum(map(len, security.items.values()))
    for kind in ("security", "user", "role", "token", "quota", "ban"):
        found = security.page(kind, None, limit=100_000, bytes_max=1 << 30)
        names = sorted(name for of, name in security.items if of == kind)
        assert found.items == [security.items[kind, name] for name in names]
        assert not found.has_more
        assert security.count(kind) == len(names)


class TableModel:
    """The table that a series of changes makes."""

    def __init__(self) -> None:
        self.version = 0
        self.items: dict[ItemKey, bytes] = {}

    def change(self, *items: dict[str, Any]) -> None:
        """Apply the items of a change."""
        for item in items:
            self.version += 1
            op = item["op"]
            if op.startswith("delete"):
                del self.items[op.removeprefix("delete").lower(), item["name"]]
            else:
                self.items[op, item.get("name", "")] = encode_item(
                    {**item, "version": self.version}
                )

    @property
    def table(self) -> tuple[int, dict[ItemKey, bytes]]:
        """The table in the form of `table_of`."""
        return self.version, dict(self.items)
