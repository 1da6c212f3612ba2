"""The verdict of an audit, as counts and as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from tidemill_pipeline.rows import UNREADABLE
from tidemill_pipeline.transforms.findings import BROKEN, KINDS

# Counts per topic, and counts per consumer group. Findings may be of either.
OF_TOPICS: Final = frozenset({"produced", "scheduled", "fired", "recalled"})
OF_GROUPS: Final = frozenset(
    {"delivered", "acked", "dead_lettered", "expired", "in_flight", "overdue", "waiting"}
)
SENTENCES_MAX: Final = 10  # findings that the terminal shows one by one


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SendCounts:
    """Numbers of acknowledged sends that were compared with stored messages, and of the others."""

    compared: int
    young: int = 0  # acknowledged within the grace period
    elsewhere: int = 0  # sent to topics that were not read

    def __str__(self) -> str:
        """Return a sentence with the numbers."""
        others = []
        if self.young:
            others.append(f"{self.young:,} are younger than --grace")
        if self.elsewhere:
            others.append(f"{self.elsewhere:,} are to other topics")
        compared = f"{self.compared:,} acknowledged sends were compared with stored messages"
        return f"{compared}; {', and '.join(others)}" if others else compared


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditVerdict:
    """Result of an audit."""

    counts: dict[str, int]  # findings by kind
    totals: list[dict[str, Any]]  # one per topic and group
    findings: list[dict[str, Any]]  # the first findings; the kinds in BROKEN come first
    unreadable: list[str]  # sentences on the first unreadable parts of logs
    sends: SendCounts | None = None  # None: without a list of sends

    @property
    def is_broken(self) -> bool:
        """Whether a message was lost or early, or was delivered after its recall."""
        return any(self.counts.get(kind) for kind in BROKEN)

    @property
    def is_incomplete(self) -> bool:
        """Whether a part of a log was unreadable."""
        return bool(self.counts.get(UNREADABLE))

    @property
    def outstanding(self) -> str:
        """Numbers of messages that are not settled yet, as text; "" if all are."""
        waiting, in_flight, overdue = (
            sum(row[name] for row in self.totals) for name in ("waiting", "in_flight", "overdue")
        )
        parts = []
        if waiting:
            parts.append(f"{waiting:,} wait to be delivered")
        if in_flight:
            parts.append(f"{in_flight:,} are in flight")
        if overdue:
            parts.append(f"{overdue:,} of these for longer than their invisible duration")
        return ", ".join(parts)

    @property
    def broken(self) -> list[str]:
        """Sentences on the first findings that make an audit fail, and the number of the others."""
        first = self.findings[:SENTENCES_MAX]
        lines = [_sentence(found) for found in first if found["kind"] in BROKEN]
        more = sum(self.counts.get(kind, 0) for kind in BROKEN) - len(lines)
        return [*lines, f"and {more:,} more; see the page or the table"] if more else lines

    def by_topic(self) -> dict[tuple[str, str], int]:
        """Return the number of findings by topic and kind, over all groups."""
        found: Counter[tuple[str, str]] = Counter()
        for row in self.totals:
            for kind in KINDS:
                found[row["topic"] or "", kind] += row[kind.replace("-", "_")]
        return dict(found)


def _sentence(found: Mapping[str, Any]) -> str:
    where = f"{found['topic']}/{found['queue_id']}/{found['queue_offset']}"
    parts = [
        found["message_id"],
        found["topic"] if found["queue_id"] is None else where,
        found["consumer_group"] and f"group {found['consumer_group']}",
    ]
    return f"{found['kind']}: {', '.join(filter(None, parts))}: {found['detail']}"


def count_of(row: Mapping[str, Any], name: str) -> int | None:
    """Return a count of a row as tables show it; None if the row cannot have this count."""
    others = OF_TOPICS if row["consumer_group"] else OF_GROUPS
    return None if name in others and not row[name] else int(row[name])


def headlines(verdict: AuditVerdict) -> list[tuple[str, str]]:
    """Return the sentences at the head of the page, each with its CSS class."""
    lines = []
    counts = verdict.counts
    if counts["missing"] or counts["early"]:
        lines.append(("bad", "Something was lost or early."))
    if counts["unexpected"]:
        lines.append(("bad", f"Delivered or fired after a recall: {counts['unexpected']:,}."))
    if verdict.is_incomplete:
        parts = parts_of_logs(counts[UNREADABLE])
        lines.append(("bad", f"This audit is incomplete: {parts} cannot be read."))
    if counts["unknown"]:
        count = counts["unknown"]
        lines.append(("bad", f"It is unknown whether {count:,} messages were lost."))
    outstanding = verdict.outstanding
    if not lines:
        of = " among the settled messages" if outstanding else ""
        lines.append(("good", f"No message was lost or early{of}."))
    if verdict.sends:
        lines.append(("", f"{verdict.sends}."))
    if outstanding:
        lines.append(("", f"Not settled yet, counted per group: {outstanding}."))
    return lines


def parts_of_logs(count: int) -> str:
    """Return a number of log parts in words."""
    return "a part of the log" if count == 1 else f"{count:,} parts of the logs"
