"""Version 0.1.0 and this program in one broker group, forwards and back, with clients at work."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support.clients.load import Load
from tests.support.eventually import eventually
from tests.support.processes.controlled_group import (
    AnnouncedProcess,
    ControlledGroup,
    controlled_group,
    proxy_of,
)
from tests.support.processes.earlier_release import build_release
from tests.support.processes.processes import STOP_S
from tidemill.common.feature_level import FEATURE_LEVEL

LIMIT_S = 300.0
PATIENT_S = 30.0  # Timeout of a client on a slow machine.
SENDS_BETWEEN = 30
CAP = ("--feature-level-max=1",)


@pytest.fixture(scope="module")
def release_0_1_0(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return build_release("0.1.0", tmp_path_factory.mktemp("release"))


class MixedGroup:
    """A broker group whose processes change between two versions."""

    def __init__(self, folder: Path, earlier: Mapping[str, str]) -> None:
        self._earlier = earlier
        self.old = {"controller", *(f"replica {n}" for n in range(3))}
        self.running = controlled_group(folder, variables=self._variables)
        self.group: ControlledGroup

    def _variables(self, name: str) -> Mapping[str, str]:
        return self._earlier if name in self.old else {}

    def replace_replica(self, number: int, *, is_old: bool) -> None:
        """Stop a replica and start it with another version; wait until it is in sync."""
        assert self.group.replicas[number].stop() == 0
        self._note(f"replica {number}", is_old=is_old)
        self.group.start_replica(number)
        self.group.await_in_sync()

    def replace_controller(self, *flags: str, is_old: bool = False) -> None:
        """Start the controller with another version or other flags, at its port."""
        port = self.group.controller.grpc.rpartition(":")[2]
        self.group.controller.end()
        self._note("controller", is_old=is_old)
        self.group.controller_flags = flags
        self.group.controller = self.group.start_controller(port)
        self.group.await_group(
            lambda found: all(one.HasField("heartbeat") for one in found.replicas)
        )
        self.group.await_in_sync()

    def _note(self, name: str, *, is_old: bool) -> None:
        (self.old.add if is_old else self.old.discard)(name)

    def kill_master(self) -> None:
        """Kill the master's broker, and wait until its successor leads and all are in sync."""
        before = self.group.group()
        os.kill(self.group.replicas[before.view.master.replica_id].broker_pid, signal.SIGKILL)
        self.group.led_by_another(before)
        self.group.await_in_sync()

    def level(self) -> int:
        """Return the level in the record; 1 from an old controller."""
        return max(self.group.group().view.feature_level, 1)


def play(
    folder: Path,
    earlier: Mapping[str, str],
    upgrade: Callable[[MixedGroup, Callable[[], None]], None],
) -> Load:
    """Run clients of a proxy of version 0.1.0 during an upgrade; return their history."""
    mixed = MixedGroup(folder, earlier)

    async def run(endpoint: str) -> Load:
        load = Load(endpoint, "orders", "billing", random.Random(5), call_s=PATIENT_S)
        stop = asyncio.Event()

        def await_sends() -> None:
            wanted = load.sent_ok + SENDS_BETWEEN
            eventually(lambda: load.sent_ok >= wanted)

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(load.run(producers=2, consumers=2, stop=stop))
            await asyncio.to_thread(upgrade, mixed, await_sends)
            await asyncio.to_thread(await_sends)
            stop.set()
            await running
        return load

    with mixed.running as mixed.group:
        mixed.group.await_in_sync()
        with proxy_of(mixed.group) as proxy:
            return asyncio.run(run(proxy.grpc))


@pytest.mark.heavy
def test_an_upgrade_with_failovers_raises_the_level_at_its_end(
    tmp_path: Path, release_0_1_0: Mapping[str, str]
) -> None:
    def upgrade(mixed: MixedGroup, await_sends: Callable[[], None]) -> None:
        # The new version as a replica, and then as the master, of replicas of version 0.1.0.
        mixed.replace_replica(2, is_old=False)
        await_sends()
        mixed.group.move_master(2)
        mixed.group.await_in_sync()
        await_sends()
        # A replica of version 0.1.0 succeeds the new version.
        mixed.kill_master()
        await_sends()
        mixed.replace_controller()
        mixed.replace_replica(1, is_old=False)
        await_sends()
        assert mixed.level() == 1
        mixed.replace_replica(0, is_old=False)
        mixed.group.await_group(lambda found: found.view.feature_level == FEATURE_LEVEL)
        await_sends()
        refuse_the_old(mixed, 1)
        await_sends()
        # The master learns the level from its log, whatever the record says.
        mixed.kill_master()
        assert mixed.level() == FEATURE_LEVEL

    load = play(tmp_path, release_0_1_0, upgrade)
    verdict = load.history.judge()
    assert verdict.is_clean, str(verdict)


@pytest.mark.heavy
def test_while_a_cap_holds_the_level_the_way_back_is_open(
    tmp_path: Path, release_0_1_0: Mapping[str, str]
) -> None:
    def upgrade(mixed: MixedGroup, await_sends: Callable[[], None]) -> None:
        mixed.replace_controller(*CAP)
        for number in range(3):
            mixed.replace_replica(number, is_old=False)
        await_sends()
        assert mixed.level() == 1
        for number in range(3):
            mixed.replace_replica(number, is_old=True)
        mixed.replace_controller(is_old=True)
        mixed.kill_master()
        await_sends()
        # Forwards again, to stay.
        mixed.replace_controller()
        for number in range(3):
            mixed.replace_replica(number, is_old=False)
        mixed.group.await_group(lambda found: found.view.feature_level == FEATURE_LEVEL)
        await_sends()

    load = play(tmp_path, release_0_1_0, upgrade)
    verdict = load.history.judge()
    assert verdict.is_clean, str(verdict)


def refuse_the_old(mixed: MixedGroup, number: int) -> None:
    """Start a replica of the former version: it ends with the reason and changes nothing."""
    assert mixed.group.replicas[number].stop() == 0
    mixed.old.add(f"replica {number}")
    log = mixed.group.folder / f"replica-{number}.log"
    begin = log.stat().st_size
    mixed.group.start_replica(number)
    assert mixed.group.replicas[number].process.wait(STOP_S) == 1
    said = log.read_bytes()[begin:].decode()
    needed = f"broker group broker-0 needs {FEATURE_LEVEL}"
    assert f"replica broker-0-{number} has feature level 1; {needed}" in said, said
    mixed.group.replicas[number].end()
    mixed.old.discard(f"replica {number}")
    mixed.group.start_replica(number)
    mixed.group.await_in_sync()


def test_a_broker_without_replicas_goes_back_while_its_cap_holds(
    tmp_path: Path, release_0_1_0: Mapping[str, str]
) -> None:
    log = tmp_path / "broker.log"

    def start(variables: Mapping[str, str], *flags: str) -> None:
        arguments = [
            "broker",
            f"--data-dir={tmp_path / 'data'}",
            "--grpc-port=0",
            "--metrics-port=0",
        ]
        started = AnnouncedProcess("broker", [*arguments, *flags], log, variables)
        try:
            assert started.stop() == 0
        finally:
            started.end()

    start(release_0_1_0)
    start({}, *CAP)
    start(release_0_1_0)
    start({})
    with pytest.raises(AssertionError, match="configuration item 'featureLevel'"):
        start(release_0_1_0)
    start({}, *CAP)
