"""Watches of the Kubernetes API give their events in order, and end with their reader."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.worlds.memory_kubernetes import MemoryKubernetes
from tidemill.controller.kubernetes_calls import EVENTS_AHEAD_MAX, KubernetesCalls

COLLECTION = ("tidemill.io", "v1", "messages", "brokergroups")
PATH = "/apis/tidemill.io/v1/namespaces/messages/brokergroups"


@pytest.fixture
def server() -> Iterator[MemoryKubernetes]:
    with MemoryKubernetes().serving() as server:
        yield server


@contextlib.asynccontextmanager
async def events_of(server: MemoryKubernetes) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    with KubernetesCalls.open(server.access()) as calls:
        events = calls.events(
            calls.custom_objects.list_namespaced_custom_object, *COLLECTION, version="0"
        )
        async with contextlib.aclosing(events):
            yield events


def create(server: MemoryKubernetes, name: str) -> None:
    server.answer("POST", PATH, {"metadata": {"name": name}})


def watch_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "kubernetes-watch"]


def test_a_watch_yields_more_events_than_the_thread_reads_ahead(server: MemoryKubernetes) -> None:
    names = [f"g{n}" for n in range(3 * EVENTS_AHEAD_MAX)]

    async def run() -> None:
        async with events_of(server) as events:
            for name in names:
                create(server, name)
            for name in names:
                event = await anext(events)
                assert event["type"] == "ADDED"
                assert event["raw_object"]["metadata"]["name"] == name

    asyncio.run(run())


def test_a_watch_ends_when_the_server_rejects_it(server: MemoryKubernetes) -> None:
    async def run() -> None:
        server.failure = HTTPStatus.GONE
        async with events_of(server) as events:
            assert [event async for event in events] == []

    asyncio.run(run())


def test_the_thread_of_a_watch_ends_when_its_reader_is_cancelled(server: MemoryKubernetes) -> None:
    first = asyncio.Event()

    async def read() -> None:
        async with events_of(server) as events:
            async for _ in events:
                first.set()

    async def run() -> None:
        create(server, "g")
        reader = asyncio.create_task(read())
        await first.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    asyncio.run(run())
    eventually(lambda: not watch_threads())
