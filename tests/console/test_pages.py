"""Each page of the console in Chromium: accessible, silent, with and without script."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.console.conftest import DESKTOP, Visitor
from tests.console.world import MARKUP, ConsoleWorld
from tests.support.eventually import eventually

REPOSITORY = Path(__file__).parents[2]
IMAGES = REPOSITORY / "docs" / "images" / "console"
VARIANTS = (
    REPOSITORY / "build" / "screenshots"
)  # dark, and on a phone: for a look, not for the docs
# Screenshots of the docs are written only on request, since fonts differ between machines.
WRITES = "TIDEMILL_TEST_WRITE_SCREENSHOTS"
LIVE = "#age:text-is('live')"
HOUR_MS = 3_600_000
PHONE = {"width": 390, "height": 800}
PATHS = {
    "overview": "/ui/overview",
    "topics": "/ui/topics",
    "topic": "/ui/topics/orders",
    "topic-table": "/ui/topics/orders?view=table&range=24h",
    "tail": "/ui/topics/orders/tail",
    "purge": "/ui/topics/orders/purge",
    "change": "/ui/topics/orders/set",
    "send": "/ui/topics/orders/send",
    "groups": "/ui/groups",
    "group": "/ui/groups/billing",
    "locked": "/ui/groups/booking",
    "deliveries": "/ui/groups/billing/deliveries",
    "reset": "/ui/groups/billing/reset?topics=orders&to=earliest&sent=1",
    "messages": "/ui/messages?topic=orders&key=order-3",
    "clients": "/ui/clients",
    "cluster": "/ui/cluster",
    "settings": "/ui/settings",
    "process": "/ui/settings/proxy-0",
    "log-level": "/ui/settings/broker-0/log-level",
    "security": "/ui/security",
    "audit": "/ui/audit",
    "dead-letters": "/ui/dead-letters?group=mailing",
    "all-dead-letters": "/ui/dead-letters",
    "dead-letter": "/ui/groups/mailing/dead-letters/LETTER",
    "replay": "/ui/groups/mailing/dead-letters/replay?ids=LETTER&sent=1",
    "copy": "/ui/groups/mailing/dead-letters/LETTER/copy",
    "timers": "/ui/timers",
    "timers-day": "/ui/timers?step=10m",
    "timer": "/ui/timers/broker-0/0",
    "cancel": "/ui/timers/broker-0/0/cancel",
    "found-timers": "/ui/timers?topic=payments",
    "replay-all": "/ui/groups/mailing/dead-letters/replay-all?sent=1",
    "definitions": "/ui/settings-definitions/apply",
    "bundle": "/ui/settings-bundle/make",
    "cancel-all": "/ui/timers/cancel-all?filter.topic=payments",
    "move-all": "/ui/timers/reschedule-all?filter.topic=payments",
    "operations": "/ui/operations",
    "runbook": "/ui/runbooks/MemberUnreachable",
    "runbooks": "/ui/runbooks",
    "login": "/ui/login",
    "missing": "/ui/topics/missing",
}


@pytest.mark.parametrize("name", PATHS)
def test_a_page_is_accessible_and_fits_a_desktop_and_a_phone(
    visitor: Visitor, world: ConsoleWorld, name: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    path = PATHS[name].replace("LETTER", world.letter_ids()[-1])
    with visitor.page(path) as page:
        if page.locator("#age").count():
            page.locator(LIVE).wait_for()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            for size, kind in ((DESKTOP, "desktop"), (PHONE, "phone")):
                page.set_viewport_size(size)
                width = page.evaluate("document.documentElement.scrollWidth")
                assert width <= size["width"], f"{kind} scrolls sideways"
                if os.environ.get(WRITES):
                    is_of_docs = (scheme, kind) == ("light", "desktop")
                    variant = VARIANTS / f"{name}-{scheme}-{kind}.png"
                    page.screenshot(path=IMAGES / f"{name}.png" if is_of_docs else variant)
    if name == "missing":
        visitor.complaints.clear()  # Chromium logs the status 404 itself.


def states_of(world: ConsoleWorld) -> dict[str, str]:
    found = world.running.get("dead-letters")["deadLetters"]
    return {each["id"]: each["state"] for each in found}


def test_all_dead_letters_of_one_reason_are_discarded(
    visitor: Visitor, world: ConsoleWorld
) -> None:
    world.fail_more("dropping", 3)
    with visitor.page("/ui/dead-letters?group=dropping&reason=ATTEMPTS_EXHAUSTED") as page:
        page.get_by_role("link", name="Discard all...").click()
        page.get_by_role("button", name="Discard 3 dead letters of dropping").click()
        page.get_by_role("heading", name="Discard dead letters").wait_for()
        page.get_by_text("done: 3 of 3 done").wait_for()
    states = world.running.get("dead-letters?group=dropping")["deadLetters"]
    assert {one["state"] for one in states} == {"DISCARDED"}


def test_a_dead_letter_is_discarded(visitor: Visitor, world: ConsoleWorld) -> None:
    discarded = world.letter_ids()[3]
    with visitor.page(f"/ui/groups/mailing/dead-letters/{discarded}") as page:
        page.get_by_role("link", name="Discard...").click()
        page.get_by_role("button", name="Discard 1 dead letters of mailing").click()
        page.get_by_role("heading", name="Discard dead letters of mailing: done").wait_for()
    assert states_of(world)[discarded] == "DISCARDED"


def test_a_group_is_paused_and_resumed(visitor: Visitor, world: ConsoleWorld) -> None:
    world.running.put("groups/paused")
    with visitor.page("/ui/groups/paused") as page:
        page.get_by_role("link", name="Pause...").click()
        page.get_by_label("Reason").fill("repairs")
        page.get_by_role("button", name="Show the effect").click()
        page.get_by_role("button", name="Pause paused until").click()
        page.get_by_role("heading", name="Pause paused: done").wait_for()
        page.get_by_role("link", name="Back").click()
        page.get_by_text("repairs").first.wait_for()
        page.get_by_role("link", name="Resume...").click()
        page.get_by_role("button", name="Resume paused").click()
        page.get_by_role("heading", name="Resume paused: done").wait_for()
    assert "paused" not in world.running.get("groups/paused")


def test_a_topic_is_tailed_by_its_tag(visitor: Visitor, world: ConsoleWorld) -> None:
    with visitor.page("/ui/topics/tailed/tail") as page:
        page.get_by_label("Tag").fill("paid")
        page.get_by_role("button", name="Show").click()
        page.locator(LIVE).wait_for()
        world.send("tailed", "another", tag="open")
        world.send("tailed", f"wanted {MARKUP}", tag="paid")
        page.get_by_role("cell", name=f"wanted {MARKUP}").wait_for()
        assert page.get_by_role("cell", name="another").count() == 0
        page.get_by_role("link", name="Pause").click()
        page.get_by_role("link", name="Continue").wait_for()
        assert page.locator(LIVE).count() == 0
        assert "tag=paid" in page.url


def test_a_chart_has_a_table_and_a_range(visitor: Visitor, world: ConsoleWorld) -> None:
    world.send("orders", "counted")
    with visitor.page("/ui/topics/orders") as page:
        page.get_by_role("img", name="Messages per second").wait_for(timeout=180_000)
        # A line needs two numbers, and there is one every 5 s.
        line = page.locator(".line").first
        eventually(lambda: len((line.get_attribute("points") or "").split()) > 2)
        page.get_by_role("link", name="24h").click()
        page.get_by_role("link", name="table").click()
        page.get_by_role("columnheader", name="Acked/s").wait_for()
        assert "range=24h" in page.url


def test_a_message_is_sent_with_a_delay_and_found_among_the_timers(visitor: Visitor) -> None:
    with visitor.page("/ui/topics/payments/send") as page:
        page.get_by_label("Body").fill("later")
        page.get_by_label("Or after, in ms").fill("3600000")
        page.get_by_role("button", name="Send to payments").click()
        page.get_by_role("heading", name="Send to payments: done").wait_for()
        assert "timerId" in page.locator("main").inner_text()


def delayed_by_hours(world: ConsoleWorld, topic: str) -> None:
    """Send five messages that are due in the same hour, and two in the next hour."""
    world.running.put(f"topics/{topic}", messageType="DELAY")
    hour_ms = (time.time_ns() // 1_000_000 // HOUR_MS + 3) * HOUR_MS
    for due_ms in [hour_ms + n * 60_000 for n in range(5)] + [
        hour_ms + HOUR_MS + n for n in (0, 1)
    ]:
        world.send(topic, "x", deliverAtMs=due_ms)


def test_selected_timers_are_moved_and_an_operation_is_listed(
    visitor: Visitor, world: ConsoleWorld
) -> None:
    delayed_by_hours(world, "selected")
    first, second, *_ = [
        (f"{one['broker']}:{one['timerId']}", one["dueAtMs"])
        for one in world.running.get("timers?topic=selected")["timers"]
    ]
    with visitor.page("/ui/timers?topic=selected") as page:
        page.get_by_label(f"Select {first[0]}", exact=True).check()
        page.get_by_label(f"Select {second[0]}", exact=True).check()
        page.get_by_role("button", name="Move selected...").click()
        page.get_by_label("Or later by, in ms").fill("600000")
        page.get_by_role("button", name="Show the effect").click()
        page.get_by_role("button", name="Move 2 timers").click()
        page.get_by_role("heading", name="Move timers: done").wait_for()
    due = {
        f"{one['broker']}:{one['timerId']}": one["dueAtMs"]
        for one in world.running.get("timers?topic=selected")["timers"]
    }
    assert [due[id_] - before for id_, before in (first, second)] == [600_000, 600_000]
    with visitor.page("/ui/timers/fire-all?filter.topic=selected") as page:
        page.get_by_role("button", name="Deliver now: 7 timers").click()
        page.get_by_text("7 of 7 done").wait_for()
        page.get_by_role("link", name="All operations").click()
        page.get_by_role("cell", name="Deliver timers").first.wait_for()


def test_lines_of_a_body_arrive_as_they_were_typed(visitor: Visitor, world: ConsoleWorld) -> None:
    world.running.put("topics/lines", queues=1)
    with visitor.page("/ui/topics/lines/send") as page:
        page.get_by_label("Body").fill("one\ntwo")
        page.get_by_role("button", name="Send to lines").click()
        page.get_by_role("heading", name="Send to lines: done").wait_for()
    path = "topics/lines/queues/0/messages?broker="
    [sent] = [
        each
        for broker in ("broker-0", "broker-1")
        for each in world.running.get(path + broker)["messages"]
    ]
    assert sent["bodyText"] == "one\ntwo"


def test_keys_open_pages_fields_and_the_list_of_keys(visitor: Visitor) -> None:
    with visitor.page("/ui/topics/orders") as page:
        page.keyboard.press("g")
        page.keyboard.press("t")
        page.wait_for_url("**/ui/topics")
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.name") == "namespace"
        page.keyboard.press("Escape")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("?")
        page.get_by_role("dialog").wait_for()


def test_a_change_appears_without_a_reload_and_the_focus_stays(
    visitor: Visitor, world: ConsoleWorld
) -> None:
    with visitor.page("/ui/topics") as page:
        page.locator(LIVE).wait_for()
        page.get_by_role("link", name="orders", exact=True).focus()
        world.running.put("topics/appears")
        page.get_by_role("link", name="appears", exact=True).wait_for()
        assert page.evaluate("document.activeElement.textContent") == "orders"


def test_a_page_says_when_its_server_is_silent_and_recovers(
    visitor: Visitor, world: ConsoleWorld
) -> None:
    admin = world.running.processes["admin"].pid
    with visitor.page("/ui/topics") as page:
        page.locator(LIVE).wait_for()
        os.kill(admin, signal.SIGSTOP)
        try:
            page.get_by_text("disconnected since").wait_for()
        finally:
            os.kill(admin, signal.SIGCONT)
        page.locator(LIVE).wait_for()
