"""Replicas on disks that fill up, each on its own small file system: row 22 of the matrix.

No acknowledged message is lost and no process ends. Once there is room, all work continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.clients.api import Api, api, message
from tests.support.processes.controlled_group import (
    GROUP,
    WITHIN_MS,
    ControlledGroup,
    controlled_group,
    proxy_of,
    reasons_since,
)
from tests.support.processes.processes import descendants
from tidemill.controller.election.history import HANDED_OVER
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.controller.v1 import controller_pb2

MIB = 1 << 20
SMALL, LARGE = 40 * MIB, 160 * MIB
BODY = b"x" * (256 << 10)
FLAGS = (
    f"--segment-bytes={MIB}",
    f"--disk-reserve-bytes={12 * MIB}",
    f"--checkpoint-log-bytes={4 * MIB}",
)
SENDS = 120  # 30 MiB: more than the free space of a small disk without its reserve.
CALL_S = 30.0

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(os.geteuid() != 0, reason="who mounts a file system is root"),
]


@contextlib.contextmanager
def small_disks(folder: Path, *replicas: int) -> Iterator[None]:
    """Give replicas small disks for the block."""
    mounted = []
    try:
        for replica in replicas:
            at = folder / str(replica)
            at.mkdir()
            if not is_mounted(at, "mount", "-t", "tmpfs", "-o", f"size={SMALL}", "none", str(at)):
                pytest.skip("nothing can be mounted here")
            mounted.append(at)
        yield
    finally:
        for at in mounted:
            # Lazily: a killed process may still hold its files.
            subprocess.run(["umount", "--lazy", str(at)], check=True)


def is_mounted(at: Path, *command: str) -> bool:
    done = subprocess.run(command, capture_output=True, check=False)
    return done.returncode == 0 and at.is_mount()


def enlarge(folder: Path, *replicas: int) -> None:
    for replica in replicas:
        at = str(folder / str(replica))
        subprocess.run(["mount", "-o", f"remount,size={LARGE}", at], check=True)


async def send(client: Api, key: str) -> bool:
    """Send a large message; return whether it was stored."""
    try:
        answer = await client.send(message("orders", BODY, message_id=key))
    except grpc.aio.AioRpcError:
        return False
    return answer.status.code == v2.OK


async def received(client: Api, count: int) -> set[str]:
    """Receive and ack `count` messages; return their keys."""
    found: set[str] = set()
    async with asyncio.timeout(WITHIN_MS / 1000):
        while len(found) < count:
            for one in await client.receive("orders", "billing", batch_size=8):
                found.add(one.system_properties.message_id)
                await client.ack("orders", "billing", [one.system_properties.receipt_handle])
    return found


def test_a_replica_with_a_full_disk_leaves_the_sync_state_set_and_returns(tmp_path: Path) -> None:
    async def play(group: ControlledGroup, endpoint: str) -> None:
        async with api(endpoint, call_s=CALL_S) as client:
            for number in range(SENDS):
                assert await send(client, f"m{number}"), "two have room"
            await asyncio.to_thread(group.await_group, lambda one: len(one.view.sss) == 2)
            full = group.group()
            assert 2 not in {one.replica_id for one in full.view.sss}
            assert full.replicas[2].HasField("heartbeat"), "it is there"
            enlarge(tmp_path, 2)
            await asyncio.to_thread(group.await_in_sync)
            assert len(await received(client, SENDS)) == SENDS

    with small_disks(tmp_path, 2), controlled_group(tmp_path, flags=FLAGS) as group:
        group.await_in_sync()
        if group.master == 2:
            group.move_master(0)
        before = {one: descendants(group.replicas[one].pid) for one in range(3)}
        with proxy_of(group) as proxy:
            asyncio.run(play(group, proxy.grpc))
        assert {one: descendants(group.replicas[one].pid) for one in range(3)} == before
        group.end()


def test_a_full_master_hands_over_once_to_a_replica_with_room(tmp_path: Path) -> None:
    async def play(group: ControlledGroup, endpoint: str) -> None:
        async with api(endpoint, call_s=CALL_S) as client, asyncio.timeout(WITHIN_MS / 1000):
            for number in range(SENDS):
                while not await send(client, f"m{number}"):
                    pass  # The disk is full until the transfer.
            assert len(await received(client, SENDS)) == SENDS

    with small_disks(tmp_path, 0), controlled_group(tmp_path, flags=FLAGS) as group:
        group.await_in_sync()
        group.move_master(0)
        before = group.await_in_sync()
        with proxy_of(group) as proxy:
            asyncio.run(play(group, proxy.grpc))
        after = group.group()
        assert after.view.master.replica_id != 0
        assert reasons_since(before, after) == [HANDED_OVER]
        assert after.replicas[0].heartbeat.health == controller_pb2.HEALTH_FULL
        assert not after.alarm, "two replicas have room"
        assert group.controller.metric("rocketmq_controller_full_replicas", broker_set=GROUP) == 1
        enlarge(tmp_path, 0)
        group.await_group(lambda one: one.replicas[0].heartbeat.health == controller_pb2.HEALTH_OK)
        assert reasons_since(before, group.await_in_sync()) == [HANDED_OVER]
        group.end()


def test_a_group_with_full_disks_rejects_sends_and_accepts_acks(tmp_path: Path) -> None:
    async def play(group: ControlledGroup, endpoint: str) -> None:
        stored = []
        async with api(endpoint, call_s=CALL_S) as client:
            for number in range(SENDS):
                if not await send(client, f"m{number}"):
                    break
                stored.append(f"m{number}")
            assert len(stored) < SENDS, "there was no room for all"
            assert await received(client, len(stored)) >= set(stored), "and each is acked"
            enlarge(tmp_path, 0, 1, 2)
            async with asyncio.timeout(WITHIN_MS / 1000):
                while not await send(client, "later"):  # noqa: ASYNC110  # No event reports free space.
                    await asyncio.sleep(0.1)
            await asyncio.to_thread(group.await_in_sync)

    with small_disks(tmp_path, 0, 1, 2), controlled_group(tmp_path, flags=FLAGS) as group:
        group.await_in_sync()
        with proxy_of(group) as proxy:
            asyncio.run(play(group, proxy.grpc))
        group.end()
