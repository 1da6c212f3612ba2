"""Broker processes as replicas of one broker group, with a minimal controller.

The group's record is in this process. The controller accepts a proposal with the record's version.
It elects a live member of the sync state set.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.eventually import LOOK_EVERY_S
from tests.support.processes.processes import environment
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView

START_S = 120.0  # far longer than a start beside other tests


class ReplicaProcess:
    """One replica's process with its addresses."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self.process = process
        self.member: ReplicaRun
        self.address = self.metrics = ""

    def send_view(self, view: ReplicationView) -> None:
        """Send a view to the process."""
        line = {
            "epoch": view.epoch,
            "version": view.version,
            "master": view.master,
            "sss": sorted(view.sss),
            "min_in_sync": view.min_in_sync,
            "addresses": view.addresses,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")


class ReplicaGroup:
    """The replicas' processes and the group's record."""

    def __init__(self, folder: Path, *flags: str, count: int = 3, min_in_sync: int = 2) -> None:
        self.folder = folder
        self.flags = flags
        self.count = count
        self.view = ReplicationView(0, 0, None, frozenset(), frozenset(), min_in_sync)
        self.up: dict[int, ReplicaProcess] = {}
        self.all: list[ReplicaProcess] = []
        self.changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def master(self) -> ReplicaProcess:
        """The master in the record. Raises ConnectionError while it is down."""
        assert self.view.master is not None
        replica = self.up.get(self.view.master.replica_id)
        if replica is None:
            raise ConnectionError("the master is down")
        return replica

    async def start(self, number: int) -> ReplicaProcess:
        """Start a replica and send it the view."""
        log = self.folder / f"replica-{number}.log"
        log.touch()
        begin = log.stat().st_size  # Earlier runs wrote the lines before.
        with log.open("a") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.support.processes.replica_process",
                "--name=broker-0",
                f"--replica-id={number}",
                f"--data-dir={self.folder / str(number)}",
                "--grpc-port=0",
                "--metrics-port=0",
                "--auto-create-topics",
                "--auto-create-groups",
                *self.flags,
                env=environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
            )
        replica = ReplicaProcess(number, process)
        self.all.append(replica)
        async with asyncio.timeout(START_S):
            said = await self._line(replica)
            assert said is not None, log.read_text()
            replica.member = ReplicaRun(ReplicaId(number), said["incarnation"])
            while not replica.address:
                for line in log.read_bytes()[begin:].decode().splitlines(keepends=True):
                    fields = json.loads(line) if line.endswith("\n") else {}
                    if fields.get("event") == "broker serves":
                        replica.address, replica.metrics = fields["grpc"], fields["metrics"]
                await asyncio.sleep(LOOK_EVERY_S)
        self.up[number] = replica
        addresses = dict(self.view.addresses) | {ReplicaId(number): replica.address}
        await self._write(addresses=tuple(sorted(addresses.items())))
        task = asyncio.create_task(self._listen(replica))
        self._tasks.add(task)
        return replica

    async def _line(self, replica: ReplicaProcess) -> dict[str, Any] | None:
        assert replica.process.stdout is not None
        line = await replica.process.stdout.readline()
        return json.loads(line) if line else None

    async def _listen(self, replica: ReplicaProcess) -> None:
        while said := await self._line(replica):
            if "incarnation" in said:
                replica.member = ReplicaRun(replica.member.replica_id, said["incarnation"])
            if said.get("version") == self.view.version and replica.member == self.view.master:
                sss = frozenset(ReplicaRun(*one) for one in said["sss"])
                if all(self._lives(one) for one in sss - self.view.sss):
                    await self._write(sss=sss)

    def _lives(self, member: ReplicaRun) -> bool:
        replica = self.up.get(member.replica_id)
        return replica is not None and replica.member == member

    async def _write(self, **changes: object) -> None:
        self.view = self.view._replace(version=self.view.version + 1, **changes)  # type: ignore[arg-type]  # Fields of a view.
        for replica in self.up.values():
            replica.send_view(self.view)
        async with self.changed:
            self.changed.notify_all()

    async def elect(
        self, number: int | None = None, *, members: Sequence[int] = (), without: Sequence[int] = ()
    ) -> ReplicaProcess:
        """Begin an epoch with replica `number` as the master. Default: any live member.

        `members` replace the sync state set: they are new runs of its members.
        """
        live = [self.up[one].member for one in members] or [
            one for one in sorted(self.view.sss) if self._lives(one)
        ]
        members_left = [one for one in live if one.replica_id not in without]
        master = self.up[number].member if number is not None else members_left[0]
        await self._write(
            epoch=self.view.epoch + 1, master=master, sss=frozenset({master, *members_left})
        )
        return self.up[master.replica_id]

    async def kill(self, number: int) -> None:
        """Kill a replica with SIGKILL, without a report to the others."""
        replica = self.up.pop(number)
        replica.process.send_signal(signal.SIGKILL)
        await replica.process.wait()

    async def in_sync(self, count: int) -> None:
        """Wait until the sync state set has at least `count` members."""
        async with asyncio.timeout(START_S), self.changed:
            await self.changed.wait_for(lambda: len(self.view.sss) >= count)

    async def stop(self, number: int) -> int:
        """Stop a replica with SIGTERM; return its exit status."""
        replica = self.up.pop(number)
        replica.process.terminate()
        return await replica.process.wait()

    async def close(self) -> None:
        """End the remaining processes."""
        for replica in self.up.values():
            with contextlib.suppress(ProcessLookupError):
                replica.process.kill()
        # Each task ends with its process.
        await asyncio.gather(*self._tasks)
        for replica in self.all:
            assert replica.process.stdin is not None
            replica.process.stdin.close()
            await replica.process.wait()


@contextlib.asynccontextmanager
async def replica_group(folder: Path, *flags: str, count: int = 3) -> AsyncIterator[ReplicaGroup]:
    """Run a broker group during the block, with replica 0 as master and all replicas in sync."""
    group = ReplicaGroup(folder, *flags, count=count)
    try:
        for number in range(count):
            await group.start(number)
        await group.elect(0)
        await group.in_sync(count)
        yield group
    finally:
        await group.close()
