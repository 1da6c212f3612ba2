"""Facts about an election for people: the duration of its outage, and cut ends of logs.

They are known only after the election, and no decision needs them. A controller adds them to the
history when nobody has written the record for a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from tidemill.controller.election.failure import Failure
from tidemill.controller.election.record import CutTail, GroupRecord, Transition

CUTS_MAX: Final = 8  # per election; a group has fewer replicas

HANDED_OVER: Final = "the master handed over"
BLOCKED: Final = "the master reaches no other member"
FOUNDED: Final = "the group was founded"
LOST_MEMORY: Final = "all replicas restarted uncleanly; the longest log wins"
BY_OPERATOR: Final = "an operator: "

# The label of each reason in the history.
_KINDS: Final = {
    **{failure.value: failure.name.lower() for failure in Failure},
    HANDED_OVER: "transfer",
    BLOCKED: "blocked",
    FOUNDED: "founded",
    LOST_MEMORY: "lost_memory",
}


# Labels of automatic and planned elections; their counts begin at 0.
FAILOVER_REASONS: Final = ("transfer", "blocked", *(one.name.lower() for one in Failure))


class Outage(NamedTuple):
    """The time without sends, from the loss of a master to the first commit of the next one."""

    epoch: int
    away_ms: int


def kind_of(reason: str) -> str:
    """Return the label of an election's reason."""
    return "operator" if reason.startswith(BY_OPERATOR) else _KINDS.get(reason, "other")


def with_reports(
    record: GroupRecord, *, outage: Outage | None, cuts: Iterable[CutTail]
) -> GroupRecord:
    """Return the record with an outage and cuts in its history, or the same if none is new."""
    history = tuple(_reported(one, outage, cuts) for one in record.history)
    if history == record.history:
        return record
    return record._replace(history=history, version=record.version + 1)


def _reported(one: Transition, outage: Outage | None, cuts: Iterable[CutTail]) -> Transition:
    if outage is not None and outage.epoch == one.epoch and one.away_ms is None:
        one = one._replace(away_ms=outage.away_ms)
    new = tuple(cut for cut in cuts if cut.epoch == one.epoch and cut not in one.cuts)
    return one._replace(cuts=(*one.cuts, *new)[:CUTS_MAX]) if new else one
