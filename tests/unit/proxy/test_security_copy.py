"""The security items that a link has received: whole tables in pages, and changes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.support.security_items import MODE_ON, delete, put
from tests.support.seeds import seeds
from tidemill.broker.engine.layout.config import encode_item
from tidemill.broker.engine.metadata.security_items import SecurityItems, key_of
from tidemill.broker.server.wire import security_frames
from tidemill.broker.server.wire.security_frames import PAGE_ITEMS, SecurityPages, changed_items
from tidemill.proxy.link.security_copy import SecurityCopy
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

WHOLE = ("whole", "table")


class Sender:
    """A broker with a table, and the pages that it sends."""

    def __init__(self) -> None:
        self.table = SecurityItems()
        self.pages: SecurityPages | None = None

    def begin(self) -> list[pb.ConfigUpdate]:
        """Return the complete update, and send pages from now on."""
        self.pages, update = SecurityPages(self.table), pb.ConfigUpdate(is_complete=True)
        if not self.pages.announce(update):
            self.pages = None
        return [update]

    def page(self) -> list[pb.ConfigUpdate]:
        if self.pages is None:
            return []
        page = self.pages.next_page()
        if page.is_security_complete:
            self.pages = None
        return [page]

    def all_pages(self) -> list[pb.ConfigUpdate]:
        updates = self.begin()
        while self.pages is not None:
            updates += self.page()
        return updates

    def change(self, *items: dict[str, Any]) -> list[pb.ConfigUpdate]:
        """Apply items, and return the updates to send now."""
        changes = {}
        for item in items:
            self.table.version += 1
            numbered = {**item, "version": self.table.version}
            self.table.apply(numbered)
            changes[key_of(numbered)] = encode_item(numbered)
        if self.pages is not None:
            self.pages.hold(changes, self.table.version)
            return []
        return [changed_items(changes, self.table.version)]


def receiver() -> tuple[SecurityCopy, list[tuple[str, str]]]:
    """Return a copy, and the keys that it reports; WHOLE is a whole table."""
    copy, changed = SecurityCopy(), list[tuple[str, str]]()
    copy.on_change = lambda kind, name: changed.append((kind, name))
    copy.on_table = lambda: changed.append(WHOLE)
    return copy, changed


def apply(copy: SecurityCopy, updates: list[pb.ConfigUpdate]) -> None:
    for update in updates:
        copy.apply(update)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_frames, "PAGE_BYTES", 200)


def test_a_whole_table_counts_from_its_last_page_on() -> None:
    sender, (copy, changed) = Sender(), receiver()
    sender.change(*(put(f"{n}") for n in range(9)), MODE_ON)
    first, *pages, last = sender.all_pages()
    apply(copy, [first, *pages])
    assert len(pages) > 2
    assert (copy.items, copy.version, copy.is_complete) == ({}, 0, False)
    apply(copy, [last])
    assert (copy.items, copy.version, copy.is_complete) == (dict(sender.table.items), 10, True)
    assert changed == [WHOLE]


def test_an_empty_table_is_complete_at_once() -> None:
    sender, (copy, changed) = Sender(), receiver()
    sender.change(put("a"), delete("a"))
    [update] = sender.all_pages()
    apply(copy, [update])
    assert (copy.items, copy.version, copy.is_complete, changed) == ({}, 2, True, [])


def test_a_broker_below_level_3_has_an_empty_table() -> None:
    copy, _ = receiver()
    apply(copy, [pb.ConfigUpdate(is_complete=True)])
    assert (copy.items, copy.version, copy.is_complete) == ({}, 0, True)


def test_a_change_reports_its_items_alone() -> None:
    sender, (copy, changed) = Sender(), receiver()
    sender.change(put("a"), put("b"), put("c"))
    apply(copy, sender.all_pages())
    changed.clear()
    apply(copy, sender.change(put("a", "new"), delete("b"), put("x", kind="role"), MODE_ON))
    assert changed == [("user", "a"), ("user", "b"), ("role", "x"), ("security", "")]
    assert (copy.items, copy.version) == (dict(sender.table.items), 7)
    apply(copy, sender.change({"op": "security", "security": None}))
    assert ("security", "") not in copy.items
    assert copy.version == 8


def test_the_items_from_before_stay_until_the_next_table_is_whole() -> None:
    sender, (copy, changed) = Sender(), receiver()
    sender.change(*(put(f"{n}") for n in range(9)))
    apply(copy, sender.all_pages())
    before = dict(copy.items)
    changed.clear()
    sender.change(put("0", "new"), delete("1"), put("more"))
    *pages, last = sender.all_pages()
    apply(copy, pages)
    assert copy.items == before
    assert copy.is_complete
    assert changed == []
    apply(copy, [last])
    assert copy.items == dict(sender.table.items)
    assert changed == [WHOLE]
    changed.clear()
    apply(copy, sender.all_pages())
    assert changed == [], "the same table again"


def test_a_page_has_a_bounded_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_frames, "PAGE_BYTES", 1 << 20)
    sender, (copy, _) = Sender(), receiver()
    sender.change(*(put(f"{n}") for n in range(2 * PAGE_ITEMS + 1)))
    first, *pages = sender.all_pages()
    assert [len(page.security_items) for page in pages] == [PAGE_ITEMS, PAGE_ITEMS, 1]
    apply(copy, [first, *pages])
    assert copy.items == dict(sender.table.items)


def test_the_counts_change_with_the_items() -> None:
    sender, (copy, _) = Sender(), receiver()
    sender.change(*(put(f"client:{n}", kind="ban") for n in range(9)))
    *pages, last = sender.all_pages()
    apply(copy, pages)
    assert copy.counts.count("ban") == 0
    apply(copy, [last])
    assert copy.counts.count("ban", "client") == 9
    apply(copy, sender.change(delete("client:0", kind="ban"), put("prefix:a", kind="quota")))
    assert (copy.counts.count("ban", "client"), copy.counts.count("quota", "prefix")) == (8, 1)
    # A deletion in a later page than the item.
    apply(copy, sender.begin())
    apply(copy, sender.page())
    sender.change(*(delete(f"client:{n}", kind="ban") for n in range(1, 9)))
    while sender.pages is not None:
        apply(copy, sender.page())
    assert (copy.counts.count("ban"), copy.counts.count("quota")) == (0, 1)


def test_a_table_that_is_cut_off_is_forgotten() -> None:
    sender, (copy, _) = Sender(), receiver()
    sender.change(*(put(f"{n}") for n in range(9)))
    apply(copy, sender.all_pages()[:-1])
    sender.change(*(delete(f"{n}") for n in range(8)))
    apply(copy, sender.all_pages())
    assert copy.items == dict(sender.table.items)


def test_the_table_of_another_store_replaces_the_former_one_at_once() -> None:
    """In between, calls are checked against the former rights, and not against none."""
    sender, (copy, changed) = Sender(), receiver()
    sender.change(put("a"), MODE_ON)
    apply(copy, sender.all_pages())
    former = dict(copy.items)
    changed.clear()
    copy.expect_table()
    sender = Sender()
    sender.change(*(put(f"{n}") for n in range(9)))
    *pages, last = sender.all_pages()
    apply(copy, pages)
    assert (copy.items, copy.is_complete, changed) == (former, False, [])
    apply(copy, [last])
    assert (copy.items, copy.is_complete) == (dict(sender.table.items), True)
    assert changed == [WHOLE]


def test_the_last_page_is_reached_while_changes_go_on() -> None:
    sender, (copy, _) = Sender(), receiver()
    sender.change(*(put(f"{n}") for n in range(20)))
    apply(copy, sender.begin())
    while sender.pages is not None:
        sender.change(put("0", f"{sender.table.version}"))
        apply(copy, sender.page())
    assert copy.items == dict(sender.table.items)
    assert copy.version == sender.table.version


@pytest.mark.parametrize("seed", seeds("security pages", 400))
def test_changes_among_pages_are_neither_lost_nor_reordered(seed: int) -> None:
    random = Random(seed)
    sender, (copy, changed) = Sender(), receiver()
    known: dict[tuple[str, str], bytes] = {}
    names = "abcdefghij"

    def random_items() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for name in random.sample(names, random.randint(1, 4)):
            if ("user", name) in sender.table.items and random.random() < 0.5:
                items.append(delete(name))
            else:
                items.append(put(name, "x" * random.randint(0, 150)))
        return items

    apply(copy, sender.all_pages())
    for _ in range(60):
        step = random.random()
        if step < 0.5:
            apply(copy, sender.change(*random_items()))
        elif step < 0.9:
            apply(copy, sender.page())
        else:
            apply(copy, sender.begin())
        for key in changed:
            if key == WHOLE:
                known = dict(copy.items)
            elif key in copy.items:
                known[key] = copy.items[key]
            else:
                known.pop(key, None)
        changed.clear()
        assert known == copy.items, "each change is reported"
        if sender.pages is None:
            assert copy.items == dict(sender.table.items)
            assert copy.version == sender.table.version
