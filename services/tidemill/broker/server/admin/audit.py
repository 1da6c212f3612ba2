"""BrokerAdmin's calls about the audit log: find records, and record actions of other processes."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Final

from tidemill.broker.engine.metadata.audit_log import AUDIT_LEVEL, AuditedChange
from tidemill.broker.server.round.rpc import in_round, read_in_round
from tidemill.broker.server.wire.audit_facts import author_fields, json_facts
from tidemill.common.errors import BadRequest, Conflict
from tidemill.security.access_log import RecordFilter
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

CHANGE: Final = "change"  # the kind of all records in the log
PAGE_RECORDS_MAX: Final = 1_000
PAGE_BYTES_MAX: Final = 1 << 20
REPEATED_AMONG: Final = 64  # newest records; a repetition comes within seconds
RECORDS_A_ROUND: Final = 256  # small ones are compared in two milliseconds
BYTES_A_ROUND: Final = 32 << 10  # of numbers in JSON: decoded in two milliseconds


class AuditAdmin:
    """Finds and adds records of the audit log."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def FindAudit(self, request: pb.FindAuditRequest) -> pb.FindAuditReply:
        """Return a page of records, the newest first; each slice of the search takes a round."""
        reply = pb.FindAuditReply()
        wanted = RecordFilter.of(request)
        size, next_sequence = 0, request.before_sequence

        def search(engine: Engine, _turn: Turn) -> bool:
            """Compare a part of the records; return True while older ones remain."""
            nonlocal size, next_sequence
            known = engine.catalog.audit
            limit = min(request.limit or PAGE_RECORDS_MAX, PAGE_RECORDS_MAX)
            newest = known.last_sequence
            if next_sequence:
                newest = min(newest, next_sequence - 1)
            seen_bytes = 0
            for seen, sequence in enumerate(range(newest, 0, -1), 1):
                row = known.find(sequence)
                if row is None:
                    return False  # The older ones were dropped.
                next_sequence = sequence
                if wanted.matches_time(row.at_ms):
                    fields = {**json.loads(row.fields), "kind": CHANGE, "atMs": row.at_ms}
                    if wanted.matches(fields):
                        if len(reply.records) == limit or size >= PAGE_BYTES_MAX:
                            reply.has_more = True
                            return False
                        record = pb.AuditRecord(
                            sequence=sequence, at_ms=row.at_ms, fields=row.fields
                        )
                        reply.records.append(record)
                        size += len(row.fields)
                    seen_bytes += len(row.fields)
                if seen == RECORDS_A_ROUND or seen_bytes >= BYTES_A_ROUND:
                    return True
            return False

        while await read_in_round(self._rounds, search):
            pass
        return reply

    async def RecordAudit(self, request: pb.RecordAuditRequest) -> pb.RecordAuditReply:
        """Record an action that another process applies."""

        def record(engine: Engine, turn: Turn) -> pb.RecordAuditReply:
            catalog = engine.catalog
            if catalog.feature_level < AUDIT_LEVEL:
                raise Conflict(
                    f"broker group {catalog.broker_name} has feature level"
                    f" {catalog.feature_level}, and the audit log needs {AUDIT_LEVEL}; upgrade all"
                    f" its replicas, and remove feature_level_max"
                )
            if not request.audit.call:
                raise BadRequest("an audit record needs the call that it is about")
            if _is_recorded(engine, request):
                return pb.RecordAuditReply()
            change = AuditedChange(
                {**author_fields(request.audit), "actionId": request.action_id},
                before=json_facts(request.before),
                after=json_facts(request.after),
                result=request.result,
                code=request.code,
                reason=request.reason,
            )
            engine.fold.record_audit(change, turn.now_ms)
            return pb.RecordAuditReply()

        return await in_round(self._rounds, record)


def _is_recorded(engine: Engine, request: pb.RecordAuditRequest) -> bool:
    """Whether the request is a repetition, among the newest records."""
    for row in islice(engine.catalog.audit.newest_first(), REPEATED_AMONG):
        fields = json.loads(row.fields)
        if (fields.get("actionId"), fields["result"]) == (request.action_id, request.result):
            return True
    return False
