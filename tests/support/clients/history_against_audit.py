"""A comparison of the clients' history with an audit of the broker's events.

Both judge the same run: the history from the clients' answers, the audit from the log. `compare`
lists the differences for each consumer group. If only the log has a delivery, its answer was lost.
`compare` lists these deliveries too. Such a delivery must fall into a time of lost answers, in
which a receive failed or a process was killed. Otherwise it is a difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.clients.history import History

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KINDS = ("missing", "duplicate", "early")  # findings that both sides report
_REPEATS = ("duplicate", "redelivered")


class Delivery(NamedTuple):
    """One delivery in the log."""

    group: str
    key: str
    attempt: int
    at_ms: int
    # First position of its message: the broker may store a repeated send twice.
    place: str = ""

    def __str__(self) -> str:
        return f"{self.group}: {self.key}, attempt {self.attempt}, at {self.at_ms}"


class LostAnswerSpan(NamedTuple):
    """A time of lost answers by the wall clock: a failed receive or a kill."""

    begun_ms: int
    ended_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """One subscription as its clients saw it."""

    topic: str
    group: str
    received: Sequence[tuple[str, int]]  # key and attempt of each delivery
    found: Mapping[str, frozenset[str]]  # keys by the audit's name of the kind
    failed: Sequence[LostAnswerSpan]
    # An ordered push consumer itself passes a message to its listener again, as a new attempt.
    repeats_itself: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences and the lost answers, as sentences."""

    differences: Sequence[str]
    lost_answers: Sequence[str]


def witness_of(
    history: History,
    *,
    topic: str,
    group: str,
    early: Iterable[str],
    failed: Sequence[LostAnswerSpan],
    duplicate: Iterable[str] | None = None,
    repeats_itself: bool = False,
) -> Witness:
    """Return the witness of a history.

    `duplicate`: keys that came again after their ack, if the history alone cannot judge that.
    """
    verdict = history.judge()
    received = [(one.key, one.attempt) for one in history.receives]
    if duplicate is None:
        duplicate = map(_key, verdict.duplicated)
    found = {
        # To the audit, a received message without an ack is in flight.
        "missing": frozenset(map(_key, verdict.lost)) - {key for key, _ in received},
        "duplicate": frozenset(duplicate),
        "early": frozenset(early),
    }
    return Witness(
        topic=topic,
        group=group,
        received=received,
        found=found,
        failed=failed,
        repeats_itself=repeats_itself,
    )


def audited(
    spark: SparkSession, events: DataFrame, to: str, key_of: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[Delivery]]:
    """Return the findings of the audit in folder `to`, and the deliveries in its events.

    The results name messages by key. `key_of` maps the ids that differ from the key.
    """
    from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

    from tidemill_pipeline.jobs.audit import FOLDER
    from tidemill_pipeline.transforms.places import at_first_place

    table = spark.read.parquet(f"{to}/{FOLDER}/findings")
    findings = [row.asDict() for row in table.collect()]
    for finding in findings:
        finding["message_id"] = key_of.get(finding["message_id"], finding["message_id"])
    place = F.concat_ws("/", "broker", "topic", "topic_id", "queue_id", "queue_offset")
    reported = (
        at_first_place(events)
        .where("event = 'delivered'")
        .select("consumer_group", "message_id", "attempt", F.unix_millis("event_ts"), place)
    )
    deliveries = [
        Delivery(group, key_of.get(message_id, message_id), attempt, at_ms, where)
        for group, message_id, attempt, at_ms, where in reported.collect()
    ]
    return findings, deliveries


def compare(
    witnesses: Sequence[Witness],
    findings: Iterable[Mapping[str, Any]],
    deliveries: Iterable[Delivery],
    *,
    slack_ms: int,
) -> Comparison:
    """Compare subscriptions with an audit's findings on their topics and consumer groups.

    The broker may deliver up to `slack_ms` after the receive failed: it continues for a while
    after the client has given up.
    """
    findings = list(findings)
    reported: dict[str, list[Delivery]] = defaultdict(list)
    for one in sorted(deliveries):
        reported[one.group].append(one)
    differences = _found_by_one(witnesses, findings)
    lost_answers: list[str] = []
    for group in sorted({seen.group for seen in witnesses}):
        own = [seen for seen in witnesses if seen.group == group]
        received = Counter(each for seen in own for each in seen.received)
        differences += _unheard_of(own, reported[group])
        failed = [each for seen in own for each in seen.failed]
        lost, unexplained = _unreported(reported[group], received, failed, slack_ms)
        lost_answers += map(str, lost)
        differences += [
            f"redelivered: {one} came to nobody, and no answer was lost then" for one in unexplained
        ]
        differences += _counted(group, reported[group], findings)
    return Comparison(differences=differences, lost_answers=lost_answers)


