"""`topic create --like` and `message send -`, against real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clients.commands import tidemill
from tests.support.processes.processes import Standalone, standalone


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("copied") / "data") as started:
        yield started


def settings(running: Standalone, topic: str) -> dict[str, object]:
    found = running.get(f"topics/{topic}")
    names = "messageType", "queues", "deliverySpreadMs", "retention", "transaction", "dedup"
    return {name: found.get(name) for name in names}


def test_a_new_topic_gets_the_settings_of_another_one(running: Standalone) -> None:
    create: tuple[str, ...] = ("topic", "create", "orders", "--type", "DELAY", "--queues", "3")
    create += ("--delivery-spread", "5s", "--retention", "7d", "--retention-bytes", "1GiB")
    create += ("--dedup-window", "10m", "--dedup-key-from", "property", "--first-check", "9s")
    assert tidemill(running, *create).returncode == 0
    copied = tidemill(running, "topic", "create", "copy", "--like", "orders")
    assert copied.returncode == 0, copied.stderr
    assert settings(running, "copy") == settings(running, "orders")
    other = ("topic", "create", "other", "--like", "orders", "--queues", "5")
    assert tidemill(running, *other, "--retention", "1d", "--dedup-window", "off").returncode == 0
    changed = settings(running, "other")
    retention = changed["retention"]
    assert isinstance(retention, dict)
    assert (changed["queues"], changed["dedup"]) == (5, None)
    assert (retention["ms"], retention["bytes"]) == (86_400_000, 1 << 30)


def test_an_existing_topic_and_a_missing_model_are_refused(running: Standalone) -> None:
    tidemill(running, "topic", "create", "old", "--queues", "2")
    tidemill(running, "topic", "create", "known")
    before = settings(running, "known")
    refused = tidemill(running, "topic", "create", "known", "--like", "old")
    assert (refused.returncode, "known exists" in refused.stderr) == (1, True)
    assert settings(running, "known") == before
    assert tidemill(running, "topic", "create", "new", "--like", "missing").returncode == 1
    assert tidemill(running, "topic", "show", "new").returncode == 1


def test_lines_are_stored_in_their_order(running: Standalone) -> None:
    running.put("topics/lines", queues=1)
    lines = b'{"body": "one", "tag": "a"}\n{"body": "two", "no": 1}\n{"body": "three"}\n'
    done = tidemill(running, "message", "send", "lines", "-", "--json-lines", stdin=lines)
    assert (done.returncode, "line 2: " in done.stderr) == (5, True)
    assert done.stdout == "2 messages sent, 1 failed\n"
    found = running.get("topics/lines/queues/0/messages?fromOffset=0&broker=broker-0")
    assert [each["bodyText"] for each in found["messages"]] == ["one", "three"]
