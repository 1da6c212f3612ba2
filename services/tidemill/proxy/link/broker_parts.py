"""Where the time of a call's requests to brokers went, for slow calls (ADR 0096).

A context variable carries the parts from the link to the end of the call. A call that waits in its
task notes them there. Code that runs at once when the link resolves a request finds them, too.
Requests in tasks of their own, as of a call with several messages, leave none.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from tidemill.common.slow_calls import CallParts

if TYPE_CHECKING:
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

_SLOWEST: Final = ContextVar[tuple[float, CallParts] | None]("slowest request", default=None)


def parts_of(times: link_pb2.RoundTimes, took_ms: float) -> CallParts:
    """Return the parts of a request that took `took_ms` at the link."""
    sync_ms = times.sync_ms if times.HasField("sync_ms") else None
    replicate_ms = times.replicate_ms if times.HasField("replicate_ms") else None
    if sync_ms is None:
        return CallParts(None, times.broker_ms, None, None)
    known_ms = times.broker_ms + sync_ms + (replicate_ms or 0)
    return CallParts(max(round(took_ms) - known_ms, 0), times.broker_ms, sync_ms, replicate_ms)


def note_parts(took_ms: float, parts: CallParts) -> None:
    """Keep the parts of a request, if it is the slowest one of the current call."""
    known = _SLOWEST.get()
    if known is None or took_ms > known[0]:
        _SLOWEST.set((took_ms, parts))


def forget_parts() -> None:
    """Forget the parts that `note_parts` has kept."""
    _SLOWEST.set(None)


def slowest_parts() -> CallParts | None:
    """Return the parts of the slowest request of the current call; None if they are unknown."""
    known = _SLOWEST.get()
    return None if known is None else known[1]
