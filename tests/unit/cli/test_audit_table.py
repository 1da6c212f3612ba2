"""The table of `tidemill audit list` on terminals of several widths."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
from rich.console import Console

from tidemill.cli.audit import COLUMNS, _row
from tidemill.cli.output import Output, OutputFormat

CHANGE = {
    "id": "broker-0:2481",
    "atMs": 1_795_750_000_123,
    "kind": "change",
    "user": "ops",
    "from": "10.1.2.3",
    "action": "Update",
    "resource": "Topic:orders",
    "before": {"queues": 4},
    "after": {"queues": 8, "retention": {"ms": 60_000}},
    "result": "ok",
}
REFUSAL = {
    "id": "proxy-0:7",
    "atMs": 1_795_750_000_123,
    "kind": "refusal",
    "from": "10.1.2.3",
    "call": "SendMessage",
    "result": "would_refuse",
    "reason": "no credentials",
    "count": 49,
}


def shown(monkeypatch: pytest.MonkeyPatch, width: int, *records: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    narrow = functools.partial(Console, file=out, force_terminal=True, width=width, no_color=True)
    monkeypatch.setattr("rich.console.Console", narrow)
    Output(OutputFormat.TABLE).table(COLUMNS, [_row(record) for record in records])
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_change_shows_what_differs() -> None:
    assert _row(CHANGE) == (
        "2026-11-27 03:26:40Z",
        "ops at 10.1.2.3",
        "Update",
        "Topic:orders",
        "ok",
        'queues 4 -> 8, retention unset -> {"ms": 60000}',
    )


def test_a_pause_and_its_end_differ_and_have_a_time() -> None:
    pause = {"pausedUntilMs": 1_795_750_000_123, "pauseReason": "repairs"}
    group = {**CHANGE, "resource": "Group:billing"}
    assert _row({**group, "before": None, "after": pause})[-1] == (
        "pausedUntilMs unset -> 2026-11-27 03:26:40Z, pauseReason unset -> repairs"
    )
    assert _row({**group, "before": pause, "after": None})[-1] == (
        "pausedUntilMs 2026-11-27 03:26:40Z -> unset, pauseReason repairs -> unset"
    )


def test_times_within_a_value_are_utc() -> None:
    before = {"dueAtMs": 1_795_750_000_123, "secrets": [{"id": 1, "notAfterMs": 0}]}
    after = {"dueAtMs": 1_795_750_001_000, "secrets": []}
    assert _row({**CHANGE, "before": before, "after": after})[-1] == (
        "dueAtMs 2026-11-27 03:26:40Z -> 2026-11-27 03:26:41Z,"
        ' secrets -{"id": 1, "notAfterMs": "none"}'
    )


def test_a_reset_shows_the_queues_that_it_moved() -> None:
    states = {
        "before": {"topic": "orders", "offsets": [0, 181, 0]},
        "after": {"topic": "orders", "offsets": [7, 0, 0]},
    }
    assert _row({**CHANGE, **states})[-1] == (
        "topic orders, offsets[0] 0 -> 7; offsets[1] 181 -> 0"
    )
    same = {"before": {"offsets": [0]}, "after": {"offsets": [0]}}
    assert _row({**CHANGE, **same})[-1] == "offsets 0"


def test_a_changed_list_shows_its_changed_items_alone() -> None:
    """The state before a change has the keys of entries in another order than the state after."""
    kept = {"resource": "Topic:a", "actions": ["Pub"], "decision": "ALLOW"}
    entry = {"decision": "DENY", "resource": "Topic:b", "actions": ["Get", "Sub"]}
    sourced = {**entry, "sources": ["10.0.0.0/8"]}
    before, after = {"entries": [kept, entry]}, {"entries": [dict(reversed(kept.items())), sourced]}
    assert _row({**CHANGE, "before": before, "after": after})[-1] == (
        "entries -DENY Topic:b Get,Sub; +DENY Topic:b Get,Sub from 10.0.0.0/8"
    )
    before = {"entries": [entry, kept]}
    assert _row({**CHANGE, "before": before, "after": {"entries": [kept, entry]}})[-1] == (
        "entries in another order"
    )
    made = {"entries": [kept, entry], "roles": []}
    assert _row({**CHANGE, "before": {}, "after": made})[-1] == (
        "entries ALLOW Topic:a Pub; DENY Topic:b Get,Sub, roles none"
    )


def test_a_refusal_shows_its_reason_and_the_number_of_calls() -> None:
    *_, result, text = _row(REFUSAL)
    assert (result, text) == ("would_refuse", "no credentials (49 times)")
    assert _row(REFUSAL)[1:4] == ("10.1.2.3", "SendMessage", "")


def test_names_of_clients_move_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    forged = {**REFUSAL, "resource": "Topic:\x1b[2J\n2026-11-29  ops", "reason": "\x1b]0;x\x07"}
    cells = _row(forged)
    assert all(cell.isprintable() for cell in cells)
    assert "\\x1b[2J\\n2026" in cells[3]


def test_a_record_without_a_result_has_a_row() -> None:
    assert _row({"atMs": 1, "kind": "refusal", "reason": "7 records over the limit"})[4] == ""


def test_the_table_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, 80, CHANGE)
    assert max(map(len, lines[1:])) <= 80  # The head has control codes.
    assert "Topic:orders" in lines[1]
    assert "2026-11-27 03:26:40Z" in lines[1]


def test_a_narrower_terminal_gets_lines_of_names_and_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = shown(monkeypatch, 60, CHANGE)
    assert lines[0] == "TIME      2026-11-27 03:26:40Z"
    assert "RESOURCE  Topic:orders" in lines
