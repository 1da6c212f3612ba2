"""Three replicas of a broker group and a controller as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.eventually import eventually
from tests.support.processes.processes import START_S, STOP_S, command, descendants, environment
from tests.support.processes.tcp_links import Link, Links
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.stubs.tidemill.controller.v1 import controller_pb2_grpc

GROUP = "broker-0"
WITHIN_MS = 120_000  # enough for the slowest machine and the controllers' next check
CALL_S = 30.0
Variables = Callable[[str], Mapping[str, str]]


def no_more(_name: str) -> Mapping[str, str]:
    """Add no variables to the environment of a process."""
    return {}


class AnnouncedProcess:
    """A process that has reported its addresses."""

    def __init__(
        self, name: str, arguments: list[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start the process with additional environment `variables`."""
        self.name = name
        ours, theirs = socket.socketpair()
        with ours, log.open("a") as stderr:
            with theirs:
                self.process = subprocess.Popen(
                    command(*arguments, f"--supervisor-fd={theirs.fileno()}"),
                    env={**environment(), **(variables or {})},
                    stderr=stderr,
                    pass_fds=[theirs.fileno()],
                )
            ours.settimeout(START_S)
            line = ours.recv(4096)
            self._fd = ours.detach()  # If it closed, the process would end with its supervisor.
        if not line:
            self.process.wait(STOP_S)
        assert line, f"{name} did not start:\n{log.read_text()}"
        ready = json.loads(line)
        self.grpc: str = ready["grpc"]
        self.metrics: str = ready["metrics"]

    @property
    def pid(self) -> int:
        return self.process.pid

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric of the process; 0 if `/metrics` does not have it."""
        with httpx.Client(trust_env=False, timeout=CALL_S) as client:
            text = client.get(self.metrics).raise_for_status().text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def broker_pid(self) -> int:
        """Return the process id of the broker that a supervisor has started."""
        [child] = [pid for pid in descendants(self.pid)[1:] if parent_of(pid) == self.pid]
        return child

    def stop(self) -> int:
        """Stop the process in order; return its exit status."""
        self.process.terminate()
        return self.process.wait(STOP_S)

    def end(self) -> None:
        """End the process and release its descriptor."""
        for pid in descendants(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_S)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0: the process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def reasons_since(before: wire.BrokerGroupStatus, after: wire.BrokerGroupStatus) -> list[str]:
    """Return the reasons of the elections between two states of a broker group."""
    return [one.reason for one in after.history if one.epoch > before.view.epoch]


class ControlledGroup:
    """The processes, with the controllers' view of them."""

    def __init__(
        self,
        folder: Path,
        links: Links | None = None,
        *,
        controllers: int = 1,
        flags: Sequence[str] = (),
        controller_flags: Sequence[str] = (),
        variables: Variables = no_more,
    ) -> None:
        """Start all processes. With `links`, their connections pass through relays.

        `flags` go to the replicas. `variables` returns the environment of a process by its name.
        """
        self.folder = folder
        self.flags = flags
        self.controller_flags = controller_flags
        self.variables = variables
        self.links = links
        self.controllers = [self.start_controller() for _ in range(controllers)]
        self.to_controllers: dict[int, list[Link]] = {}  # by replica
        self.to_replica: dict[int, Link] = {}  # from other replicas and proxies
        self.replicas: dict[int, AnnouncedProcess] = {}
        for replica in range(3):
            self.start_replica(replica)

    @property
    def controller(self) -> AnnouncedProcess:
        """Return the controller that answers the queries below."""
        return self.controllers[0]

    @controller.setter
    def controller(self, controller: AnnouncedProcess) -> None:
        self.controllers[0] = controller

    def start_controller(self, port: str = "0") -> AnnouncedProcess:
        arguments = [
            "controller",
            f"--grpc-port={port}",
            "--metrics-port=0",
            f"--group-store={self.folder / 'groups.sqlite'}",
            "--min-in-sync=2",
            *self.controller_flags,
        ]
        log, variables = self.folder / "controller.log", self.variables("controller")
        return AnnouncedProcess("controller", arguments, log, variables)

    def start_replica(self, replica: int) -> None:
        controllers = [one.grpc for one in self.controllers]
        arguments = [
            "broker",
            f"--name={GROUP}",
            f"--replica-id={replica}",
            f"--data-dir={self.folder / str(replica)}",
            "--auto-create-topics",
            "--auto-create-groups",
            "--grpc-port=0",
            "--metrics-port=0",
            *self.flags,
        ]
        if self.links is not None and replica not in self.to_replica:
            self.to_replica[replica] = self.links.make()
            self.to_controllers[replica] = [self.links.make(one) for one in controllers]
        if self.links is not None:
            controllers = [one.address for one in self.to_controllers[replica]]
            arguments.append(f"--replica-address={self.to_replica[replica].address}")
        arguments.append(f"--controllers={','.join(controllers)}")
        log = self.folder / f"replica-{replica}.log"
        name = f"replica {replica}"
        started = AnnouncedProcess(name, arguments, log, self.variables(name))
        self.replicas[replica] = started
        if self.links is not None:
            self.to_replica[replica].target = started.grpc

    def address_of(self, replica: int) -> str:
        """Return a replica's advertised address. A proxy has routes only to this address."""
        link = self.to_replica.get(replica)
        return self.replicas[replica].grpc if link is None else link.address

    def group(self) -> wire.BrokerGroupStatus:
        """Return the controller's state of the broker group."""
        with grpc.insecure_channel(self.controller.grpc) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            found: wire.BrokerGroupStatusList = stub.GetGroups(
                wire.GetGroupsRequest(group=GROUP), timeout=CALL_S, wait_for_ready=True
            )
        return found.groups[0]

    @property
    def master(self) -> int:
        """Return the number of the master, which may change at any time."""
        return self.await_group(lambda found: found.view.HasField("master")).view.master.replica_id

    def move_master(self, target: int) -> wire.BrokerGroupStatus:
        """Repeat the transfer to a replica until it is the master.

        Controllers reject a transfer to a replica that is not in sync or was silent for a second.
        They give up a transfer to a slow replica. On a busy machine, this can be any replica.
        """

        def is_there() -> bool:
            found = self.group()
            if found.view.master.replica_id == target:
                return True
            if not found.HasField("transfer"):
                with contextlib.suppress(grpc.RpcError):
                    self.transfer(target)
            return False

        eventually(is_there, within_ms=WITHIN_MS)
        return self.group()

    def led_by_another(self, before: wire.BrokerGroupStatus) -> wire.BrokerGroupStatus:
        """Wait until the master is another run than in `before`; return the new state."""
        return self.await_group(
            lambda found: (
                found.view.epoch > before.view.epoch and found.view.master != before.view.master
            )
        )

    def transfer(self, target: int) -> None:
        with grpc.insecure_channel(self.controller.grpc) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            stub.TransferMaster(
                wire.TransferMasterRequest(group=GROUP, target=target), timeout=CALL_S
            )

    def force(self, target: int) -> None:
        with grpc.insecure_channel(self.controller.grpc) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            stub.ForceMaster(wire.ForceMasterRequest(group=GROUP, target=target), timeout=CALL_S)

    def await_group(
        self, is_so: Callable[[wire.BrokerGroupStatus], bool]
    ) -> wire.BrokerGroupStatus:
        """Wait until the controller's state of the group fulfils a condition."""
        found: list[wire.BrokerGroupStatus] = []

        def look() -> bool:
            try:
                found[:] = [self.group()]
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                return False  # A new controller does not know the group yet.
            return is_so(found[0])

        eventually(look, within_ms=WITHIN_MS)
        return found[0]

    def lead(self, target: int) -> None:
        """Force the election of a replica as soon as the controller hears its heartbeats."""

        def is_forced() -> bool:
            try:
                self.force(target)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                return False
            return True

        eventually(is_forced, within_ms=WITHIN_MS)

    def await_in_sync(self, count: int = 3) -> wire.BrokerGroupStatus:
        return self.await_group(lambda group: len(group.view.sss) == count)

    def end(self) -> None:
        for each in (*self.replicas.values(), *self.controllers):
            each.end()


