"""Topics and consumer groups that are used, purged, deleted and created again, without end.

Each life of a topic has a number, which is in the body of each of its messages. A message of an
earlier life must never come. Neither must a timer that was cancelled.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import httpx

from tests.support.clients.api import POLL_MS_MIN, Api, api
from tests.support.clients.random_operators import RestOfOperators
from tests.support.processes.killing import RECOVERY_S
from tests.support.processes.processes import STOP_S, Standalone

KINDS = ("NORMAL", "FIFO", "DELAY")
MESSAGES = (5, 40)  # messages of a life, minimum and maximum
FILLER_BYTES = 20_000  # per message, so that segments fill within a minute
LATER_MS = 3_600_000  # delay of a timer that is fired or cancelled
RECEIVES = (0, 4)  # receives of a life
RETRY_S = 0.2
HALF = 0.5


class ShortLives:
    """The lives of one topic and its consumer group, one after the other."""

    def __init__(
        self, running: Standalone, rest: RestOfOperators, kind: str, rng: random.Random
    ) -> None:
        self.violations: list[str] = []
        self.lives = 0
        self.received = 0
        self._running = running
        self._rest = rest
        self._kind = kind
        self._name = f"short-{kind.lower()}"
        self._rng = rng
        self._cancelled: set[str] = set()

    async def run(self, stop: threading.Event) -> None:
        """Live until `stop`."""
        async with api(self._running.grpc) as client:
            while not stop.is_set():
                await self._live(client)
                self.lives += 1

    async def _live(self, client: Api) -> None:
        order = "FIFO" if self._kind == "FIFO" else "CONCURRENT"
        await self._call("PUT", f"topics/{self._name}", messageType=self._kind, queues=2)
        await self._call("PUT", f"groups/{self._name}", deliveryOrder=order)
        for number in range(self._rng.randint(*MESSAGES)):
            await self._send(f"{self.lives}/{number} ")
        for _ in range(self._rng.randint(*RECEIVES)):
            await self._receive(client)
        if self._rng.random() < HALF:
            path = f"groups/{self._name}:resetOffset"
            to = self._rng.choice(["latest", "earliest"])
            await self._call("POST", path, topic=self._name, to=to)
            await self._receive(client)
        if self._rng.random() < HALF:
            await self._call("POST", f"groups/{self._name}/deliveries:release", all=True)
        await self._call("DELETE", f"topics/{self._name}")
        if self._rng.random() < HALF:
            await self._call("DELETE", f"groups/{self._name}")

    async def _send(self, key: str) -> None:
        path = f"topics/{self._name}/messages"
        body: dict[str, Any] = {"body": key.ljust(FILLER_BYTES, ".")}
        if self._kind == "FIFO":
            body["messageGroup"] = str(self._rng.randrange(4))
        if self._kind == "DELAY":
            body["delayMs"] = LATER_MS
        sent = await self._call("POST", path, **body)
        if self._kind == "DELAY" and sent.get("timerId"):
            act = self._rng.choice(["cancel", "fire"])
            path = f"timers/{sent['timerId']}:{act}?broker={sent['broker']}"
            await self._call("POST", path)
            if act == "cancel":
                self._cancelled.add(key.strip())

    async def _receive(self, client: Api) -> None:
        try:
            found = await client.receive(self._name, self._name, poll_ms=POLL_MS_MIN)
            for one in found:
                self._check(one.body.partition(b" ")[0].decode())
            handles = [one.system_properties.receipt_handle for one in found]
            if found and self._rng.random() < HALF:
                await client.ack(self._name, self._name, handles)
        except (grpc.aio.AioRpcError, AssertionError):
            await asyncio.sleep(RETRY_S)  # A process is down. The next receive may succeed.

    def _check(self, key: str) -> None:
        self.received += 1
        if key.partition("/")[0] != str(self.lives):
            self.violations.append(f"{self._name}: {key} came in life {self.lives}")
        if key in self._cancelled:
            self.violations.append(f"{self._name}: {key} came after its timer was cancelled")

    async def _call(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        """Call until the answer is no error of the server. Other errors are refusals: return {}."""
        deadline = time.monotonic() + RECOVERY_S
        while True:
            try:
                answer = await asyncio.to_thread(self._rest.call, method, path, body)
            except httpx.TransportError:
                pass
            else:
                if not answer.is_server_error:
                    found: dict[str, Any] = (
                        answer.json() if answer.is_success and answer.content else {}
                    )
                    return found
            assert time.monotonic() < deadline, f"{method} {path} fails for {RECOVERY_S} s"
            await asyncio.sleep(RETRY_S)


@contextmanager
def short_lives(
    running: Standalone, rest: RestOfOperators, seed: int
) -> Iterator[list[ShortLives]]:
    """Let topics of all kinds live short during the block."""
    stop = threading.Event()
    lives = [ShortLives(running, rest, kind, random.Random(f"{seed}/{kind}")) for kind in KINDS]
    failures: list[BaseException] = []

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as tasks:
            for one in lives:
                tasks.create_task(one.run(stop))

    def live() -> None:
        try:
            asyncio.run(all_of_them())
        except BaseException as error:  # noqa: BLE001  # The block raises it in its own thread.
            failures.append(error)

    thread = threading.Thread(target=live, name="short lives", daemon=True)
    thread.start()
    try:
        yield lives
    finally:
        stop.set()
        thread.join(RECOVERY_S + STOP_S)
    if failures:
        raise failures[0]
