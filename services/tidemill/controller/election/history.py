"""What people read of an election: how long sends were away for it, and what was cut after it.

It is known some time after the election, and none of it is needed by any decision: it is added to
the history when the record has been quiet for a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from tidemill.controller.election.failure import Failure
from tidemill.controller.election.record import CutTail, GroupRecord, Transition

CUTS_MAX: Final = 8  # of one election: more than a group has replicas

HANDED_OVER: Final = "handed over"
BLOCKED: Final = "it reaches no other member"
FOUNDED: Final = "founded"
LOST_MEMORY: Final = "all replicas have lost memory: the longest log goes on"
BY_OPERATOR: Final = "an operator: "

# By what is written in the history.
_KINDS: Final = {
    **{failure.value: failure.name.lower() for failure in Failure},
    HANDED_OVER: "transfer",
    BLOCKED: "blocked",
    FOUNDED: "founded",
    LOST_MEMORY: "lost_memory",
}


# Those that come about by themselves, or by plan: their counts begin at 0.
FAILOVER_REASONS: Final = ("transfer", "blocked", *(one.name.lower() for one in Failure))


class Outage(NamedTuple):
    """How long a group took no sends, from the loss of its master to a commit of the next one."""

    epoch: int
    away_ms: int


def kind_of(reason: str) -> str:
    """Return the reason of an election as a label: one of a few words."""
    return "operator" if reason.startswith(BY_OPERATOR) else _KINDS.get(reason, "other")


def with_reports(
    record: GroupRecord, *, outage: Outage | None, cuts: Iterable[CutTail]
) -> GroupRecord:
    """Return the record with what was heard of its elections; the same where that is no news."""
    history = tuple(_reported(one, outage, cuts) for one in record.history)
    if history == record.history:
        return record
    return record._replace(history=history, version=record.version + 1)


def _reported(one: Transition, outage: Outage | None, cuts: Iterable[CutTail]) -> Transition:
    if outage is not None and outage.epoch == one.epoch and one.away_ms is None:
        one = one._replace(away_ms=outage.away_ms)
    new = tuple(cut for cut in cuts if cut.epoch == one.epoch and cut not in one.cuts)
    return one._replace(cuts=(*one.cuts, *new)[:CUTS_MAX]) if new else one
