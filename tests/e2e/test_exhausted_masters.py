"""A master that runs out of a resource of its machine, other than disk space.

It must end, so that another replica takes over. It must not stay and reject all sends.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.support.clients.api import Api, api, message
from tests.support.processes.controlled_group import (
    WITHIN_MS,
    ControlledGroup,
    controlled_group,
    proxy_of,
    reasons_since,
)
from tidemill.controller.election.failure import Failure
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

MIB = 1 << 20
BODY = b"x" * (256 << 10)
SENDS = 80  # 20 segments
# Small segments, and checkpoints: the broker opens and maps files all the time.
FLAGS = (f"--segment-bytes={MIB}", f"--checkpoint-log-bytes={4 * MIB}")
CALL_S = 30.0
SPARE_BYTES = 2 * MIB

pytestmark = pytest.mark.heavy


def take_descriptors(pid: int) -> None:
    """Let a process open no further file."""
    count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, count))


def take_memory(pid: int) -> None:
    """Let a process map hardly any further memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


async def send(client: Api, key: str) -> bool:
    """Send a large message; return whether it was stored."""
    try:
        answer = await client.send(message("orders", BODY, message_id=key))
    except grpc.aio.AioRpcError:
        return False
    return answer.status.code == v2.OK


@pytest.mark.parametrize("take", [take_descriptors, take_memory])
def test_sends_continue_when_the_master_lacks_a_resource(
    tmp_path: Path, take: Callable[[int], None]
) -> None:
    async def play(group: ControlledGroup, endpoint: str) -> None:
        async with api(endpoint, call_s=CALL_S) as client, asyncio.timeout(WITHIN_MS / 1000):
            assert await send(client, "first")
            take(group.replicas[group.master].broker_pid)
            for number in range(SENDS):
                while not await send(client, f"m{number}"):
                    pass

    with controlled_group(tmp_path, flags=FLAGS) as group:
        before = group.await_in_sync()
        with proxy_of(group) as proxy:
            asyncio.run(play(group, proxy.grpc))
        assert reasons_since(before, group.await_in_sync())[0] == Failure.DIED.value
        group.end()
