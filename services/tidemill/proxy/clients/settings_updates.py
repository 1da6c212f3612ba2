"""Tells clients of changed consumer groups: their settings once more, on their open streams.

A client gets its settings when it asks, and works with them for minutes: how often a message is
tried, how long it waits between two of them, whether messages come in order. Nothing else in the
settings comes from what operators change; topics have no part in them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

if TYPE_CHECKING:
    from tidemill.proxy.clients.telemetry_streams import Outlet, TelemetryStreams
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

# From a change until groups are looked at: what an operator, or a script, changes within it is told
# together.
GATHER_S: Final = 0.5
GROUPS_A_TURN: Final = 1_000  # looked at in one turn of the loop, in some 300 microseconds
# Clients of one look are told within that: each of them parses its settings, and some ask anew.
SPREAD_S: Final = 1.0
SPREAD_EACH_S: Final = 0.002  # few are told sooner: 500 take the whole of it
TOLD_AT_ONCE_MAX: Final = 500  # whose settings are under way; a crowd takes as many times SPREAD_S
PATIENCE_S: Final = 1.0  # for a client that does not read; it asks by itself within minutes

# Which state of a group its clients were told of: its home's id and version; None: of none.
State: TypeAlias = "tuple[int, int] | None"


class _Follower(NamedTuple):
    client_id: str
    outlet: Outlet


@final
class SettingsNews:
    """Who works with the settings of which group, and of which state of it that was told."""

    def __init__(
        self,
        streams: TelemetryStreams,
        find_group: Callable[[str], link_pb2.GroupConfig | None],
        settings_of: Callable[[str, link_pb2.GroupConfig], bytes | None],
    ) -> None:
        """`settings_of` returns the command for a client; None where nothing is known of it."""
        self._streams = streams
        self._find_group = find_group
        self._settings_of = settings_of
        self._followers: dict[str, set[_Follower]] = {}
        self._told: dict[str, State] = {}  # by group, of those that somebody follows
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Return how many groups are followed."""
        return len(self._followers)

    def follow(self, group: str, client_id: str, outlet: Outlet) -> None:
        """Know that the client of a stream has got the settings of a group."""
        # Where others follow it already they may not have been told yet of what this one was.
        self._told.setdefault(group, self._state(group))
        self._followers.setdefault(group, set()).add(_Follower(client_id, outlet))

    def leave(self, group: str, client_id: str, outlet: Outlet) -> None:
        """Know that a stream ends, or that its client is of another group now."""
        left = self._followers.get(group, set())
        left.discard(_Follower(client_id, outlet))
        if not left:
            self._followers.pop(group, None)
            self._told.pop(group, None)

    def changed(self) -> None:
        """Know that the configuration has changed somewhere; clients are told soon."""
        self._changed.set()

    async def run(self) -> None:
        """Tell clients of changes until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(GATHER_S)
            self._changed.clear()
            await self.tell()

    async def tell(self) -> None:
        """Tell the clients of all groups that are not as their clients were told."""
        groups = list(self._followers)
        for first in range(0, len(groups), GROUPS_A_TURN):
            for group in groups[first : first + GROUPS_A_TURN]:
                state = self._state(group)
                # One that was deleted is no news: its clients hear of it from their calls.
                if state is None or group not in self._told or self._told[group] == state:
                    continue
                self._told[group] = state
                followers = list(self._followers[group])
                for begin in range(0, len(followers), TOLD_AT_ONCE_MAX):
                    await self._tell_some(group, followers[begin : begin + TOLD_AT_ONCE_MAX])
            await asyncio.sleep(0)

    def _state(self, group: str) -> State:
        found = self._find_group(group)
        return None if found is None else (found.id, found.version)

    async def _tell_some(self, group: str, followers: list[_Follower]) -> None:
        spread_s = min(SPREAD_S, SPREAD_EACH_S * len(followers))
        async with asyncio.TaskGroup() as tasks:
            for follower in followers:
                delay_s = random.uniform(0, spread_s)
                tasks.create_task(self._tell_one(group, follower, delay_s))

    async def _tell_one(self, group: str, follower: _Follower, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        # Only now: it may have gone, and the group may have changed once more.
        found = self._find_group(group)
        if found is None or follower not in self._followers.get(group, set()):
            return
        command = self._settings_of(follower.client_id, found)
        if command is not None:
            await self._streams.tell(follower.outlet, command, timeout_s=PATIENCE_S)
