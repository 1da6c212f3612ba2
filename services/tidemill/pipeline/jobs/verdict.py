"""What an audit has come to, in counts and in sentences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, final

from tidemill.pipeline.rows import UNREADABLE
from tidemill.pipeline.transforms.audit import BROKEN, KINDS


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an audit has come to."""

    counts: dict[str, int]  # findings by kind
    totals: list[dict[str, Any]]  # one a topic and group
    findings: list[dict[str, Any]]  # the first of them
    unreadable: list[str]  # the first sentences on what could not be read

    @property
    def is_broken(self) -> bool:
        """Say whether something was lost or early, or came in spite of its recall."""
        return any(self.counts.get(kind) for kind in BROKEN)

    @property
    def is_incomplete(self) -> bool:
        """Say whether a part of what happened could not be read, and nobody knows what it was."""
        return bool(self.counts.get(UNREADABLE))

    @property
    def outstanding(self) -> str:
        """Say how much is not through, of which nobody knows more yet; "" where all is."""
        waiting, in_flight, overdue = (
            sum(row[name] for row in self.totals) for name in ("waiting", "in_flight", "overdue")
        )
        parts = []
        if waiting:
            parts.append(f"{waiting:,} wait to be delivered")
        if in_flight:
            parts.append(f"{in_flight:,} are in flight")
        if overdue:
            parts.append(f"{overdue:,} of these longer than their invisible duration")
        return ", ".join(parts)

    def by_topic(self) -> dict[tuple[str, str], int]:
        """Return the findings by topic and kind, of all groups together."""
        found: Counter[tuple[str, str]] = Counter()
        for row in self.totals:
            for kind in KINDS:
                found[row["topic"] or "", kind] += row[kind.replace("-", "_")]
        return dict(found)


def headlines(verdict: Verdict) -> list[tuple[str, str]]:
    """Return the sentences at the head of the page, each with its class."""
    lines = []
    counts = verdict.counts
    if counts["missing"] or counts["early"]:
        lines.append(("bad", "Something was lost or early."))
    if counts["unexpected"]:
        lines.append(("bad", f"Recalled, and there all the same: {counts['unexpected']:,}."))
    if verdict.is_incomplete:
        parts = parts_of_logs(counts[UNREADABLE])
        lines.append(("bad", f"This audit is incomplete: {parts} cannot be read."))
    if counts["unknown"]:
        count = counts["unknown"]
        lines.append(("bad", f"Whether {count:,} messages were lost nobody can say (unknown)."))
    left = verdict.outstanding
    if not lines:
        of = ", of what is through" if left else ""
        lines.append(("good", f"Nothing was lost, and nothing was early{of}."))
    if left:
        lines.append(("", f"Not through yet, counted by group: {left}."))
    return lines


def parts_of_logs(count: int) -> str:
    """Return how many parts of logs there are, in words."""
    return "a part of the log" if count == 1 else f"{count:,} parts of the logs"
