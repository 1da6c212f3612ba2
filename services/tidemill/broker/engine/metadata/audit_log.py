"""The audit log of a broker group: its newest records, as the log states them (ADR 0072).

The oldest records are dropped first. A record that was dropped never fits again, so the kept
records depend on the sequence of all records alone, and not on the time of a snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

from tidemill.broker.engine.layout.audit import ROW_SIZE, AuditRow
from tidemill.broker.engine.layout.numbers import LogOffset

AUDIT_LEVEL: Final = 3  # feature level of AUDIT records
RECORDS_MAX: Final = 20_000
BYTES_MAX: Final = 16 << 20  # encoded, of all rows
STATE_BYTES_MAX: Final = 4 << 10  # of the state before a change, and of that after it
TEXT_CHARS_MAX: Final = 512  # of each other field


@final
class AuditLog:
    """The kept records by sequence, each encoded."""

    def __init__(self) -> None:
        # Plain dictionaries of numbers, tuples of atoms and bytes: the garbage collector skips
        # them. The value has the time and the fields.
        self._rows: dict[int, tuple[int, bytes]] = {}
        self._stated_at: dict[int, LogOffset] = {}
        self._first = 1  # no kept record has a lower sequence
        self.last_sequence = 0
        self.size_bytes = 0
        # The next record of the log decides whether the change of the newest record was applied.
        self.is_open = False
        self.recorded_count = 0  # since the start of this process

    def __len__(self) -> int:
        """Return the number of kept records."""
        return len(self._rows)

    # ------------------------------------------------------------ fold

    def add(self, row: AuditRow, log_offset: LogOffset) -> None:
        """Add a record, or note that a later log offset states a known one."""
        known = self._rows.get(row.sequence)
        if known is not None:
            self.size_bytes -= ROW_SIZE + len(known[1])
        self._rows[row.sequence] = row.at_ms, row.fields
        self._stated_at[row.sequence] = log_offset
        self.size_bytes += ROW_SIZE + len(row.fields)
        self._first = min(self._first, row.sequence)
        self.last_sequence = max(self.last_sequence, row.sequence)
        self.is_open = self.is_open or row.is_open
        while len(self._rows) > RECORDS_MAX or self.size_bytes > BYTES_MAX:
            self._drop(self._find_first())

    def drop_open(self) -> None:
        """Drop the newest record, because its change was not applied."""
        self.is_open = False
        self._drop(self.last_sequence)
        self.last_sequence -= 1

    def _find_first(self) -> int:
        if self._first not in self._rows:
            self._first += 1
            if self._first not in self._rows:
                self._first = min(self._rows)
        return self._first

    def _drop(self, sequence: int) -> None:
        _, fields = self._rows.pop(sequence)
        del self._stated_at[sequence]
        self.size_bytes -= ROW_SIZE + len(fields)

    # ------------------------------------------------------------ state

    def find(self, sequence: int) -> AuditRow | None:
        """Return a kept record; None if it was dropped."""
        found = self._rows.get(sequence)
        return None if found is None else AuditRow(sequence, *found)

    def newest_first(self) -> Iterator[AuditRow]:
        """Yield the kept records, the newest first."""
        for sequence in range(self.last_sequence, 0, -1):
            row = self.find(sequence)
            if row is None:
                return
            yield row

    def stated_before(self, log_offset: int) -> list[int]:
        """Return the sequences of the records that are stated only before a log offset."""
        return [one for one, stated_at in self._stated_at.items() if stated_at < log_offset]

    def all_rows(self) -> Iterator[AuditRow]:
        """Return all records for a snapshot, as of this call, even if they are read later."""
        rows, open_sequence = dict(self._rows), self.last_sequence if self.is_open else 0
        return (
            AuditRow(sequence, *row, is_open=sequence == open_sequence)
            for sequence, row in rows.items()
        )


@final
class AuditedChange:
    """A change in progress. The fold records it in front of the first record of the change."""

    def __init__(
        self,
        author: Mapping[str, str],
        *,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
        result: str = "ok",
        code: int = 0,
        reason: str = "",
    ) -> None:
        """Describe a change. `author` has the texts of caller, call, resource and action."""
        self.author = author
        self.before = before
        self.after = after
        self.result = result
        self.code = code
        self.reason = reason
        self.is_recorded = False

    def encode(self) -> bytes:
        """Return the JSON object of the record, without empty fields."""
        fields: dict[str, Any] = {
            name: text[:TEXT_CHARS_MAX] for name, text in self.author.items() if text
        }
        for name, state in (("before", self.before), ("after", self.after)):
            if state:
                fields[name] = _bounded(state)
        fields["result"] = self.result
        if self.code:
            fields["code"] = self.code
        if self.reason:
            fields["reason"] = self.reason[:TEXT_CHARS_MAX]
        return _encode(fields)


def _bounded(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first fields of a state that fit, with the names of the others."""
    encoded = _encode(state)
    if len(encoded) <= STATE_BYTES_MAX:
        return dict(state)
    kept: dict[str, Any] = {}
    size = len(b'{"truncatedBytes":16777216}')
    for name, value in state.items():
        size += len(_encode(value)) + len(_encode(name)) + len(b":,")
        if size > STATE_BYTES_MAX:
            break
        kept[name] = value
    kept["truncatedBytes"] = len(encoded)
    return kept


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
