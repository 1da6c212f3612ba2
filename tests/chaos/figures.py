"""The figures of one fault from its history: the columns of its row in the ledger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.support.clients.client_process import Fact
from tests.support.clients.looping_clients import US_PER_S, Disturbance, judge

DISTURBED = "disturbed"  # The kind of the lines for actions, between the clients' lines.
SHOWN_MAX = 5  # Findings of each kind in a row.
CALLS = ("send", "receive", "ack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The numbers of one row. A message counts once for each consumer group concerned."""

    stored: int
    received: int
    lost: int
    duplicated: int  # Delivered again after their ack, without a reason.
    explained: int  # Delivered again because a sender or receiver lost an answer.
    early: int
    out_of_order: int
    unexpected: int  # Delivered, but never sent.
    errors: dict[str, int]  # Errors at an application, by call.
    unpromised_errors: int  # Errors that the fault does not permit.
    errors_before: int  # During the clients' start, before the fault; not in the others.
    without_send_s: list[float]  # The longest time without a successful send, per run.
    without_receive_s: list[float]
    findings: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Return whether every promise holds."""
        return not self.lost and self.is_clean_but_for_losses

    @property
    def is_clean_but_for_losses(self) -> bool:
        """Return whether every promise holds for the messages that are not lost."""
        return not any(
            (
                self.duplicated,
                self.early,
                self.out_of_order,
                self.unexpected,
                self.unpromised_errors,
            )
        )


def figures(
    facts: Sequence[Fact], disturbances: Sequence[Disturbance], *, loses: bool = False
) -> Figures:
    """Judge the client reports and measure each disturbance.

    If a fault `loses` messages, other messages do not have to wait for a lost one.
    """
    early_errors = [
        fact for fact in facts if fact.get("error") and fact["ended"] < disturbances[0].begun
    ]
    before = {json.dumps(fact) for fact in early_errors}
    judged = judge(facts, disturbances)
    unpromised = [error for error in judged.broken.pop("errors", []) if error not in before]
    if unpromised:
        judged.broken["errors"] = unpromised
    if loses and (lost := lost_keys(judged.broken["lost"])):
        kept = judge(without_stored(facts, lost), disturbances)
        judged.broken["out_of_order"] = kept.broken["out_of_order"]
    broken = {kind: len(found) for kind, found in judged.broken.items()}
    sends = sorted(fact["ended"] for fact in facts if fact["fact"] == "send" and not fact["error"])
    receives = sorted(fact["at"] for fact in facts if fact["fact"] == "received")
    return Figures(
        stored=len(sends),
        received=sum(len(fact["keys"]) for fact in facts if fact["fact"] == "received"),
        lost=broken.get("lost", 0),
        duplicated=broken.get("duplicated", 0),
        explained=judged.explained["stored twice"] + judged.explained["an ack was lost"],
        early=broken.get("early", 0),
        out_of_order=broken.get("out_of_order", 0),
        unexpected=broken.get("unexpected", 0),
        errors=errors_of(fact for fact in facts if fact not in early_errors),
        unpromised_errors=len(unpromised),
        errors_before=len(early_errors),
        without_send_s=[longest_gap_s(sends, one) for one in disturbances],
        without_receive_s=[longest_gap_s(receives, one) for one in disturbances],
        findings={kind: found[:SHOWN_MAX] for kind, found in judged.broken.items() if found},
    )


def lost_keys(findings: Iterable[str]) -> set[str]:
    """Return the lost messages of findings: `ROLE, TOPIC: KEY was stored and ...`."""
    return {finding.split(": ", 1)[1].split(" ", 1)[0] for finding in findings}


def without_stored(facts: Iterable[Fact], keys: set[str]) -> list[Fact]:
    """Return the facts without the answers to the senders of these messages."""
    return [
        fact | {"error": "lost"} if fact["fact"] == "send" and fact["key"] in keys else fact
        for fact in facts
    ]


def errors_of(facts: Iterable[Fact]) -> dict[str, int]:
    """Count the errors at applications, by call."""
    counted = Counter(
        fact["during"] if fact["fact"] == "failed" else fact["fact"]
        for fact in facts
        if fact.get("error")
    )
    return {call: counted[call] for call in CALLS}


def longest_gap_s(moments: Sequence[int], disturbance: Disturbance) -> float:
    """Return the longest time between two moments that overlaps with a disturbance.

    A gap that is open at the end of the disturbance ends there.
    """
    begun, ended = disturbance.begun, disturbance.ended
    before = max((at for at in moments if at <= begun), default=begun)
    after = min((at for at in moments if at >= ended), default=ended)
    within = [before, *(at for at in moments if begun < at < ended), after]
    gaps = (later - earlier for earlier, later in pairwise(within))
    return round(max(gaps, default=0) / US_PER_S, 2)


def percentile(values: Sequence[float], of: float) -> float:
    """Return the nearest rank, which is a measured value: the worst for few values."""
    ranked = sorted(values)
    return ranked[max(0, -int(-of * len(ranked) // 1) - 1)]
