"""Deliveries in flight: operators list them and release them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.support.clients.api import METADATA, Api, api, message, receive_request
from tests.support.clients.commands import tidemill
from tests.support.processes.killing import kill, until
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

TOPIC, GROUP = "orders", "billing"
HIDDEN_MS = 3_600_000
CHUNK_BYTES = 64 << 10
# A broker that does not answer, and one without a connection.
_NOT_BACK_YET = (v2.PROXY_TIMEOUT, v2.INTERNAL_SERVER_ERROR)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("deliveries") / "data", "--groups=2") as started:
        yield started


def deliveries(running: Standalone, group: str, **query: object) -> list[dict[str, Any]]:
    """Return a consumer group's deliveries in flight, from pages of two."""
    found: list[dict[str, Any]] = []
    token = ""
    while True:
        page = httpx.get(
            f"{running.admin}/api/v1/groups/{group}/deliveries",
            params={"pageSize": 2, **query, **({"pageToken": token} if token else {})},  # type: ignore[dict-item]
        ).raise_for_status()
        found += page.json()["deliveries"]
        if not (token := page.json().get("nextPageToken", "")):
            return found


async def receive(client: Api, topic: str, group: str, client_id: str) -> list[v2.Message]:
    """Receive like a push consumer."""
    request = receive_request(topic, group, poll_ms=5_000, batch_size=1)
    request.ClearField("invisible_duration")
    request.auto_renew = True
    headers = (("x-mq-client-id", client_id), *METADATA[1:])
    call = client.stub.ReceiveMessage(request, metadata=headers, timeout=20)
    return [item.message async for item in call if item.HasField("message")]


async def settled(client: Api, handle: str) -> int:
    """Ack repeatedly until the broker is up; return the final status."""
    while True:
        answer = await client.ack(TOPIC, GROUP, [handle])
        code = answer.entries[0].status.code
        if code not in _NOT_BACK_YET:
            return code


def test_deliveries_in_flight_are_listed_and_released_across_a_crash(running: Standalone) -> None:
    running.put(f"topics/{TOPIC}", messageType="NORMAL", queues=2)
    running.put(f"groups/{GROUP}", maxAttempts=9)
    assert "there is no consumer group" in tidemill(running, "delivery", "list", "nobody").stderr

    async def main() -> None:
        async with api(running.grpc) as client:
            for n in range(6):
                await client.send(message(TOPIC, b"%d" % n))
            plain: list[v2.Message] = []
            while len(plain) < 4:
                plain += await client.receive(
                    TOPIC, GROUP, poll_ms=5_000, invisible_ms=HIDDEN_MS, batch_size=4 - len(plain)
                )
            pushed = [(await receive(client, TOPIC, GROUP, "pusher"))[0] for _ in range(2)]
            await asyncio.to_thread(check_listed, running, plain, pushed)
            await asyncio.to_thread(check_release, running, plain, pushed)
            for name in ("broker-0", "broker-1"):
                await kill(running, name)
            old = [one.system_properties.receipt_handle for one in (plain[0], pushed[0])]
            for handle in old:
                assert await settled(client, handle) == v2.INVALID_RECEIPT_HANDLE
            again: list[v2.Message] = []
            while len(again) < 6:
                again += await client.receive(TOPIC, GROUP, poll_ms=5_000)
            assert {one.body for one in again} == {b"%d" % n for n in range(6)}
            assert {one.system_properties.delivery_attempt for one in again} == {2}

    asyncio.run(main())
    lines = [line for line in running.log.read_text().splitlines() if "deliveries released" in line]
    logged = list(map(json.loads, lines))
    assert sum(line["messages"] for line in logged) == 6
    assert all(line["by"].endswith("127.0.0.1") and line["group"] == GROUP for line in logged)


def check_listed(running: Standalone, plain: list[v2.Message], pushed: list[v2.Message]) -> None:
    found = deliveries(running, GROUP)
    ids = [one.system_properties.message_id for one in (*plain, *pushed)]
    assert sorted(one["messageId"] for one in found) == sorted(ids)
    assert [one["sinceMs"] for one in found] == sorted(one["sinceMs"] for one in found)
    assert {one["untilMs"] - one["sinceMs"] for one in found if not one["renewed"]} == {HIDDEN_MS}
    of_pusher = deliveries(running, GROUP, clientId="pusher", topic=TOPIC)
    assert sorted(one["messageId"] for one in of_pusher) == sorted(ids[4:])
    assert all(one["renewed"] and one["clientId"] == "pusher" for one in of_pusher)
    assert deliveries(running, GROUP, messageId=ids[0])[0]["clientId"] == "tests"
    shown = tidemill(running, "delivery", "list", GROUP, "--client=pusher", "--limit=1")
    assert shown.stdout.splitlines()[0].split("  ")[0] == "TOPIC"
    assert "pusher" in shown.stdout
    assert "there are more than 1 messages" in shown.stderr


