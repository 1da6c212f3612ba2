"""Acks, changes and dead letters in flight while the master is killed: each one has an answer."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

from tests.support.clients.api import METADATA, Api, api, message
from tests.support.processes.processes import Standalone, standalone
from tests.support.processes.replicated_standalone import FLAGS, ReplicatedStandalone, send_signal
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

MESSAGES = 600  # per kill
AT_ONCE = 30  # messages per send and per receive
CLIENTS = 8
KILLS = 3
CALL_S = 60.0  # a deadline that each election meets, also on a busy machine
INVISIBLE_MS = 3_600_000  # No delivery ends by itself.
TOPIC, GROUP = "settled", "settling"


def test_each_settlement_in_flight_at_a_masters_death_has_its_result(tmp_path: Path) -> None:
    """An INTERNAL_SERVER_ERROR would be an unknown outcome, although a new master is up."""
    with standalone(tmp_path / "data", *FLAGS) as running:
        running.put(f"topics/{TOPIC}", queues=4)
        running.put(f"groups/{GROUP}")
        codes, dead = asyncio.run(settle_while_masters_die(running))
        # A change and an ack for a third of the messages, one call for each other one.
        assert codes == {"OK": 4 * KILLS * MESSAGES // 3}
        assert running.lag(GROUP) == 0
        assert asyncio.run(dead_letters(running)) == dead == KILLS * MESSAGES // 3


async def settle_while_masters_die(running: Standalone) -> tuple[Counter[str], int]:
    group = ReplicatedStandalone(running)
    codes: Counter[str] = Counter()
    dead = 0
    await group.in_sync()
    async with api(running.grpc, call_s=CALL_S) as client:
        for _ in range(KILLS):
            received = await fill(client)
            epoch = (await asyncio.to_thread(group.status))["epoch"]
            _, broker, *_ = group.pids(await asyncio.to_thread(group.master))
            settled = asyncio.Semaphore(0)
            async with asyncio.TaskGroup() as tasks:
                for number in range(CLIENTS):
                    mine = received[number::CLIENTS]
                    tasks.create_task(settle_all(running, mine, codes, settled))
                for _ in range(MESSAGES // 4):  # The kill comes amid the calls.
                    await settled.acquire()
                send_signal([broker], signal.SIGKILL)
            dead += MESSAGES // 3
            await group.in_sync(after_epoch=epoch)
    return codes, dead


async def fill(client: Api) -> list[tuple[int, str]]:
    """Send and receive MESSAGES messages; return their numbers and receipt handles."""
    for first in range(0, MESSAGES, AT_ONCE):
        numbers = range(first, first + AT_ONCE)
        answer = await client.send(
            *(message(TOPIC, b"%d" % n, message_id=f"id-{n}") for n in numbers)
        )
        assert answer.status.code == v2.OK, answer.status
    handles: list[str] = []
    while len(handles) < MESSAGES:
        messages = await client.receive(
            TOPIC, GROUP, poll_ms=5_000, invisible_ms=INVISIBLE_MS, batch_size=AT_ONCE
        )
        handles += [one.system_properties.receipt_handle for one in messages]
    return list(enumerate(handles))


async def settle_all(
    running: Standalone,
    received: list[tuple[int, str]],
    codes: Counter[str],
    settled: asyncio.Semaphore,
) -> None:
    """Ack a third of the messages, ack a third after a change, and move a third to dead letters."""
    async with api(running.grpc, call_s=CALL_S) as client:
        for number, handle in received:
            newest = handle
            if number % 3 == 0:
                codes[await move(client, handle)] += 1
            else:
                if number % 3 == 1:
                    changed = await client.change_invisible(TOPIC, GROUP, handle, INVISIBLE_MS)
                    codes[v2.Code.Name(changed.status.code)] += 1
                    newest = changed.receipt_handle
                acked = await client.ack(TOPIC, GROUP, [newest])
                codes[v2.Code.Name(acked.status.code)] += 1
            settled.release()


async def move(client: Api, handle: str) -> str:
    request = service.ForwardMessageToDeadLetterQueueRequest(
        topic=v2.Resource(name=TOPIC), group=v2.Resource(name=GROUP), receipt_handle=handle
    )
    answer = await client.stub.ForwardMessageToDeadLetterQueue(
        request, metadata=METADATA, timeout=CALL_S
    )
    return v2.Code.Name(answer.status.code)


async def dead_letters(running: Standalone) -> int:
    """Return the number of messages in the dead-letter topic."""
    count = 0
    async with api(running.grpc, call_s=CALL_S) as client:
        while messages := await client.receive(
            f"%DLQ%{GROUP}", "reading", invisible_ms=INVISIBLE_MS, poll_ms=1_000
        ):
            count += len(messages)
    return count
