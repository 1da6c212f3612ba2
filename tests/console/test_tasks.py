"""The everyday tasks of an operator: with the mouse, by keyboard alone, and without script."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Final

import httpx
import pytest

from tests.console.conftest import Visitor
from tests.console.hands import Hand, Keyboard, Mouse, WithoutScript
from tests.console.world import MARKUP, ConsoleWorld, filled_world
from tests.support.eventually import eventually
from tests.support.processes.processes import descendants, standalone

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
HANDS: Final[dict[str, type[Mouse | Keyboard]]] = {
    "mouse": Mouse,
    "keyboard": Keyboard,
    "without script": WithoutScript,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    folder = tmp_path_factory.mktemp("tasks") / "data"
    with standalone(folder, "--groups=3", "--replicas=2") as running:
        yield filled_world(running)


@pytest.fixture(params=HANDS)
def hand(request: pytest.FixtureRequest, visitor: Visitor) -> Iterator[Hand]:
    has_script = request.param != "without script"
    with visitor.page("/ui/overview", java_script_enabled=has_script) as page:
        yield HANDS[request.param](page)


@pytest.fixture
def own(request: pytest.FixtureRequest) -> str:
    """Return a name that no other test has."""
    return "".join(each if each.isalnum() else "-" for each in request.node.name)[-40:].strip("-")


def button(hand: Hand, name: str) -> None:
    hand.press(hand.page.get_by_role("button", name=name))


def link(hand: Hand, name: str, *, exact: bool = True) -> None:
    hand.press(hand.page.get_by_role("link", name=name, exact=exact).first)


def field(hand: Hand, label: str, text: str) -> None:
    hand.fill(hand.page.get_by_label(label, exact=True), text)


def heading(hand: Hand, text: str) -> None:
    hand.page.get_by_role("heading", name=text).wait_for()


def test_the_group_furthest_behind_and_its_cause(hand: Hand) -> None:
    hand.press(
        hand.page.get_by_role("table", name="Groups furthest behind").get_by_role("link").first
    )
    hand.page.get_by_role("rowheader", name="no consumers").wait_for()


def test_messages_of_a_silent_consumer_are_released(
    hand: Hand, world: ConsoleWorld, own: str
) -> None:
    world.hold(own, 3)
    link(hand, "Groups")
    field(hand, "Begins with", own)
    button(hand, "Show")
    link(hand, own)
    link(hand, "Deliveries")
    link(hand, "Release what", exact=False)
    button(hand, f"Release 3 deliveries of {own}")
    heading(hand, "Release deliveries")
    assert world.running.get(f"groups/{own}/progress")["total"]["inFlight"] == 0


def test_two_dead_letters_and_then_all_of_a_reason_are_replayed(
    hand: Hand, world: ConsoleWorld, own: str
) -> None:
    world.fail_more(own, 5)
    hand.open("Dead letters")
    field(hand, "Group", own)
    hand.choose(hand.page.get_by_role("combobox", name="Reason"), "attempts exhausted")
    button(hand, "Show")
    boxes = hand.page.get_by_role("checkbox")
    hand.press(boxes.nth(0))
    hand.press(boxes.nth(1))
    button(hand, "Replay selected")
    button(hand, f"Replay 2 messages to {own} only")
    link(hand, "Back")
    link(hand, f"Replay all to {own} only...")
    button(hand, f"Replay 3 messages to {own} only")
    hand.sees("3 of 3 done")
    states = [one["state"] for one in world.running.get(f"dead-letters?group={own}")["deadLetters"]]
    assert states == ["REPLAYED"] * 5


def test_a_poison_body_is_edited_and_replayed(hand: Hand, world: ConsoleWorld, own: str) -> None:
    world.fail_more(own, 1)
    hand.open("Dead letters")
    field(hand, "Group", own)
    button(hand, "Show")
    hand.press(hand.page.locator("tbody a.id").first)
    link(hand, "Edit and replay...")
    field(hand, "Body", '{"amount": 12}')
    button(hand, "Show the effect")
    button(hand, f"Replay the changed message to {own} only")
    heading(hand, "Edit and replay")
    [letter] = world.running.get(f"dead-letters?group={own}")["deadLetters"]
    assert letter["state"] == "REPLAYED"


def test_a_timer_is_found_by_its_key_and_moved(hand: Hand, world: ConsoleWorld, own: str) -> None:
    due_ms = time.time_ns() // 1_000_000 + HOUR_MS
    world.send("payments", "x", keys=[own], deliverAtMs=due_ms)
    hand.open("Timers")
    field(hand, "Topic", "payments")
    field(hand, "Key", own)
    button(hand, "Search")
    hand.press(hand.page.locator("tbody a.id").first)
    link(hand, "Move...")
    field(hand, "Or from now, in ms", str(2 * HOUR_MS))
    button(hand, "Show the effect")
    button(hand, "Move")
    heading(hand, "done")
    [timer] = world.running.get(f"timers?topic=payments&key={own}")["timers"]
    assert timer["dueAtMs"] >= due_ms + HOUR_MS


def test_all_timers_of_an_hour_are_cancelled(hand: Hand, world: ConsoleWorld, own: str) -> None:
    world.running.put(f"topics/{own}", messageType="DELAY")
    hour_ms = (time.time_ns() // 1_000_000 // HOUR_MS + 3) * HOUR_MS
    for due_ms in (hour_ms, hour_ms + 1, hour_ms + HOUR_MS):
        world.send(own, "x", deliverAtMs=due_ms)
    hand.open("Timers")
    field(hand, "Topic", own)
    button(hand, "Search")
    hand.press(hand.page.locator(".heat").get_by_role("link", name="2", exact=True))
    link(hand, "Cancel all...")
    button(hand, "Cancel 2 timers")
    hand.sees("2 of 2 done")
    assert len(world.running.get(f"timers?topic={own}")["timers"]) == 1


def test_a_message_is_found_by_its_key_with_body_and_journey(hand: Hand) -> None:
    hand.open("Messages")
    field(hand, "Topic", "orders")
    field(hand, "Key", "order-7")
    button(hand, "Find")
    hand.press(hand.page.locator("tbody a.id").first)
    hand.sees(f"{MARKUP} 7")
    hand.page.get_by_role("cell", name="stored").first.wait_for()


def test_a_topic_is_tailed_by_its_tag(hand: Hand, world: ConsoleWorld, own: str) -> None:
    hand.open("Topics")
    link(hand, "tailed")
    link(hand, "Newest messages")
    field(hand, "Tag", own)
    button(hand, "Show")
    world.send("tailed", f"of another tag than {own}", tag="open")
    world.send("tailed", f"arrives {own}", tag=own)
    hand.sees(f"arrives {own}")
    assert "another tag" not in hand.page.locator("main").inner_text()


def test_a_message_is_sent_for_later_and_its_delivery_seen(hand: Hand, own: str) -> None:
    hand.open("Topics")
    link(hand, "payments")
    link(hand, "Send...")
    field(hand, "Body", f"later {own}")
    field(hand, "Or after, in ms", "5000")
    button(hand, "Send to payments")
    link(hand, "Back")
    link(hand, "Newest messages")
    hand.sees(f"later {own}")


def test_a_topic_is_purged_after_its_loss_is_read(
    hand: Hand, world: ConsoleWorld, own: str
) -> None:
    world.running.put(f"topics/{own}")
    world.send(own, "x")
    hand.open("Topics")
    field(hand, "Begins with", own)
    button(hand, "Show")
    link(hand, own)
    link(hand, "Purge...")
    button(hand, f"Remove 1 messages of {own}")
    heading(hand, f"Purge {own}: done")


def test_a_locked_queue_is_unlocked(hand: Hand, world: ConsoleWorld, own: str) -> None:
    world.lock(own)
    hand.open("Groups")
    field(hand, "Begins with", own)
    button(hand, "Show")
    link(hand, own)
    link(hand, f"Unlock... queue 0 of {own}")
    button(hand, f"Unlock 1 messages for {own}")
    heading(hand, f"Unlock a queue of {own}: done")
    assert world.running.get(f"groups/{own}/progress")["locks"] == []


def test_a_master_is_moved_and_its_outage_read(hand: Hand, world: ConsoleWorld) -> None:
    before = world.running.get("replicas/broker-1")
    hand.open("Cluster")
    link(hand, "Move the master of broker-1...")
    button(hand, "Move the master of broker-1")
    link(hand, "Back")
    eventually(lambda: world.running.get("replicas/broker-1")["epoch"] > before["epoch"])
    after = world.running.get("replicas/broker-1")
    rows = hand.page.get_by_role("table", name="Elections").nth(1)
    epoch = rows.get_by_role("cell", name=str(after["epoch"]), exact=True)
    if isinstance(hand, WithoutScript):
        hand.page.reload()
    epoch.wait_for()


def test_a_missing_right_is_found_and_given(hand: Hand, world: ConsoleWorld, own: str) -> None:
    world.running.put(f"users/{own}", entries=[{"resource": "Topic:orders", "actions": ["Pub"]}])
    hand.open("Security")
    field(hand, "User", own)
    field(hand, "Resource", "Topic:payments")
    button(hand, "Ask")
    hand.sees("no")
    link(hand, f"Change the entries of {own}")
    field(hand, "Entries, one per line", "Topic:orders Pub\nTopic:payments Pub")
    button(hand, "Show the effect")
    button(hand, f"Save user {own}")
    heading(hand, f"Change user {own}: done")
    entries = world.running.get(f"users/{own}")["entries"]
    assert [entry["resource"] for entry in entries] == ["Topic:orders", "Topic:payments"]


def test_the_author_of_a_reset_is_found(hand: Hand, world: ConsoleWorld, own: str) -> None:
    world.hold(own, 1)
    reset = httpx.post(
        f"{world.admin}/api/v1/groups/{own}:resetOffset",
        json={"topic": own, "to": "latest"},
        headers={"Tidemill-User": "alice"},
        trust_env=False,
        timeout=30,
    )
    reset.raise_for_status()
    hand.open("Audit")
    field(hand, "Resource", f"Group:{own}")
    button(hand, "Show")
    row = hand.page.get_by_role("row").filter(has_text="esetOffset").first
    row.get_by_role("cell", name="alice").wait_for()


def test_the_runbook_of_a_broken_part_is_opened(hand: Hand, world: ConsoleWorld) -> None:
    pids = [
        pid
        for name, process in world.running.processes.items()
        if name.startswith("broker-2")
        for pid in descendants(process.pid)
    ]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        hand.sees("BrokerDown")
        link(hand, "Runbook BrokerDown")
        heading(hand, "Mitigation")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    eventually(lambda: "unreachable" not in world.running.get("broker-groups"), within_ms=60_000)
