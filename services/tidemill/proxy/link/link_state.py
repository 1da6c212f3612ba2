"""The reachability of a broker, and the observers of its link."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol


class LinkObserver(Protocol):
    """An observer of the link state."""

    def on_connected(self) -> None:
        """Handle a new connection, whose configuration has arrived."""

    def on_lost(self) -> None:
        """Handle the loss of the connection; requests may be sent again."""

    def on_released(self) -> None:
        """Handle the stop of the process: from now on no poll may wait."""


class LinkState(NamedTuple):
    """The reachability of a broker."""

    word: Literal["up", "silent", "down"]
    since_s: float  # time in this state; 0 if up
    reason: str
