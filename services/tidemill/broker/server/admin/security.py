"""BrokerAdmin's calls about users, roles, tokens, quotas, bans and the security mode."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

from tidemill.broker.engine.metadata.security_items import COUNTS_MAX, DELETIONS, MODE
from tidemill.broker.server.round.rpc import read_in_round, rpc_error
from tidemill.broker.server.wire import config_log
from tidemill.broker.server.wire.audit_facts import (
    CREATE,
    ITEMS_NAMED_MAX,
    UPDATE,
    change_of,
    security_facts,
)
from tidemill.common.errors import BadRequest, ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.audit_log import AuditedChange
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

PAGE_ITEMS_MAX: Final = 1_000
PAGE_BYTES_MAX: Final = 1 << 20  # the largest message that admin's client accepts is 4 MiB
ITEMS_A_SLICE: Final = 16  # decoded in a millisecond, if each has 5 KB


class SecurityAdmin:
    """Changes and lists security items. What they mean is decided by the admin process."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def ChangeSecurity(self, request: pb.ChangeSecurityRequest) -> pb.ChangeSecurityReply:
        """Put and delete items, all or none; a dry run only checks them."""

        def change(engine: Engine, turn: Turn) -> Generator[None, None, int]:
            items: list[dict[str, Any]] = []
            for encoded in request.items:
                items.append(_decode(encoded))
                if len(items) % ITEMS_A_SLICE == 0:
                    yield
            change = _change_of(engine, request, items)
            with engine.fold.audited(change):
                version = yield from engine.security.change(
                    items,
                    expected_version=request.expected_version,
                    is_dry=request.dry_run,
                    now_ms=turn.now_ms,
                )
            if not request.dry_run:
                config_log.security_changed(items, version, by=request.requested_by)
            return version

        try:
            version = await self._rounds.call_slices(change)
        except ServiceError as error:
            raise rpc_error(error) from error
        return pb.ChangeSecurityReply(version=version)

    async def ListSecurity(self, request: pb.ListSecurityRequest) -> pb.ListSecurityReply:
        """Return a page of the items of one kind."""

        def read(engine: Engine, _turn: Turn) -> pb.ListSecurityReply:
            if request.kind != MODE and request.kind not in COUNTS_MAX:
                known = ", ".join((MODE, *COUNTS_MAX))
                raise BadRequest(f"security items of kind {request.kind!r} are unknown: {known}")
            table = engine.catalog.security
            if request.name:
                found = table.find((request.kind, request.name))
                return pb.ListSecurityReply(
                    items=[] if found is None else [found], version=table.version
                )
            if not 1 <= request.limit <= PAGE_ITEMS_MAX:
                raise BadRequest(f"a page has 1 to {PAGE_ITEMS_MAX} items, not {request.limit}")
            page = table.page(
                request.kind,
                request.after_name or None,
                limit=request.limit,
                bytes_max=PAGE_BYTES_MAX,
            )
            return pb.ListSecurityReply(
                items=page.items, version=table.version, has_more=page.has_more
            )

        return await read_in_round(self._rounds, read)


def _change_of(
    engine: Engine, request: pb.ChangeSecurityRequest, items: list[dict[str, Any]]
) -> AuditedChange | None:
    """Return the change for the audit log; None if the items are malformed."""
    if not request.HasField("audit") or not all(isinstance(one.get("op"), str) for one in items):
        return None
    table = engine.catalog.security
    named = items[: ITEMS_NAMED_MAX + 1]
    found = [
        table.find((DELETIONS.get(one["op"], one["op"]), str(one.get("name", "")))) for one in named
    ]
    before = [None if one is None else json.loads(one) for one in found]
    is_deletion = any(one["op"] in DELETIONS for one in items)
    action = "" if is_deletion else CREATE if not any(before) else UPDATE
    return change_of(
        request, before=security_facts(before), after=security_facts(items), action=action
    )


def _decode(encoded: bytes) -> dict[str, Any]:
    try:
        item = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"an item is not valid JSON: {error}") from error
    if not isinstance(item, dict):
        raise BadRequest("an item is not a JSON object")
    return item
