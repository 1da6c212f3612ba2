"""The states of a link at the broker, and the events that lead from one to the next.

    OPENED ── GREET ──> SERVED ── END, REPLACE or REFUSE ──> CLOSED ── REMOVE ──> REMOVED
       └───────────────── END ──────────────────────────────────┘

The stream of a link may end before the round that greets it. The round then leaves it CLOSED.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class ProxyLinkState(Enum):
    """The state of a link."""

    OPENED = auto()  # the stream is open; the link waits for its first round
    SERVED = auto()  # it has the configuration; rounds apply its requests and send replies
    CLOSED = auto()  # requests are dropped, nothing is sent, unsent messages are given back
    REMOVED = auto()  # the rounds have forgotten the link


class ProxyLinkEvent(Enum):
    """An event in the life of a link."""

    GREET = auto()  # a round sends the configuration
    REPLACE = auto()  # a round learns of a newer stream of the same process of the proxy
    REFUSE = auto()  # the proxy is too old for the security mode
    END = auto()  # the stream has ended
    REMOVE = auto()  # a round removes the ended link


# A missing pair cannot happen: rounds apply the work of a link in order, from its greeting to its
# removal.
TRANSITIONS: Final[dict[tuple[ProxyLinkState, ProxyLinkEvent], ProxyLinkState]] = {
    (ProxyLinkState.OPENED, ProxyLinkEvent.GREET): ProxyLinkState.SERVED,
    (ProxyLinkState.OPENED, ProxyLinkEvent.END): ProxyLinkState.CLOSED,
    (ProxyLinkState.SERVED, ProxyLinkEvent.REPLACE): ProxyLinkState.CLOSED,
    (ProxyLinkState.SERVED, ProxyLinkEvent.REFUSE): ProxyLinkState.CLOSED,
    (ProxyLinkState.SERVED, ProxyLinkEvent.END): ProxyLinkState.CLOSED,
    (ProxyLinkState.CLOSED, ProxyLinkEvent.GREET): ProxyLinkState.CLOSED,
    (ProxyLinkState.CLOSED, ProxyLinkEvent.REPLACE): ProxyLinkState.CLOSED,
    (ProxyLinkState.CLOSED, ProxyLinkEvent.REFUSE): ProxyLinkState.CLOSED,
    (ProxyLinkState.CLOSED, ProxyLinkEvent.END): ProxyLinkState.CLOSED,
    (ProxyLinkState.CLOSED, ProxyLinkEvent.REMOVE): ProxyLinkState.REMOVED,
}
