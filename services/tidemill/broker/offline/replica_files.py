"""The files of a replica beside its log, as a check, a copy and a mend read them.

Only the broker group uses the other files of the folder `replica`: a copy is an independent store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

from tidemill.broker.engine.layout import (
    durable_mark,
    replica_state,
    store_identity,
    truncate_intent,
)
from tidemill.broker.engine.replica import known_end
from tidemill.broker.engine.replica.replica_files import FOLDER, IDENTITY, INTENT, STATES
from tidemill.broker.offline.findings import Damage, Finding
from tidemill.broker.offline.source import Source


@final
class ReplicaSummary(NamedTuple):
    """The facts about the log in these files."""

    is_replica: bool
    cut: int | None  # the next start cuts the log here; None: it cuts nothing
    durable: int  # the log before this offset was durable: a missing part is damage
    confirmed: int  # the whole group has the same log before this offset, as far as known here


def read_replica_files(source: Source) -> ReplicaSummary:
    """Read the files, without those that are damaged."""
    states = [replica_state.find(source.read(name)) for name in STATES]
    marks = [durable_mark.find(source.read(name)) for name in known_end.COPIES]
    newest = max(
        (mark for mark in marks if mark is not None),
        default=durable_mark.DurableMark(),
        key=lambda mark: mark.generation,
    )
    confirmed = max((state.confirm for state in states if state is not None), default=0)
    intent = truncate_intent.find(source.read(INTENT))
    cut = None if intent is None else intent.offset
    durable = max(confirmed, newest.durable)
    return ReplicaSummary(
        is_replica=bool(source.names(FOLDER)),
        cut=cut,
        durable=durable if cut is None else min(durable, cut),
        confirmed=confirmed,
    )


def find_damage(source: Source) -> Iterator[Finding]:
    """Find damaged files. Of two files that are written in turns, one may be torn."""
    identity = source.read(IDENTITY)
    if identity is not None and store_identity.find(identity) is None:
        yield _finding(IDENTITY, identity, stops_start=True)
    states = {name: source.read(name) for name in STATES}
    has_state = any(replica_state.find(data) is not None for data in states.values())
    for name, data in states.items():
        if data is not None and replica_state.find(data) is None:
            yield _finding(name, data, stops_start=not has_state)
    for name in known_end.COPIES:
        data = source.read(name)
        if data is not None and durable_mark.find(data) is None:
            yield _finding(name, data, stops_start=False)


def _finding(name: str, data: bytes, *, stops_start: bool) -> Finding:
    return Finding(
        damage=Damage.REPLICA,
        file=name,
        position=0,
        size=len(data),
        detail="checksum mismatch",
        stops_start=stops_start,
    )
