"""Official clients that run in every role through all faults, and the verdict on their history.

`LoopingClient` runs one client in its own process. The process reports every call as a line of JSON
with the begin and the end in microseconds (`tests/e2e/python/loop.py` describes the lines). All
clients share the machine's clock. Sorted by time, their lines form one history for each topic and
consumer group.

`judge` compares the histories with the delivery guarantees. A `Disturbance` is a fault that the
test caused, with its time. `judge` counts separately what a disturbance explains: an error of an
overlapping call, and a duplicate after a lost answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from tests.support.clients.client_process import Fact
from tests.support.clients.history import Ack, History, Outcome
from tests.support.clients.message_kinds import BASIC_TOPICS, ROLES, TOPICS, reason_to_withhold

US_PER_MS = 1000
US_PER_S = 1_000_000
# Longest effect of a disturbance after its end: a call's timeout of three seconds and the back-off
# of a connection.
EFFECT_US = 5 * US_PER_S
# From this duration on, the answer may be a timeout: calls end after 3 s, and a proxy answers up to
# half a second earlier.
LATE_ANSWER_US = 2_500_000
# After half of that time, a proxy sends the message to another broker group. The first one may have
# stored it.
MOVED_SEND_US = LATE_ANSWER_US // 2
# Longest time in which a push consumer retries the ack of a consumed message.
ACKED_US = 5 * US_PER_S
END_S = 20.0  # for a client to exit
SHOWN_MAX = 10  # findings of each kind in the text of a verdict

Subscription = tuple[str, str]  # consumer group (its name is the role) and topic


class LoopReport:
    """The reports of a looping client so far, with totals."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.line_counts: Counter[str] = Counter()  # by kind of fact
        self.received: Counter[str] = Counter()  # messages by role
        self.stored: dict[str, set[str]] = {topic: set() for topic in TOPICS}
        self.settled: dict[str, set[str]] = {role: set() for role in ROLES}
        self.last_received_at = 0

    def note(self, fact: Fact) -> None:
        """Record one line."""
        self.facts.append(fact)
        if fact["fact"] == "received":
            self.received[fact["role"]] += len(fact["keys"])
            self.last_received_at = max(self.last_received_at, fact["at"])
        elif fact["fact"] == "send" and not fact["error"]:
            self.stored[fact["topic"]].add(fact["key"])
        elif fact["fact"] == "ack":
            # An ack without an answer may be applied, and then the message does not come again.
            self.settled[fact["role"]].add(fact["key"])
        self.line_counts[fact["fact"]] += 1

    def __str__(self) -> str:
        stored = {topic: len(keys) for topic, keys in self.stored.items()}
        return f"stored {stored}, received {dict(self.received)}"


class LoopingClient:
    """An official client in its own process. A thread collects its lines."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        endpoint: str,
        home: Path,
        topics: Sequence[str] = BASIC_TOPICS,
    ) -> None:
        self.name = name
        home.mkdir()
        self.stderr = home / "stderr"
        self.report = LoopReport()
        given = {"endpoint": endpoint, "name": name, "topics": topics}
        with self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, json.dumps(given)],
                # The clients log below the home folder.
                env={**os.environ, "HOME": str(home)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin = self.process.stdin
        self._reader = threading.Thread(
            target=self._read, args=(self.process.stdout,), name=f"lines of {name}", daemon=True
        )
        self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            if line.startswith("{"):  # Some clients print a greeting.
                self.report.note(json.loads(line))

    @property
    def has_died(self) -> bool:
        return self.process.poll() is not None

    def stop_sending(self) -> None:
        """Stop its sends. The client reports `stopped` after the last send."""
        self._stdin.write("stop\n")
        self._stdin.flush()

    def end(self) -> int:
        """Let the client exit, read all its lines, and return its exit status."""
        self._stdin.close()
        try:
            status = self.process.wait(END_S)
        finally:
            self.kill()
        return status

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    @property
    def status(self) -> str:
        """The progress so far."""
        return f"{self.name}: {self.report}"


class Disturbance(NamedTuple):
    """A fault of the server, with its begin and end in microseconds."""

    what: str
    begun: int
    ended: int
    # Calls that may fail; empty if all calls must succeed.
    fails: frozenset[str] = frozenset()


@dataclass(slots=True)
class LoopVerdict:
    """Violations in the clients' history, and the counts that a disturbance explains."""

    broken: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    explained: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        return not self.broken

    def __str__(self) -> str:
        lines = [f"explained: {dict(self.explained)}"]
        for name, findings in self.broken.items():
            lines.append(f"{name}: {len(findings)}")
            lines += [f"  {finding}" for finding in findings[:SHOWN_MAX]]
        return "\n".join(lines)


class _Event(NamedTuple):
    """One event. Within a microsecond the lower rank is first, which is lenient."""

    at: int
    rank: int
    fact: Fact


