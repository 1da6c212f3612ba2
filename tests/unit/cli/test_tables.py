"""What a table does where a terminal is narrow."""

from __future__ import annotations

import functools
import io

import pytest
from rich.console import Console

from tidemill.cli import rest

MESSAGE_ID = "01AC1F0A2B3C4D5E6F708192A3B4C5D6E7"
CLIENT_ID = "worker-7.example.com@4711@0@3f2b9c8d7e6a"


def shown(
    monkeypatch: pytest.MonkeyPatch,
    columns: tuple[str, ...],
    row: tuple[object, ...],
    *,
    width: int = 80,
) -> str:
    out = io.StringIO()
    narrow = functools.partial(Console, file=out, force_terminal=True, width=width)
    monkeypatch.setattr("rich.console.Console", narrow)
    rest.show_table(columns, [row])
    return out.getvalue()


def test_an_id_stands_in_one_piece_and_the_body_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = "TOPIC", "QUEUE", "OFFSET", "MESSAGE ID", "STORED", "BODY"
    row = "orders", 3, 4711, MESSAGE_ID, "2026-11-22T18:50:23.123Z", "hello " * 20
    lines = shown(monkeypatch, columns, row, width=100).splitlines()
    assert MESSAGE_ID in lines[1]
    assert len(lines) > 2


def test_a_table_that_is_too_wide_becomes_records(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = "CLIENT", "TOPICS", "ADDRESS", "PROXY", "TAG"
    row = CLIENT_ID, "orders, bills", "[2001:db8:0:1:1:1:1:1]:54321", "proxy-0.example.com", None
    assert shown(monkeypatch, columns, row).splitlines() == [
        f"CLIENT   {CLIENT_ID}",
        "TOPICS   orders, bills",
        f"ADDRESS  {row[2]}",
        "PROXY    proxy-0.example.com",
    ]


def test_a_value_longer_than_the_terminal_stays_in_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = "MESSAGE ID", "HANDLE", "STORED"
    row = MESSAGE_ID, "h" * 120, "2026-11-22T18:50:23.123Z"
    lines = shown(monkeypatch, columns, row).splitlines()
    assert lines[1].endswith("h" * 120)
