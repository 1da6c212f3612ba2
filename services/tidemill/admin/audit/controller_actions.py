"""Actions of controllers in the audit log: one record at the home before, and one after.

A controller can be the only way to bring the home back. So an action goes on while the home is
down, and its records are only lines in the log of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import grpc
import structlog

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import Brokers
from tidemill.common.errors import ServiceError, codes_of
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

log = structlog.get_logger()

T = TypeVar("T")

BEGUN: Final = "begun"
OK: Final = "ok"
FAILED: Final = "failed"
OK_CODE: Final = 20_000
RECORD_TIMEOUT_S: Final = 4.0  # longer than a failover; then the action goes on


async def recorded(
    brokers: Brokers,
    author: pb.ChangeAuthor,
    act: Callable[[], Awaitable[T]],
    *,
    after: Mapping[str, Any],
) -> T:
    """Record an action of a controller before and after it. Raises the error of the action."""
    action_id = secrets.token_hex(8)
    await _record(brokers, author, action_id, BEGUN, after=after)
    try:
        done = await act()
    except ServiceError as error:
        code = codes_of(error).rocketmq
        await _record(brokers, author, action_id, FAILED, code=code, reason=error.message)
        raise
    await _record(brokers, author, action_id, OK, after=after)
    return done


async def _record(
    brokers: Brokers,
    author: pb.ChangeAuthor,
    action_id: str,
    result: str,
    *,
    after: Mapping[str, Any] | None = None,
    code: int = OK_CODE,
    reason: str = "",
) -> None:
    encoded = b"" if after is None else json.dumps(after).encode()
    request = pb.RecordAuditRequest(
        audit=author,
        after=encoded,
        result=result,
        code=0 if code == OK_CODE else code,
        reason=reason,
        action_id=action_id,
    )
    with contextlib.suppress(ServiceError, grpc.aio.AioRpcError, TimeoutError):
        async with asyncio.timeout(RECORD_TIMEOUT_S):
            home = await brokers.home()
            await home.call(calls.RECORD_AUDIT, request)
            return
    fields = {
        "kind": "change",
        "user": author.user,
        "via": author.via,
        "claimedUser": author.claimed_user,
        "from": author.address,
        "process": author.process,
        "call": author.call,
        "resource": author.resource,
        "action": author.action,
        "after": dict(after or {}),
        "result": result,
        "code": code,
        "reason": reason,
        "actionId": action_id,
        "durable": False,
    }
    log.warning("audit", **fields)