def events_of(facts: Iterable[Fact]) -> Iterator[_Event]:
    """Yield the begin and the end of each call in the order of their times."""
    ranks = {"send": (0, 3), "ack": (1, 4)}
    events = []
    for fact in facts:
        if fact["fact"] == "received":
            events.append(_Event(fact["at"], 2, fact))
        elif fact["fact"] in ranks:
            begin, end = ranks[fact["fact"]]
            events += [_Event(fact["begun"], begin, fact), _Event(fact["ended"], end, fact)]
    yield from sorted(events, key=lambda event: event[:2])


def histories_of(facts: Iterable[Fact]) -> dict[Subscription, History]:
    """Return the history of each consumer group and topic.

    It lacks messages that the consumer group must not receive: see `_judge_withheld`.
    """
    found = {(role, topic): History() for role, topics in ROLES.items() for topic in topics}
    acks: dict[int, Ack] = {}
    for _, rank, fact in events_of(facts):
        match rank:
            case 0:
                for history in _expecting(fact, found):
                    # A dedup key is sent twice.
                    if fact["key"] not in history.sends:
                        history.send(fact["key"], message_group=fact["group"])
            case 1:
                history = found[fact["role"], fact["topic"]]
                acks[id(fact)] = history.ack(fact["key"], fact["attempt"])
            case 2:
                role, topic = fact["role"], fact["topic"]
                kept = [
                    (key, attempt)
                    for key, attempt in zip(fact["keys"], fact["attempts"], strict=True)
                    if not reason_to_withhold(role, topic, key)
                ]
                found[role, topic].received([key for key, _ in kept], [each for _, each in kept])
            case 3 if not fact["error"]:
                for history in _expecting(fact, found):
                    history.sends[fact["key"]].ended(Outcome.OK)
            case 4:
                acks.pop(id(fact)).ended(Outcome.UNKNOWN if fact["error"] else Outcome.OK)
    return found


def _expecting(send: Fact, histories: Mapping[Subscription, History]) -> list[History]:
    """Return the histories of the consumer groups that must receive the message of a send."""
    return [
        history
        for (role, topic), history in histories.items()
        if topic == send["topic"] and not reason_to_withhold(role, topic, send["key"])
    ]


def unsettled(reports: Sequence[LoopReport]) -> dict[Subscription, set[str]]:
    """Return the stored messages without an ack attempt, only for subscriptions that have some."""
    found = {}
    for role, topics in ROLES.items():
        for topic in topics:
            # Each set in one step: other threads read the lines.
            stored = set[str]().union(*[each.stored[topic] for each in reports])
            stored.difference_update(*[each.settled[role] for each in reports])
            stored = {key for key in stored if not reason_to_withhold(role, topic, key)}
            if stored:
                found[role, topic] = stored
    return found


def judge(
    facts: Sequence[Fact], disturbances: Sequence[Disturbance], retention_us: int = 0
) -> LoopVerdict:
    """Compare the clients' history with the delivery guarantees.

    With a retention, a message that a disturbance has delayed may expire, but not in the role
    `simple`: see `_expired`.
    """
    judged = LoopVerdict()
    for (role, topic), history in histories_of(facts).items():
        if retention_us and role != "simple":
            for key in _expired(role, facts, disturbances, history, retention_us):
                history.sends[key].ended(Outcome.UNKNOWN)
                judged.explained["expired"] += 1
        verdict = history.judge()
        for kind in ("lost", "unexpected", "out_of_order"):
            if findings := getattr(verdict, kind):
                judged.broken[kind] += [f"{role}, {topic}: {finding}" for finding in findings]
    _judge_withheld(facts, judged)
    _judge_keys(facts, judged)
    _judge_duplicates(facts, disturbances, judged)
    _judge_times(facts, judged)
    _judge_errors(facts, disturbances, judged)
    return judged


def _expired(
    role: str,
    facts: Sequence[Fact],
    disturbances: Sequence[Disturbance],
    history: History,
    retention_us: int,
) -> Iterator[str]:
    """Yield the stored messages that retention may have deleted before their ack.

    If a disturbance loses a delivery to a push consumer, the message comes back a minute later. It
    may be older than the retention then. Ordered messages behind it wait, and may expire too. The
    same holds for an ordered message that each client in turn rejects once. If such a message is
    in flight when it expires, later ones come before its ack.
    """
    unsettled = history.unsettled()
    acked_at: dict[str, int] = {}
    for fact in facts:
        if fact["fact"] == "ack" and fact["role"] == role:
            acked_at.setdefault(fact["key"], fact["begun"])
    for fact in facts:
        if fact["fact"] == "send":
            ready = max(fact["ended"], fact["due"] * US_PER_MS)
            is_late = fact["group"] and acked_at.get(fact["key"], ready) > ready + retention_us
            if not is_late and fact["key"] not in unsettled:
                continue
            lost_to = [
                one
                for one in disturbances
                if one.fails
                and one.begun <= ready + retention_us
                and fact["begun"] <= one.ended + EFFECT_US
            ]
            if lost_to:
                yield fact["key"]


