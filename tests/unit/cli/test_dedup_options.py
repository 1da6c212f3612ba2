"""The options of deduplication, and what the commands say of it."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from tidemill.cli.dedup_keys import DedupModeName, KeyFromName, dedup_body, describe_dedup
from tidemill.cli.topic_texts import change_text

DEDUP = {"windowMs": 120_000, "keyFrom": "propertyOrMessageId", "mode": "first"}
TOPIC = {"name": "orders", "messageType": "NORMAL", "queues": 8}


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ((None, None, None, None, None), {}),
        (("10m", None, None, None, None), {"dedup": {"windowMs": 600_000}}),
        ((None, KeyFromName.PROPERTY, None, None, None), {"dedup": {"keyFrom": "property"}}),
        (
            (None, None, DedupModeName.REPLACE, "1h", "8MiB"),
            {"dedup": {"mode": "replace", "maxWaitMs": 3_600_000, "memoryBytes": 8 << 20}},
        ),
        ((None, None, None, None, "shared"), {"dedup": {"memoryBytes": None}}),
        (("off", None, None, None, None), {"dedup": None}),
    ],
)
def test_the_options_are_the_fields_of_rest(options: Any, body: dict[str, Any]) -> None:
    assert dedup_body(*options, is_on=True) == body


def test_shared_memory_alone_does_not_turn_the_deduplication_on() -> None:
    with pytest.raises(typer.BadParameter, match="add --dedup-window"):
        dedup_body(None, None, None, None, "shared", is_on=False)
    body = dedup_body("1m", None, None, None, "shared", is_on=False)
    assert body == {"dedup": {"windowMs": 60_000, "memoryBytes": None}}


def test_off_excludes_the_other_options() -> None:
    with pytest.raises(typer.BadParameter, match="--dedup-window off excludes"):
        dedup_body("off", None, DedupModeName.FIRST, None, None, is_on=True)


def test_a_deduplication_is_described() -> None:
    assert describe_dedup(TOPIC) == "off"
    pending = {**TOPIC, "dedupOffPending": ["broker-1", "broker-2"]}
    text = "off, except for keys that broker-1, broker-2 may still know"
    assert describe_dedup(pending) == text
    keyed = "within 2 m 0 s by the property dedup-key, else the message id"
    assert describe_dedup({"dedup": DEDUP}) == keyed
    replacing = {**DEDUP, "mode": "replace", "maxWaitMs": 3_600_000, "memoryBytes": 8 << 20}
    assert describe_dedup({"dedup": replacing}) == (
        f"{keyed}; delayed messages replaced for at most 1 h 0 m; own memory of 8.0 MiB"
    )


def test_a_change_of_the_deduplication_is_shown() -> None:
    keyed = {**TOPIC, "dedup": DEDUP}
    assert "deduplicated within 2 m 0 s" in change_text(None, keyed)
    assert change_text(TOPIC, keyed).startswith("changed: ")
    assert "deduplication off -> within 2 m 0 s" in change_text(TOPIC, keyed)
    assert change_text(keyed, TOPIC).endswith("-> off")
    assert change_text(keyed, keyed).startswith("is there, unchanged: ")
