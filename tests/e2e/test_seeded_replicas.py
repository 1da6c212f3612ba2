"""A new replica, or one behind the retention limit, catches up without an operator."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from tests.e2e.test_replicas import Client, Exchange, run
from tests.support.processes.replica_group import ReplicaGroup, replica_group
from tests.support.worlds.engine_world import blob
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

SEGMENT = 1 << 20
FLAGS = (
    f"--segment-bytes={SEGMENT}",
    f"--retention-bytes={4 * SEGMENT}",
    f"--checkpoint-log-bytes={SEGMENT}",
)
GONE_S = 40.0
AT_ONCE = 32
BODY = 8 << 10


def first_offset(folder: Path, number: int) -> int:
    """Return the first offset of a replica's log."""
    names = [path.stem for path in (folder / str(number) / "log").glob("*.log")]
    return min(int(name) for name in names if name.isdigit())


class Filler(Client):
    """A client that sends many large messages at once."""

    def __init__(self, group: ReplicaGroup) -> None:
        super().__init__(group)
        self.count = 0

    async def fill(self, is_done: Callable[[], bool]) -> None:
        """Send until `is_done` returns true."""

        async def work(call: Exchange) -> None:
            while not is_done():
                frame = pb.RequestFrame()
                for number in range(self.count, self.count + AT_ONCE):
                    data = blob(f"m{number}", size=BODY)
                    frame.appends.request_ids.append(number)
                    frame.appends.topic_ids.append(self.topic_id)
                    frame.appends.queue_ids.append(0)
                    frame.appends.crcs.append(crc32(data))
                    frame.appends.blobs.append(data)
                await self.exchange(call, frame)
                self.count += AT_ONCE

        async with asyncio.timeout(GONE_S):
            await self.on_link(work)


@pytest.mark.heavy
@pytest.mark.parametrize("is_emptied", [False, True], ids=["left behind", "new volume"])
def test_a_replica_behind_retention_catches_up(tmp_path: Path, is_emptied: bool) -> None:
    async def scenario() -> None:
        async with replica_group(tmp_path, *FLAGS) as group:
            client = Filler(group)
            await client.found()
            await client.fill(lambda: client.count > 100)
            await group.kill(2)
            await client.fill(lambda: first_offset(tmp_path, 0) > 4 * SEGMENT)
            if is_emptied:
                shutil.rmtree(tmp_path / "2")
            await group.start(2)
            await group.in_sync(3)
            assert first_offset(tmp_path, 2) > 4 * SEGMENT
            end = client.count
            await client.fill(lambda: client.count > end)
            await group.kill(1)
            await group.elect(2, members=(0, 2))
            found = {int(text[1:]) for text in await client.receive_all()}
            # Retention may have deleted more of the oldest messages between two polls.
            await client.found("later")
            oldest = min(int(text[1:]) for text in await client.receive_all())
            assert found >= set(range(oldest, client.count))
            assert (client.count - oldest) * BODY > 2 * SEGMENT

    run(scenario)
