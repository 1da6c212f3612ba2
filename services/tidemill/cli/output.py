"""The output of commands: tables, documents, and names for other programs.

Standard output has only data. Warnings, questions and progress go to standard error.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import typer

from tidemill.common.rest_client import Json

if TYPE_CHECKING:
    from rich.console import Console

# Columns of text that a narrow terminal may fold. The other columns have names, ids and numbers,
# which users copy into the next command. They are never folded.
FOLDED: Final = frozenset(
    (
        *("BODY", "TOPICS", "REASON", "RETRY", "LEFT", "KEYS", "TAG", "KEPT BY", "BY", "CHANGE"),
        *("FINDING", "ALARM", "CUT"),
    )
)
FOLDED_WIDTH_MIN: Final = 8  # columns: below that, each line has one word
GAP_WIDTH: Final = 2  # between two columns
UNFOLDED_WIDTH: Final = 10_000  # columns if a program reads the output: each row is one line
VALUE_COLUMNS: Final = 2  # of a table that shows one object: fields and values
NO_COLOR: Final = "NO_COLOR"  # a variable that turns colours off in many programs


class OutputFormat(StrEnum):
    """Format of the output."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"
    CSV = "csv"
    NAME = "name"

    @property
    def is_text(self) -> bool:
        """Whether a person reads the output."""
        return self in {OutputFormat.TABLE, OutputFormat.WIDE}


class Output:
    """The output of one command."""

    def __init__(
        self, kind: OutputFormat, *, has_color: bool = True, is_quiet: bool = False
    ) -> None:
        self.kind = kind
        self._has_color = has_color and not os.environ.get(NO_COLOR)
        self._is_quiet = is_quiet

    @property
    def is_text(self) -> bool:
        """Whether a person reads the output, so that more tables and sentences may follow."""
        return self.kind.is_text

    def show(
        self,
        answer: Json,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        items: Sequence[Json] | None = None,
        names: Iterable[object] | None = None,
    ) -> None:
        """Print an answer in the wanted format.

        `items` are the documents of the rows. Default: the answer if it is a list, else its items,
        else the whole answer. `names` are the ids of the rows. Default: the first column, or the
        second head of a table that shows one object.
        """
        match self.kind:
            case OutputFormat.TABLE | OutputFormat.WIDE:
                self.table(columns, rows)
            case OutputFormat.CSV:
                typer.echo(_csv_text(columns, rows), nl=False)
            case OutputFormat.NAME:
                for name in _names(columns, rows) if names is None else names:
                    typer.echo(name)
            case OutputFormat.JSONL:
                for item in _items(answer) if items is None else items:
                    typer.echo(json.dumps(item, ensure_ascii=False))
            case OutputFormat.JSON | OutputFormat.YAML:
                self._document(answer)

    def say(self, answer: Json, sentence: str) -> None:
        """Print the result of a change: a document, or a sentence.

        With a format for rows, the sentence goes to standard error.
        """
        match self.kind:
            case OutputFormat.TABLE | OutputFormat.WIDE:
                if not self._is_quiet:
                    typer.echo(sentence)
            case OutputFormat.CSV | OutputFormat.NAME:
                if not self._is_quiet:
                    typer.echo(sentence, err=True)
            case OutputFormat.JSONL:
                typer.echo(json.dumps(answer, ensure_ascii=False))
            case OutputFormat.JSON | OutputFormat.YAML:
                self._document(answer)

    def stream(
        self,
        item: Json,
        columns: Sequence[str],
        row: Sequence[object],
        *,
        name: object,
        is_first: bool,
    ) -> None:
        """Print one of many rows that arrive one after another."""
        match self.kind:
            case OutputFormat.TABLE | OutputFormat.WIDE:
                typer.echo("  ".join(map(str, row)))
            case OutputFormat.CSV:
                text = _csv_text(columns, [row])
                typer.echo(text if is_first else text.partition("\n")[2], nl=False)
            case OutputFormat.NAME:
                typer.echo(name)
            case OutputFormat.JSON | OutputFormat.JSONL:
                typer.echo(json.dumps(item, ensure_ascii=False))
            case OutputFormat.YAML:
                self._document(item)

    def _document(self, answer: Json) -> None:
        if self.kind is OutputFormat.JSON:
            typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
            return
        import yaml

        text = yaml.safe_dump(answer, sort_keys=False, allow_unicode=True, explicit_start=True)
        typer.echo(text, nl=False)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print `rows` as a table, or as records if the terminal is too narrow for a table.

        No value is ever cut: users copy names and ids into the next command. The wide format folds
        nothing.
        """
        from rich.console import Console
        from rich.table import Table

        console = Console(
            highlight=False, markup=False, color_system="auto" if self._has_color else None
        )
        cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
        is_folding = console.is_terminal and self.kind is not OutputFormat.WIDE
        has_values = len(columns) == VALUE_COLUMNS  # one object: the values are text
        folded = {n for n, column in enumerate(columns) if column in FOLDED}
        if has_values:
            folded.add(1)
        needed = _needed_width(columns, cells, folded if is_folding else set())
        if not is_folding:
            console.width = max(needed, console.width)
        elif needed > console.width and not has_values:
            _print_records(console, columns, cells)
            return
        table = Table(box=None, header_style="bold", pad_edge=False)
        for n, column in enumerate(columns):
            is_folded = is_folding and n in folded
            table.add_column(column, overflow="fold", no_wrap=not is_folded)
        for row in cells:
            table.add_row(*row)
        console.width = max(console.width, needed)
        console.print(table)


def _needed_width(columns: Sequence[str], rows: Sequence[Sequence[str]], folded: set[int]) -> int:
    """Return the columns of a terminal that a table needs.

    A fixed column needs its widest cell, and a folded one at most FOLDED_WIDTH_MIN.
    """
    from rich.cells import cell_len

    widths = [
        max(cell_len(line) for cell in cells for line in cell.split("\n"))
        for cells in zip(columns, *rows, strict=True)
    ]
    widths = [
        min(width, FOLDED_WIDTH_MIN) if n in folded else width for n, width in enumerate(widths)
    ]
    return sum(widths) + GAP_WIDTH * max(len(widths) - 1, 0)


def _print_records(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print each row as lines of a column's name and its value, without empty values."""
    name_width = max(map(len, columns))
    for number, row in enumerate(rows):
        if number:
            console.print()
        for column, cell in zip(columns, row, strict=True):
            if cell:
                line = f"{column:<{name_width}}  {cell}"
                console.print(line, overflow="ignore", no_wrap=True, crop=False)


def _csv_text(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows with a header, as in RFC 4180. A line ends with a line feed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return text.getvalue()


def _names(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterable[object]:
    """Return each name once, in the order of the rows."""
    if len(columns) == VALUE_COLUMNS:
        return [rows[0][1] if columns[1] == "VALUE" else columns[1]]
    return dict.fromkeys(row[0] for row in rows if row[0] not in (None, ""))


def _items(answer: Json) -> Sequence[Any]:
    if isinstance(answer, list):
        return answer
    if isinstance(answer, dict) and isinstance(answer.get("items"), list):
        found: list[Any] = answer["items"]
        return found
    return [answer]