def times_of(finding: Mapping[str, Any]) -> int:
    """Return the number of deliveries in a finding: 2 for `delivered 2 times ...`, else 1."""
    return int(finding["detail"].split()[1]) if finding["kind"] in _REPEATS else 1


def _found_by_one(witnesses: Sequence[Witness], findings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the findings of only one side."""
    noted = {
        kind: {(seen.group, key) for seen in witnesses for key in seen.found[kind]}
        for kind in KINDS
    }
    subscriptions = {(seen.topic, seen.group) for seen in witnesses}
    topics = {topic for topic, _ in subscriptions}
    found: dict[str, set[tuple[str, str]]] = {kind: set() for kind in KINDS}
    for finding in findings:
        kind, group, key = finding["kind"], finding["consumer_group"], finding["message_id"]
        if kind not in found:
            continue
        if group is None and finding["topic"] in topics:
            # Each consumer group reports a missing or early message separately.
            found[kind] |= {one for one in noted[kind] if one[1] == key} or {("", key)}
        elif (finding["topic"], group) in subscriptions:
            found[kind].add((group, key))
    return [
        f"{kind}: {key}{f' of {group}' if group else ''} is found by"
        f" {'the history' if (group, key) in noted[kind] else 'the audit'} alone"
        for kind in KINDS
        for group, key in sorted(noted[kind] ^ found[kind])
    ]


def _unheard_of(own: Sequence[Witness], reported: Sequence[Delivery]) -> list[str]:
    """Return the received deliveries of a consumer group that have no event."""
    keys = {one.key for one in reported}
    received = Counter(
        (key, attempt)
        for seen in own
        for key, attempt in seen.received
        if not (seen.repeats_itself and key in keys)
    )
    return [
        f"redelivered: {key} of {own[0].group} came in attempt {attempt}, and no event tells it"
        for key, attempt in sorted(received - Counter(map(_which, reported)))
    ]


def _unreported(
    reported: Sequence[Delivery],
    received: Counter[tuple[str, int]],
    failed: Sequence[LostAnswerSpan],
    slack_ms: int,
) -> tuple[list[Delivery], list[Delivery]]:
    """Return the deliveries that no client reported: lost answers, and unexplained ones."""
    lost: list[Delivery] = []
    unexplained: list[Delivery] = []
    alike: dict[tuple[str, int], list[Delivery]] = defaultdict(list)
    for one in reported:
        alike[_which(one)].append(one)
    for which, made in alike.items():
        count = max(0, len(made) - received[which])
        explained = [
            one
            for one in made
            if any(each.begun_ms <= one.at_ms <= each.ended_ms + slack_ms for each in failed)
        ]
        lost += explained[:count]
        others = [one for one in made if one not in explained]
        unexplained += others[: max(0, count - len(explained))]
    return lost, unexplained


def _counted(
    group: str, reported: Iterable[Delivery], findings: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return the messages whose repeats differ between the audit and the log."""
    made: dict[str, Counter[str]] = defaultdict(Counter)
    for one in reported:
        made[one.key][one.place] += 1
    repeats: Counter[str] = Counter()
    for finding in findings:
        if finding["consumer_group"] == group and finding["kind"] in _REPEATS:
            repeats[finding["message_id"]] += times_of(finding)
    return [
        f"redelivered: {key} of {group} was delivered {made[key].total()} times at"
        f" {len(made[key])} places, and the audit has {repeats[key]} repeats"
        for key in sorted(made.keys() | repeats.keys())
        if made[key].total() - len(made[key]) != repeats[key]
    ]


def _which(one: Delivery) -> tuple[str, int]:
    return one.key, one.attempt


def _key(sentence: str) -> str:
    return sentence.partition(" ")[0]