@contextlib.contextmanager
def controlled_group(
    folder: Path,
    links: Links | None = None,
    *,
    controllers: int = 1,
    flags: Sequence[str] = (),
    controller_flags: Sequence[str] = (),
    variables: Variables = no_more,
) -> Iterator[ControlledGroup]:
    """Run the broker group during the block, and end all its processes afterwards."""
    running: list[ControlledGroup] = []
    try:
        running.append(
            ControlledGroup(
                folder,
                links,
                controllers=controllers,
                flags=flags,
                controller_flags=controller_flags,
                variables=variables,
            )
        )
        yield running[0]
    finally:
        for each in running:
            each.end()


@contextlib.contextmanager
def proxy_of(
    group: ControlledGroup, *flags: str, name: str = "proxy-0"
) -> Iterator[AnnouncedProcess]:
    """Run a proxy of the broker group during the block."""
    arguments = [
        "proxy",
        f"--name={name}",
        f"--brokers={group.address_of(0)}",
        f"--controllers={','.join(one.grpc for one in group.controllers)}",
        f"--routes-file={group.folder / f'routes-of-{name}.json'}",
        "--grpc-port=0",
        "--metrics-port=0",
        "--drain-delay-ms=0",
        *flags,
    ]
    started: list[AnnouncedProcess] = []
    try:
        started.append(AnnouncedProcess(name, arguments, group.folder / f"{name}.log"))
        yield started[0]
    finally:
        for each in started:
            each.end()
