"""The users that have settled dead letters. Their records in the log do not name a user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, final

from tidemill.broker.engine.layout.dead_letter import SettledRange
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.metadata.catalog import Catalog

AUDIT_RECORDS_MAX: Final = 256  # that one search looks at
_CALLS: Final = b"/dead-letters"  # in the audit records of settlements


@final
class SettlementAuthors:
    """Finds the users of settlements for one page, and remembers each search."""

    def __init__(self, catalog: Catalog) -> None:
        self._audit = catalog.audit
        self._operations = catalog.operations
        # By the group and the last audit record that is not later than the settlement. A page has
        # a bounded number of dead letters.
        self._found: dict[tuple[str, int], str] = {}
        self.records_read = 0  # audit records, of all searches

    def find(self, group: str, settled: SettledRange) -> str:
        """Return the user that has settled dead letters of a group; "" if it is unknown."""
        if settled.operation_id:
            operation = self._operations.by_id.get(LogOffset(settled.operation_id))
            details: dict[str, Any] = {} if operation is None else json.loads(operation.details)
            return _user_in(details)
        if not settled.settled_at_ms:
            return ""
        key = group, self._last_sequence(settled.settled_at_ms)
        if key not in self._found:
            self._found[key] = self._search(*key)
        return self._found[key]

    def _last_sequence(self, at_ms: int) -> int:
        """Return the sequence of the last audit record that is not later than a time."""
        audit = self._audit
        low, high = max(audit.last_sequence - len(audit), 0), audit.last_sequence
        while low < high:
            middle = (low + high + 1) // 2
            row = audit.find(middle)
            if row is not None and row.at_ms > at_ms:
                high = middle - 1
            else:
                low = middle
        return low

    def _search(self, group: str, last: int) -> str:
        """Return the user of the last call up to an audit record that settled single letters."""
        resource = f"Group:{group}"
        encoded = json.dumps(resource).encode()
        for sequence in range(last, max(last - AUDIT_RECORDS_MAX, 0), -1):
            row = self._audit.find(sequence)
            if row is None:
                break
            self.records_read += 1
            if _CALLS not in row.fields or encoded not in row.fields:
                continue  # Without the cost of a decoder.
            fields = json.loads(row.fields)
            # The begin of an operation has a kind. It settles nothing itself.
            if fields.get("resource") == resource and "kind" not in fields.get("after", {}):
                return _user_in(fields)
        return ""


def _user_in(fields: Mapping[str, Any]) -> str:
    return str(fields.get("user") or fields.get("claimedUser", ""))
