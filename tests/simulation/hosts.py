"""The hosts of a broker group with replicas, as the home and the proxies see them.

The master moves to another host with its disk. A former master becomes a follower, or its machine
hangs for a while with its connections open. `replica_*` simulates replication itself.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tests.simulation.network import Network, ServerEnd
from tidemill.broker.server.members.member_connection import FOLLOW
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView
from tidemill.proxy.link.stream import EXCHANGE
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.transport.replica_wire import to_view
from tidemill.transport.routes.master_routes import WATCH_ROUTES

CONTROLLER: Final = "controller-0"
HOSTS: Final = 3  # of a broker group with replicas
HANG_S: Final = 20.0  # until the peers of a vanished machine end its connections
LAST_REPLY_S: Final = 1.0  # for the reply of a follower, before its stream ends


class Controller:
    """A controller that sends the masters of all broker groups to its callers."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._views: dict[str, ReplicationView] = {}
        self._calls: list[ServerEnd] = []
        self.start()

    def start(self) -> None:
        self._network.servers[CONTROLLER] = self

    def stop(self) -> None:
        self._calls.clear()
        self._network.close_server(CONTROLLER)

    def elect(self, name: str, hosts: list[str], master: str, epoch: int) -> None:
        """Record the master of a broker group, and report it to the connected callers."""
        known = self._views.get(name)
        self._views[name] = ReplicationView(
            epoch=epoch,
            version=1 if known is None else known.version + 1,
            master=ReplicaRun(ReplicaId(hosts.index(master)), f"{epoch:032x}"),
            sss=frozenset(),
            eligible=frozenset(),
            min_in_sync=2,
            addresses=tuple((ReplicaId(n), f"{host}:1") for n, host in enumerate(hosts)),
        )
        for call in self._calls:
            call.write(self._update(name, is_complete=False))

    async def serve(self, path: str, call: ServerEnd) -> None:
        if path != WATCH_ROUTES:
            return
        self._calls.append(call)
        call.write(self._update(*self._views, is_complete=True))
        async for _ in call:
            pass
        if call in self._calls:
            self._calls.remove(call)

    def _update(self, *names: str, is_complete: bool) -> bytes:
        groups = {name: to_view(self._views[name]) for name in names}
        return wire.RouteUpdate(groups=groups, is_complete=is_complete).SerializeToString()


class Follower:
    """A replica that is not the master, or a machine that hangs before it is one."""

    def __init__(self, *, hangs_for_s: float = 0.0) -> None:
        self._hangs_until_s = asyncio.get_running_loop().time() + hangs_for_s

    async def serve(self, path: str, call: ServerEnd) -> None:
        await asyncio.sleep(max(self._hangs_until_s - asyncio.get_running_loop().time(), 0.0))
        if path == EXCHANGE:
            call.write(pb.ReplyFrame(not_master=pb.NotMaster()).SerializeToString())
            await asyncio.sleep(LAST_REPLY_S)
        elif path == FOLLOW:
            async for request in call:
                sequence = pb.FollowFrame.FromString(request).sequence
                reply = pb.FollowReply(error="NotMaster", message="call it", sequence=sequence)
                call.write(reply.SerializeToString())
