"""A full disk has room again soon after its large topic is deleted or purged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.clients.api import Api, api, message
from tests.support.clients.commands import tidemill
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

MIB = 1 << 20
SETTINGS = f"""
segment_bytes: {MIB}
disk_reserve_bytes: {12 * MIB}
checkpoint_log_bytes: {4 * MIB}
"""
DISK_BYTES = 60 * MIB  # of each replica
UNREAD = 200
WITHIN_S = 60.0  # on a busy machine; the figure is printed

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(os.geteuid() != 0, reason="who mounts a file system is root"),
]


@contextlib.contextmanager
def small_disk(at: Path, size: int) -> Iterator[None]:
    """Mount an empty file system for the block."""
    at.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(at)]
    if subprocess.run(line, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        # Lazily: a killed process may still hold its files.
        subprocess.run(["umount", "--lazy", str(at)], check=True)


async def send(client: Api, topic: str, key: str, size: int) -> bool:
    """Send a message; return whether it was stored."""
    try:
        answer = await client.send(message(topic, b"x" * size, message_id=key))
    except grpc.aio.AioRpcError:
        return False
    return answer.status.code == v2.OK


async def fill(client: Api) -> None:
    """Send large messages until the broker rejects them."""
    number = 0
    while await send(client, "large", f"large {number}", 200_000):
        number += 1
    assert number > 100


async def keep(client: Api) -> None:
    for number in range(UNREAD):
        assert await send(client, "small", f"small {number}", 100)


async def received(client: Api) -> set[str]:
    found: set[str] = set()
    async with asyncio.timeout(WITHIN_S):
        while len(found) < UNREAD:
            for one in await client.receive("small", "billing", batch_size=32):
                found.add(one.system_properties.message_id)
                await client.ack("small", "billing", [one.system_properties.receipt_handle])
    return found


@pytest.mark.parametrize("how", ["delete", "purge"])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("is_small_older", [True, False])
def test_the_space_of_a_large_topic_returns(
    tmp_path: Path, *, is_small_older: bool, replicas: int, how: str
) -> None:
    async def play(running: Standalone) -> float:
        async with api(running.grpc, call_s=30) as client:
            if is_small_older:
                await keep(client)
                await fill(client)
            else:
                for number in range(100):
                    assert await send(client, "large", f"first {number}", 200_000)
                await keep(client)
                await fill(client)
            assert not await send(client, "small", "later", 200_000)
            begin = time.monotonic()
            done = await asyncio.to_thread(tidemill, running, "topic", how, "large", "--yes")
            assert done.returncode == 0, done.stderr
            async with asyncio.timeout(WITHIN_S):
                while not await send(client, "other", "later", 200_000):  # noqa: ASYNC110  # No event reports free space.
                    await asyncio.sleep(0.05)
            return time.monotonic() - begin

    async def read(running: Standalone) -> set[str]:
        async with api(running.grpc, call_s=30) as client:
            return await received(client)

    settings = tmp_path / "settings.yaml"
    settings.write_text(SETTINGS)
    flags = [f"--config={settings}", *([f"--replicas={replicas}"] if replicas > 1 else [])]
    with small_disk(tmp_path / "data", replicas * DISK_BYTES):
        with standalone(tmp_path / "data", *flags) as running:
            waited_s = asyncio.run(play(running))
            print(f"room after {waited_s:.1f} s")  # noqa: T201  # A measured figure.
            for pid in running.pids():
                os.kill(pid, signal.SIGKILL)
        with standalone(tmp_path / "data", *flags) as running:
            assert asyncio.run(read(running)) == {f"small {n}" for n in range(UNREAD)}
