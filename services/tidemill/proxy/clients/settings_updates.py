"""Updates of client settings after an operator has changed a consumer group.

A client asks for its settings and then uses them for minutes. The attempts, the back-off and the
delivery order in them come from the consumer group. If the group changes, the proxy sends the
settings again on the open streams. Changes of topics do not affect settings.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from tidemill.message.client_key import ClientKey

if TYPE_CHECKING:
    from tidemill.proxy.clients.telemetry_streams import TelemetrySink, TelemetryStreams
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

# Delay after a change, so that changes in quick succession cause one update.
GATHER_S: Final = 0.5
GROUPS_A_TURN: Final = 1_000  # checked per turn of the event loop, in about 300 microseconds
# Updates are spread over this time: each client parses its settings, and some ask again.
SPREAD_S: Final = 1.0
SPREAD_EACH_S: Final = 0.002  # per client, if there are fewer than 500
UPDATES_MAX: Final = 500  # concurrent updates; more clients take a multiple of SPREAD_S
SEND_TIMEOUT_S: Final = 1.0  # of a client that does not read; it asks by itself within minutes

# Id and version of a group in the configuration of its home; None if the group does not exist.
GroupVersion: TypeAlias = "tuple[int, int] | None"


class _Follower(NamedTuple):
    client: ClientKey
    sink: TelemetrySink


@final
class SettingsUpdates:
    """The clients of each consumer group, and the version of the group that they have."""

    def __init__(
        self,
        streams: TelemetryStreams,
        find_group: Callable[[str], link_pb2.GroupConfig | None],
        settings_of: Callable[[ClientKey, link_pb2.GroupConfig], bytes | None],
    ) -> None:
        """`settings_of` returns the command for a client; None if the client is unknown."""
        self._streams = streams
        self._find_group = find_group
        self._settings_of = settings_of
        self._followers: dict[str, set[_Follower]] = {}
        self._versions: dict[str, GroupVersion] = {}  # sent to the followers, by group
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of followed groups."""
        return len(self._followers)

    def follow(self, group: str, client: ClientKey, sink: TelemetrySink) -> None:
        """Record that the client of a stream has the settings of a group."""
        # Earlier followers may still have an older version, so keep that one.
        self._versions.setdefault(group, self._version(group))
        self._followers.setdefault(group, set()).add(_Follower(client, sink))

    def unfollow(self, group: str, client: ClientKey, sink: TelemetrySink) -> None:
        """Remove a stream that ends or whose client has another group now."""
        followers = self._followers.get(group, set())
        followers.discard(_Follower(client, sink))
        if not followers:
            self._followers.pop(group, None)
            self._versions.pop(group, None)

    def schedule(self) -> None:
        """Schedule updates, because the configuration has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Send updates until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(GATHER_S)
            self._changed.clear()
            await self.send()

    async def send(self) -> None:
        """Send updates to the clients of all changed groups."""
        groups = list(self._followers)
        for first in range(0, len(groups), GROUPS_A_TURN):
            for group in groups[first : first + GROUPS_A_TURN]:
                version = self._version(group)
                # Clients learn from their calls that a group was deleted.
                if version is None or self._versions.get(group, version) == version:
                    continue
                self._versions[group] = version
                followers = list(self._followers[group])
                for begin in range(0, len(followers), UPDATES_MAX):
                    await self._send_some(group, followers[begin : begin + UPDATES_MAX])
            await asyncio.sleep(0)

    def _version(self, group: str) -> GroupVersion:
        found = self._find_group(group)
        return None if found is None else (found.id, found.version)

    async def _send_some(self, group: str, followers: list[_Follower]) -> None:
        spread_s = min(SPREAD_S, SPREAD_EACH_S * len(followers))
        async with asyncio.TaskGroup() as tasks:
            for follower in followers:
                delay_s = random.uniform(0, spread_s)
                tasks.create_task(self._send_one(group, follower, delay_s))

    async def _send_one(self, group: str, follower: _Follower, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        # During the delay, the client may have disconnected and the group may have changed again.
        found = self._find_group(group)
        if found is None or follower not in self._followers.get(group, set()):
            return
        command = self._settings_of(follower.client, found)
        if command is not None:
            await self._streams.try_send(follower.sink, command, timeout_s=SEND_TIMEOUT_S)
