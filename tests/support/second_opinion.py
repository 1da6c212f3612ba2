"""What clients noted against what an audit of the broker's own events found.

Both judge the same run, by other witnesses: the history by what clients were told, the audit by
what stands in the log. `compare` says where they differ. A delivery of which only the log knows is
one whose answer was lost, and those are listed; each must have been made when answers were lost,
because a receive failed or a process was killed, or it is a difference as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.support.history import History


class Delivery(NamedTuple):
    """One delivery, as the log tells it."""

    key: str
    attempt: int
    at_ms: int


class Failed(NamedTuple):
    """When answers were lost: a receive that failed, or a kill. By the machine's wall clock."""

    begun_ms: int
    ended_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """One subscription as its clients saw it."""

    topic: str
    group: str
    history: History
    early: frozenset[str]  # keys of what came before it was due
    failed: Sequence[Failed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Where two opinions differ, and what only one can know, as sentences."""

    differences: Sequence[str]
    lost_answers: Sequence[str]


def compare(
    seen: Witness, findings: Iterable[Mapping[str, Any]], deliveries: Sequence[Delivery],
    *, slack_ms: int,
) -> Compared:  # fmt: skip
    """Compare a subscription's history with an audit's findings of its topic and group.

    A delivery may be made up to `slack_ms` after its receive has failed: a broker goes on with what
    it was asked for a while, though nobody waits for it any more.
    """
    found: dict[str, Counter[str]] = {
        kind: Counter() for kind in ("missing", "duplicate", "redelivered", "early")
    }
    for finding in findings:
        of_group = finding["consumer_group"] in {None, seen.group}
        if finding["topic"] == seen.topic and of_group and finding["kind"] in found:
            found[finding["kind"]][finding["message_id"]] += times_of(finding)
    received = Counter((one.key, one.attempt) for one in seen.history.receives)
    told = Counter((one.key, one.attempt) for one in deliveries)
    verdict = seen.history.judge()
    came = {key for key, _ in received}
    noted = {
        # What came and was never acked is under way to an audit.
        "missing": {_key(line) for line in verdict.lost} - came,
        "duplicate": {_key(line) for line in verdict.duplicated},
        "early": set(seen.early),
    }
    differences = [
        f"{kind}: {key} is found by {'the history' if key in keys else 'the audit'} alone"
        for kind, keys in noted.items()
        for key in sorted(keys ^ set(found[kind]))
    ]
    differences += [
        f"redelivered: {key} came in attempt {attempt}, and no event tells it"
        for key, attempt in sorted(received - told)
    ]
    lost = told - received
    differences += _unexplained(seen, deliveries, lost, slack_ms)
    differences += _counted(received, told, found)
    answers = [
        f"{seen.group}: {one.key}, attempt {one.attempt}, at {one.at_ms}"
        for one in deliveries
        if (one.key, one.attempt) in lost
    ]
    return Compared(differences=differences, lost_answers=answers)


def times_of(finding: Mapping[str, Any]) -> int:
    """Return how many deliveries a finding is about: `delivered 2 times ...`; of others one."""
    if finding["kind"] not in {"duplicate", "redelivered"}:
        return 1
    return int(finding["detail"].split()[1])


def _unexplained(
    seen: Witness, deliveries: Sequence[Delivery], lost: Counter[tuple[str, int]], slack_ms: int
) -> list[str]:
    return [
        f"redelivered: {one.key}, attempt {one.attempt}, was made at {one.at_ms} and came to nobody"
        ", and no answer was lost then"
        for one in deliveries
        if (one.key, one.attempt) in lost
        and not any(
            failed.begun_ms <= one.at_ms <= failed.ended_ms + slack_ms for failed in seen.failed
        )
    ]


def _counted(
    received: Counter[tuple[str, int]],
    told: Counter[tuple[str, int]],
    found: Mapping[str, Counter[str]],
) -> list[str]:
    """Find where the audit's repeats are not the history's and the lost answers together."""
    of_history, of_log = (_by_key(received), _by_key(told))
    differences = []
    for key in sorted(of_log.keys() | of_history.keys() | found["redelivered"].keys()):
        lost = of_log[key] - of_history[key]
        repeats = found["redelivered"][key] + found["duplicate"][key]
        if repeats != max(0, of_history[key] + lost - 1):
            differences.append(
                f"redelivered: {key} came {of_history[key]} times, {lost} answers were lost, and"
                f" the audit has {repeats} repeats"
            )
    return differences


def _by_key(deliveries: Counter[tuple[str, int]]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for (key, _), times in deliveries.items():
        counted[key] += times
    return counted


def _key(sentence: str) -> str:
    return sentence.partition(" ")[0]
