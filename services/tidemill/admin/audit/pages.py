"""Pages of the audit log, merged from broker groups, proxies and this process, newest first.

Each source lists its records in the order of their numbers. A page token has the number of the last
shown record of each source. So no record is skipped or repeated, even if the clocks of the sources
differ or were set back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import UNREACHABLE_ERRORS, BrokerGroupClient, Brokers
from tidemill.admin.cluster.proxies import ProxyRoute, ask_proxy, find_proxies
from tidemill.common.errors import ServiceError
from tidemill.common.slices import run_slices
from tidemill.security.access_log import AccessLog, RecordFilter
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

CHANGE: Final = "change"
PROXY_TIMEOUT_MS: Final = 3_000
CURSOR_CHARS_MAX: Final = 8_192  # 200 sources
CURSOR_PATTERN: Final = "[0-9]{1,15}(,[A-Za-z0-9._~%-]{1,300}:[0-9]{1,18})*"
OWN_SOURCE: Final = "admin"


class AuditCursor(NamedTuple):
    """The end of a page."""

    at_ms: int = 0  # of its last record; 0: before the first page
    sequences: Mapping[str, int] = {}  # the number of the last shown record, by source


class SourceRecords(NamedTuple):
    """Records of one source, the newest first."""

    source: str
    records: Sequence[tuple[int, dict[str, Any]]]  # number and JSON object
    has_more: bool


class AuditPage(NamedTuple):
    """A page, and its continuation."""

    records: list[dict[str, Any]]
    next_token: str | None
    unreachable: list[str]


def encode_cursor(cursor: AuditCursor) -> str:
    """Return a cursor as a page token."""
    ends = [f"{quote(source, safe='')}:{number}" for source, number in cursor.sequences.items()]
    return ",".join([str(cursor.at_ms), *ends])


def decode_cursor(token: str | None) -> AuditCursor:
    """Read a page token, which has CURSOR_PATTERN."""
    if not token:
        return AuditCursor()
    at_ms, *ends = token.split(",")
    numbers = (end.rpartition(":") for end in ends)
    return AuditCursor(int(at_ms), {unquote(source): int(number) for source, _, number in numbers})


async def find_page(
    brokers: Brokers, own: AccessLog, wanted: RecordFilter, *, size: int, token: str | None
) -> AuditPage:
    """Return a page of the records of all sources. Raises BrokerUnreachable."""
    cursor = decode_cursor(token)
    sources: list[SourceRecords] = []
    unreachable: list[str] = []
    if wanted.kind in {"", CHANGE}:
        await _add_changes(brokers, wanted, cursor, size, sources, unreachable)
    if wanted.kind != CHANGE:
        await _add_accesses(brokers, wanted, cursor, size, sources, unreachable)
        request = _request(wanted, cursor, OWN_SOURCE, size)
        found = await run_slices(
            own.find_page(
                RecordFilter.of(request), before=request.before_sequence, limit=request.limit
            )
        )
        records = [(one.sequence, one.fields) for one in found.records]
        sources.append(SourceRecords(OWN_SOURCE, records, found.has_more))
    records_, next_cursor = merged(sources, cursor, size)
    next_token = None if next_cursor is None else encode_cursor(next_cursor)
    return AuditPage(records_, next_token, sorted(set(unreachable)))


async def _add_changes(
    brokers: Brokers,
    wanted: RecordFilter,
    cursor: AuditCursor,
    size: int,
    sources: list[SourceRecords],
    unreachable: list[str],
) -> None:
    async def ask(member: BrokerGroupClient) -> pb.FindAuditReply | None:
        request = _request(wanted, cursor, _broker_source(member.name), size)
        try:
            return await member.client.call(calls.FIND_AUDIT, request)
        except UNREACHABLE_ERRORS:
            raise
        except ServiceError:
            return None  # A broker of an older version must not hide the records of others.

    found = await brokers.ask_all(ask)
    unreachable.extend(found.unreachable)
    for broker, reply in found.answers:
        if reply is None:
            unreachable.append(broker)
            continue
        records = [
            (
                one.sequence,
                {
                    "id": f"{broker}:{one.sequence}",
                    "atMs": one.at_ms,
                    "kind": CHANGE,
                    "code": 20_000,
                    **json.loads(one.fields),
                },
            )
            for one in reply.records
        ]
        sources.append(SourceRecords(_broker_source(broker), records, reply.has_more))


async def _add_accesses(
    brokers: Brokers,
    wanted: RecordFilter,
    cursor: AuditCursor,
    size: int,
    sources: list[SourceRecords],
    unreachable: list[str],
) -> None:
    routes = await find_proxies(brokers)
    unreachable.extend(routes.unreachable)

    async def ask(proxy: ProxyRoute) -> SourceRecords:
        source = f"p~{proxy.name}~{proxy.process_id.hex()[:8]}"
        question = pb.ProxyQuestion(find_audit=_request(wanted, cursor, source, size))
        reply = (await ask_proxy(proxy, question, PROXY_TIMEOUT_MS)).audit
        records = [(one.sequence, json.loads(one.fields)) for one in reply.records]
        return SourceRecords(source, records, reply.has_more)

    replies = await asyncio.gather(*map(ask, routes.proxies), return_exceptions=True)
    for proxy, reply in zip(routes.proxies, replies, strict=True):
        if isinstance(reply, ServiceError):
            unreachable.append(proxy.name)
        elif isinstance(reply, BaseException):
            raise reply
        else:
            sources.append(reply)


def _broker_source(name: str) -> str:
    return f"b~{name}"


def _request(
    wanted: RecordFilter, cursor: AuditCursor, source: str, size: int
) -> pb.FindAuditRequest:
    to_ms = wanted.to_ms
    before = cursor.sequences.get(source, 0)
    if cursor.at_ms and not before:
        # The source has shown nothing yet, or was unreachable: newer records would come too late.
        to_ms = min(to_ms or cursor.at_ms + 1, cursor.at_ms + 1)
    return pb.FindAuditRequest(
        kind=wanted.kind,
        user=wanted.user,
        resource=wanted.resource,
        action=wanted.action,
        result=wanted.result,
        client_id=wanted.client_id,
        from_ms=wanted.from_ms,
        to_ms=to_ms,
        before_sequence=before,
        limit=size,
    )


def merged(
    sources: Iterable[SourceRecords], cursor: AuditCursor, size: int
) -> tuple[list[dict[str, Any]], AuditCursor | None]:
    """Return the newest records of all sources, and the end of the page; None: nothing follows.

    The page ends with the last known record of a source that has more of them.
    """
    lists = list(sources)
    at = [0] * len(lists)
    page: list[dict[str, Any]] = []
    sequences = dict(cursor.sequences)
    at_ms = cursor.at_ms
    while len(page) < size:
        if any(at[n] == len(one.records) and one.has_more for n, one in enumerate(lists)):
            break
        heads = [
            (one.records[at[n]][1]["atMs"], -n)
            for n, one in enumerate(lists)
            if at[n] < len(one.records)
        ]
        if not heads:
            return page, None
        n = -max(heads)[1]
        sequence, fields = lists[n].records[at[n]]
        at[n] += 1
        page.append(fields)
        sequences[lists[n].source], at_ms = sequence, fields["atMs"]
    for one in lists:
        if one.records:  # A source without a record on the page goes on at its newest one.
            sequences.setdefault(one.source, one.records[0][0] + 1)
    has_more = any(at[n] < len(one.records) or one.has_more for n, one in enumerate(lists))
    return page, AuditCursor(at_ms, sequences) if has_more else None
