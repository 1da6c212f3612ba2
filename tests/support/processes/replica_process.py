"""A broker process that is a replica. The test plays its controllers.

    python -m tests.support.processes.replica_process --name=broker-0 --replica-id=1 ...

It reads views from standard input, one line of JSON each. It writes its messages to controllers to
standard output. The first line is its incarnation, which it repeats for each new run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from tidemill.broker import app
from tidemill.broker.settings import BrokerSettings
from tidemill.broker.sync_process import SyncProcess
from tidemill.common.lifecycle import run
from tidemill.common.log import configure_logging
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView

if TYPE_CHECKING:
    from tidemill.broker.controller_link.port import ControlledReplica
    from tidemill.broker.engine.replication.actions import MastershipRelease


def view_of(line: str) -> ReplicationView:
    """Return the view in a line."""
    found: dict[str, Any] = json.loads(line)
    return ReplicationView(
        epoch=found["epoch"],
        version=found["version"],
        master=None if found["master"] is None else member_of(found["master"]),
        sss=frozenset(map(member_of, found["sss"])),
        eligible=frozenset(),
        min_in_sync=found["min_in_sync"],
        addresses=tuple((ReplicaId(one), at) for one, at in found["addresses"]),
    )


def member_of(found: list[Any]) -> ReplicaRun:
    """Return a member from its number and incarnation."""
    return ReplicaRun(ReplicaId(found[0]), found[1])


def say(**fields: object) -> None:
    """Write a line."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Pipes:
    """The connection to the controllers: two pipes."""

    def __init__(self) -> None:
        self._replicas: ControlledReplica | None = None
        self._view: ReplicationView | None = None
        self._rest = b""

    def attach(self, replicas: ControlledReplica) -> None:
        if self._replicas is None:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)
        me = replicas.introduction().me
        if self._replicas is None or self._replicas.introduction().me != me:
            say(incarnation=me.incarnation)
        self._replicas = replicas
        if self._view is not None:
            replicas.learn(self._view)

    def _read(self) -> None:
        said = os.read(sys.stdin.fileno(), 1 << 16)
        if not said:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        *lines, self._rest = (self._rest + said).split(b"\n")
        for line in lines:
            self._view = view_of(line.decode())
            assert self._replicas is not None
            self._replicas.learn(self._view)

    def propose(self, proposal: Proposal) -> None:
        say(version=proposal.version, sss=sorted(proposal.sss))

    def release(self, release: MastershipRelease) -> None:
        say(release=release.target)


def main() -> int:
    settings = BrokerSettings.load(sys.argv[1:])
    configure_logging(
        process=f"{settings.name}-{settings.replica_id}",
        level=settings.log_level,
        log_format=settings.log_format,
    )
    log_syncs, background_syncs = SyncProcess.fork("log sync"), SyncProcess.fork("background sync")
    return run(lambda: app.serve(settings, log_syncs, background_syncs, Pipes()))


if __name__ == "__main__":
    sys.exit(main())