def _judge_withheld(facts: Sequence[Fact], judged: LoopVerdict) -> None:
    """Find messages that were rolled back or that do not match the filter."""
    for fact in facts:
        if fact["fact"] == "received":
            role, topic = fact["role"], fact["topic"]
            for key in fact["keys"]:
                if reason := reason_to_withhold(role, topic, key):
                    judged.broken["unexpected"].append(f"{role}, {topic}: {key} {reason}")


def _judge_keys(facts: Sequence[Fact], judged: LoopVerdict) -> None:
    """Find dedup keys with several messages, in the answers to their sends or in deliveries."""
    ids: dict[str, set[str]] = defaultdict(set)
    for fact in facts:
        if fact.get("topic") != "dedup":
            continue
        if fact["fact"] == "send" and not fact["error"]:
            ids[fact["key"]].add(fact["id"])
        elif fact["fact"] == "received":
            for key, message_id in zip(fact["keys"], fact["ids"], strict=True):
                ids[key].add(message_id)
    for key, found in ids.items():
        if len(found) > 1:
            judged.broken["not deduplicated"].append(f"{key} has the messages {sorted(found)}")


def _judge_times(facts: Sequence[Fact], judged: LoopVerdict) -> None:
    due = {fact["key"]: fact["due"] for fact in facts if fact["fact"] == "send" and fact["due"]}
    for fact in facts:
        if fact["fact"] == "received":
            for key in fact["keys"]:
                early_us = due.get(key, 0) * US_PER_MS - fact["at"]
                if early_us > 0:
                    judged.broken["early"].append(f"{key} came {early_us} us before its time")


def _judge_duplicates(
    facts: Sequence[Fact], disturbances: Sequence[Disturbance], judged: LoopVerdict
) -> None:
    """Find messages that came again after their ack.

    Three things explain a duplicate. If the answer to a send is lost or late, the client or the
    proxy sends again, and the broker may store the message twice, but not with a dedup key. If the
    ack of a push consumer is lost, the consumer gives up when the delivery has expired. Then a
    disturbance between the receive and `ACKED_US` after the success explains the duplicate. The
    same holds if the client hides the result of an ack from its application (`hidden`). Such an ack
    may also time out without a disturbance.
    """
    sends = {fact["key"]: fact for fact in facts if fact["fact"] == "send"}
    first_received: dict[tuple[str, str], int] = {}
    acked: dict[tuple[str, str], Fact] = {}
    for at, rank, fact in events_of(facts):
        if rank == 4 and not fact["error"]:
            acked.setdefault((fact["role"], fact["key"]), fact)
        elif rank == 2:
            for key, attempt in zip(fact["keys"], fact["attempts"], strict=True):
                first_received.setdefault((fact["role"], key), at)
                ack = acked.get((fact["role"], key))
                if ack is None or attempt < ack["attempt"]:
                    continue
                send = sends[key]
                is_sent_again = send["ended"] - send["begun"] >= MOVED_SEND_US
                may_be_twice = fact["topic"] != "dedup" and (
                    is_sent_again or _disturbed(disturbances, send["begun"], send["ended"])
                )
                if may_be_twice:
                    judged.explained["stored twice"] += 1
                elif (fact["role"].endswith("push") or ack.get("hidden")) and _disturbed(
                    disturbances, first_received[fact["role"], key], ack["ended"] + ACKED_US
                ):
                    judged.explained["an ack was lost"] += 1
                elif ack.get("hidden") and ack["ended"] - ack["begun"] >= LATE_ANSWER_US:
                    judged.explained["an ack took too long"] += 1
                else:
                    late_ms = (at - ack["ended"]) // US_PER_MS
                    judged.broken["duplicated"].append(
                        f"{fact['role']}: {key} came again, as attempt {attempt}, {late_ms} ms "
                        f"after its ack in attempt {ack['attempt']} at {ack['ended']}"
                    )


def _judge_errors(
    facts: Sequence[Fact], disturbances: Sequence[Disturbance], judged: LoopVerdict
) -> None:
    """Find errors that reached an application and that no disturbance explains."""
    received_at: dict[tuple[str, str], int] = {}
    for fact in facts:
        if fact["fact"] == "received":
            received_at |= {(fact["role"], key): fact["at"] for key in fact["keys"]}
        if not fact.get("error"):
            continue
        call = fact.get("topic", "") if fact["fact"] == "send" else fact.get("during", "ack")
        begun = fact["begun"]
        if fact["fact"] == "ack":
            # Its delivery may have expired before the ack began, while the client acked others.
            begun = received_at[fact["role"], fact["key"]]
        if _disturbed(disturbances, begun, fact["ended"], call):
            judged.explained[f"error of {call}"] += 1
        else:
            judged.broken["errors"].append(json.dumps(fact))


def _disturbed(
    disturbances: Sequence[Disturbance], begun: int, ended: int, call: str = ""
) -> list[str]:
    return [
        one.what
        for one in disturbances
        if one.begun <= ended and begun <= one.ended + EFFECT_US and (not call or call in one.fails)
    ]