def check_release(running: Standalone, plain: list[v2.Message], pushed: list[v2.Message]) -> None:
    release = ("delivery", "release", GROUP)
    for wrong in ((), ("--all", f"--topic={TOPIC}")):
        assert tidemill(running, *release, *wrong, "--yes").returncode == 2
    assert "add --yes" in tidemill(running, *release, "--all").stderr
    url = f"{running.admin}/api/v1/groups/{GROUP}/deliveries:release"
    assert httpx.post(url, json={}).status_code == 400
    dry = tidemill(running, *release, "--client=pusher", "--dry-run")
    assert dry.stdout.strip() == f"2 messages of group {GROUP} would be released"
    assert len(deliveries(running, GROUP)) == len(plain) + len(pushed)
    done = tidemill(running, *release, "--client=pusher", "--yes")
    assert done.stdout.strip() == f"2 messages of group {GROUP} are released"
    assert deliveries(running, GROUP, clientId="pusher") == []
    answer = httpx.post(url, json={"all": True}).raise_for_status().json()
    assert (answer["messages"], answer["more"], answer["dryRun"]) == (4, False, False)
    assert sum(one["messages"] for one in answer["brokers"]) == 4
    assert deliveries(running, GROUP) == []


class LossyRelay:
    """A relay that can lose responses."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self.is_losing = False
        self.lost_bytes = 0
        self._writers: list[asyncio.StreamWriter] = []

    @contextlib.asynccontextmanager
    async def relaying(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self.close()

    async def _serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, forth = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [back, forth]
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(near, forth), self._copy(far, back, is_back=True))

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_back: bool = False
    ) -> None:
        while data := await source.read(CHUNK_BYTES):
            if is_back and self.is_losing:
                self.lost_bytes += len(data)
            else:
                target.write(data)
                await target.drain()

    def close(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.close()


def test_a_client_that_never_acks_stops_no_other_group(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("deliveries_max: 64\n")

    async def take_all(client: Api, group: str) -> int:
        """Receive one by one, without acks, until the broker rejects it. Return the messages."""
        request = receive_request(TOPIC, group, poll_ms=5_000, invisible_ms=HIDDEN_MS, batch_size=1)
        for count in range(200):
            call = client.stub.ReceiveMessage(request, metadata=METADATA, timeout=20)
            items = [item async for item in call]
            if not any(item.HasField("message") for item in items):
                [status] = [item.status for item in items if item.HasField("status")]
                assert status.code == v2.TOO_MANY_REQUESTS
                assert f"consumer group {group} has {count} deliveries" in status.message
                return count
        raise AssertionError("the broker rejects no receive")

    async def main(running: Standalone) -> None:
        async with api(running.grpc) as client:
            for n in range(8):
                await client.send(*[message(TOPIC, b"%d" % n) for _ in range(32)])
            assert await take_all(client, "greedy") == 64
            [one] = await client.receive(TOPIC, GROUP, poll_ms=5_000, batch_size=1)
            await client.ack(TOPIC, GROUP, [one.system_properties.receipt_handle])
            await asyncio.to_thread(
                tidemill, running, "delivery", "release", "greedy", "--all", "--yes"
            )
            assert await take_all(client, "greedy") == 32, "the other group still polls"
            assert await take_all(client, GROUP) == 32
            await asyncio.to_thread(running.delete, "groups/greedy")
            assert await take_all(client, "newcomer") == 32

    with standalone(tmp_path / "data", f"--config={settings}") as running:
        running.put(f"topics/{TOPIC}", messageType="NORMAL", queues=1)
        for group in (GROUP, "greedy", "newcomer"):
            running.put(f"groups/{group}", maxAttempts=9)
        asyncio.run(main(running))


def test_undelivered_messages_are_not_renewed(running: Standalone) -> None:
    running.put("topics/lost", messageType="NORMAL", queues=1)
    running.put("groups/losers", maxAttempts=9)

    async def main() -> None:
        lossy = LossyRelay(running.grpc)
        async with api(running.grpc) as direct, lossy.relaying() as address, api(address) as client:
            await direct.send(message("lost", b"read"))
            assert [one.body for one in await receive(client, "lost", "losers", "reader")]
            await until(
                lambda: [one["onItsWay"] for one in deliveries(running, "losers")] == [False]
            )
            await direct.send(message("lost", b"unread"))
            lossy.is_losing = True
            with contextlib.suppress(grpc.aio.AioRpcError):
                receiving = asyncio.create_task(receive(client, "lost", "losers", "reader"))
                await until(lambda: lossy.lost_bytes > 0)
                lossy.close()
                assert await receiving == []
            # The client is still up.
            await receive(direct, "lost", "losers", "reader")
            found = deliveries(running, "losers")
            assert [(one["onItsWay"], one["renewed"]) for one in found] == [
                (False, True),
                (True, True),
            ], "and the second runs out after its first minute"

    asyncio.run(main())
