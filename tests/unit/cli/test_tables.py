"""Tables on terminals of several widths. Names, ids and times are in one piece everywhere."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import pytest
from rich.console import Console

from tidemill.cli.output import Output, OutputFormat

GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (60, 80, 100, 200)
MESSAGE_ID = "01AC1F0A2B3C4D5E6F708192A3B4C5D6E7"
CLIENT_ID = "worker-7.example.com@4711@0@3f2b9c8d7e6a"
STORED = "2026-11-22 18:50:23.123Z"
# Name of a table -> its columns and rows.
TABLES: dict[str, tuple[tuple[str, ...], list[tuple[object, ...]]]] = {
    "groups": (
        ("GROUP", "ORDER", "STATE", "LAG", "OLDEST", "IN/S", "OUT/S", "CONSUMERS", "DEAD"),
        [
            ("billing", "FIFO", "ACTIVE", 20_411, "12 m 4 s", "310.0", "1.5", 2, 37),
            ("mail", "CONCURRENT", "NEVER_POLLED", "-", "-", "0.0", "0.0", 0, None),
        ],
    ),
    "messages": (
        ("MESSAGE ID", "STORED AT", "QUEUE", "TAG", "KEYS", "BODY"),
        [
            (MESSAGE_ID, STORED, 3, "paid", "order-17", "hello " * 12),
            (MESSAGE_ID[::-1], STORED, 12, None, "order-18, customer-4", "bye"),
        ],
    ),
    "clients": (
        ("CLIENT", "KIND", "GROUP", "TOPICS", "ADDRESS", "PROXY", "SILENT"),
        [
            (
                CLIENT_ID,
                "PUSH",
                "billing",
                "orders, refunds",
                "[2001:db8::1]:54321",
                "proxy-0",
                "2 s",
            )
        ],
    ),
    "value": (
        ("GROUP", "billing"),
        [
            ("order", "FIFO"),
            ("retry", ", ".join(f"{wait} ms" for wait in range(1_000, 17_000, 1_000))),
            ("last message", MESSAGE_ID),
        ],
    ),
}


def shown(
    monkeypatch: pytest.MonkeyPatch,
    columns: tuple[str, ...],
    rows: list[tuple[object, ...]],
    *,
    width: int,
    kind: OutputFormat = OutputFormat.TABLE,
    has_color: bool = False,
) -> str:
    """Return a table as a terminal of this width shows it."""
    out = io.StringIO()
    narrow = functools.partial(Console, file=out, force_terminal=True, width=width)
    monkeypatch.setattr("rich.console.Console", narrow)
    Output(kind, has_color=has_color).table(columns, rows)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_are_those_of_the_golden_file(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    text = "\n".join(
        f"[{name}]\n{shown(monkeypatch, *table, width=width)}" for name, table in TABLES.items()
    )
    assert text == (GOLDEN / f"tables-{width}.txt").read_text("utf-8")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["groups", "messages", "clients"])
def test_every_fixed_cell_is_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, name: str, width: int
) -> None:
    """A user copies each name, id and time that a table prints."""
    columns, rows = TABLES[name]
    text = shown(monkeypatch, columns, rows, width=width)
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            if cell is not None and column not in {"BODY", "KEYS", "TAG", "TOPICS"}:
                assert str(cell) in text, (column, cell)
    missing = [each for each in columns if each not in text]
    assert not missing, "no column disappears"


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_of_a_table_is_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    for name, (columns, rows) in TABLES.items():
        lines = shown(monkeypatch, columns, rows, width=width).splitlines()
        is_table = lines[0].split() == " ".join(columns).split()
        assert not is_table or all(len(line) <= width for line in lines), name


@pytest.mark.parametrize("extra", [0, -1])
def test_a_table_needs_its_fixed_cells_and_8_columns_per_folded_one(
    monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    columns = ("ID", "BODY", "TIME")
    width = len(MESSAGE_ID) + 2 + 8 + 2 + len(STORED) + extra
    text = shown(monkeypatch, columns, [(MESSAGE_ID, "word " * 9, STORED)], width=width)
    is_table = text.startswith("ID ") and f"{MESSAGE_ID} " in text.splitlines()[1]
    assert is_table is (extra == 0)
    assert text.startswith(f"ID    {MESSAGE_ID}\n") is (extra < 0)


@pytest.mark.parametrize("width", WIDTHS)
def test_wide_folds_nothing(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    columns, rows = TABLES["messages"]
    text = shown(monkeypatch, columns, rows, width=width, kind=OutputFormat.WIDE)
    assert len(text.splitlines()) == 1 + len(rows)
    assert "hello " * 11 in text


def test_a_row_as_lines_has_no_empty_value(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = "CLIENT", "TOPICS", "ADDRESS", "PROXY", "TAG"
    row = CLIENT_ID, "orders, bills", "[2001:db8:0:1:1:1:1:1]:54321", "proxy-0.example.com", None
    assert shown(monkeypatch, columns, [row], width=80).splitlines() == [
        f"CLIENT   {CLIENT_ID}",
        "TOPICS   orders, bills",
        f"ADDRESS  {row[2]}",
        "PROXY    proxy-0.example.com",
    ]


def test_a_terminal_has_colours_unless_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    columns, rows = TABLES["groups"]
    assert "\x1b[" in shown(monkeypatch, columns, rows, width=200, has_color=True)
    assert "\x1b[" not in shown(monkeypatch, columns, rows, width=200, has_color=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in shown(monkeypatch, columns, rows, width=200, has_color=True)
