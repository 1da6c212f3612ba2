"""What an audit has come to, in counts and in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from tidemill_pipeline.rows import UNREADABLE
from tidemill_pipeline.transforms.audit import BROKEN, KINDS

# Counts that are of a topic whoever reads it, and those of one group. Findings may be of either.
OF_TOPICS: Final = frozenset({"produced", "scheduled", "fired", "recalled"})
OF_GROUPS: Final = frozenset(
    {"delivered", "acked", "dead_lettered", "expired", "in_flight", "overdue", "waiting"}
)
TOLD_MAX: Final = 10  # findings that a terminal is told one by one


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sends:
    """How many acknowledged sends were compared with what was stored, and how many were not."""

    compared: int
    young: int = 0  # acknowledged so shortly before that nothing is said of them
    elsewhere: int = 0  # to topics that were not read

    def __str__(self) -> str:
        """Say so."""
        left = []
        if self.young:
            left.append(f"{self.young:,} are too young, by --grace")
        if self.elsewhere:
            left.append(f"{self.elsewhere:,} are to other topics")
        told = f"{self.compared:,} acknowledged sends were compared with what was stored"
        return f"{told}; {', and '.join(left)}" if left else told


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an audit has come to."""

    counts: dict[str, int]  # findings by kind
    totals: list[dict[str, Any]]  # one a topic and group
    findings: list[dict[str, Any]]  # the first of them, those of BROKEN before the others
    unreadable: list[str]  # the first sentences on what could not be read
    sends: Sends | None = None  # None: there was no list of them

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

    @property
    def broken(self) -> list[str]:
        """Return a sentence for each of the first findings that must not be, and on the others."""
        told = [_sentence(found) for found in self.findings[:TOLD_MAX] if found["kind"] in BROKEN]
        more = sum(self.counts.get(kind, 0) for kind in BROKEN) - len(told)
        return [*told, f"and {more:,} more, which the page and the table have"] if more else told

    def by_topic(self) -> dict[tuple[str, str], int]:
        """Return the findings by topic and kind, of all groups together."""
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
    """Return a count of a topic and a group, as tables show it; None where it is of neither."""
    others = OF_TOPICS if row["consumer_group"] else OF_GROUPS
    return None if name in others and not row[name] else int(row[name])


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
    if verdict.sends:
        lines.append(("", f"{verdict.sends}."))
    if left:
        lines.append(("", f"Not through yet, counted by group: {left}."))
    return lines


def parts_of_logs(count: int) -> str:
    """Return how many parts of logs there are, in words."""
    return "a part of the log" if count == 1 else f"{count:,} parts of the logs"
