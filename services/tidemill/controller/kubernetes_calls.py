"""Calls of the official Kubernetes client without blocking the event loop.

Calls run in worker threads. A watch has a thread of its own, which ends with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, final

from kubernetes.client import (
    ApiException,
    AppsV1Api,
    CoordinationV1Api,
    CoreV1Api,
    CustomObjectsApi,
)
from kubernetes.watch import Watch
from urllib3.exceptions import HTTPError

from tidemill.common.kubernetes_access import KubernetesAccess, open_client

CONNECT_TIMEOUT_S: Final = 0.3
CALL_TIMEOUT_S: Final = 1.0  # of one try; the server answers in milliseconds
# A watch ends after this time, and its caller lists again.
WATCH_S: Final = 60
# An idle watch receives no bytes. If it does not end in time, its connection is dead.
WATCH_TIMEOUT_S: Final = WATCH_S + 5.0
CALLS_MAX: Final = 32  # calls at the same time; further calls wait for a thread
EVENTS_AHEAD_MAX: Final = 16  # events, of a few KB each, read before the event loop takes them

Json = dict[str, Any]
T = TypeVar("T")


@final
class KubernetesCalls:
    """Calls in one namespace, over kept connections."""

    def __init__(self, access: KubernetesAccess) -> None:
        self.namespace = access.namespace
        self._client = open_client(access, connections=CALLS_MAX + 1)  # one for the watch
        self.custom_objects = CustomObjectsApi(self._client)
        self.leases = CoordinationV1Api(self._client)
        self.stateful_sets = AppsV1Api(self._client)
        self.core = CoreV1Api(self._client)
        self._threads = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="kubernetes")

    @classmethod
    @contextlib.contextmanager
    def open(cls, access: KubernetesAccess) -> Iterator[KubernetesCalls]:
        """Yield the calls. At the end, calls in flight go on for at most CALL_TIMEOUT_S."""
        calls = cls(access)
        try:
            yield calls
        finally:
            calls._threads.shutdown(wait=False, cancel_futures=True)
            calls._client.close()

    async def call(self, method: Callable[..., T], *arguments: object, **fields: object) -> T:
        """Send one request, once. Raises ApiException, urllib3's HTTPError."""
        send = functools.partial(
            method, *arguments, **fields, _request_timeout=(CONNECT_TIMEOUT_S, CALL_TIMEOUT_S)
        )
        return await asyncio.get_running_loop().run_in_executor(self._threads, send)

    async def events(
        self, list_method: Callable[..., object], *arguments: object, version: str
    ) -> AsyncGenerator[Json, None]:
        """Yield events after a resourceVersion, until the server or the connection ends the watch.

        An event has `type` and `raw_object`.
        """
        events: asyncio.Queue[Json | None] = asyncio.Queue()  # bounded by `free`
        free = threading.Semaphore(EVENTS_AHEAD_MAX)
        loop, watch = asyncio.get_running_loop(), Watch()

        def read() -> None:
            # RuntimeError: the event loop is closed.
            with contextlib.suppress(RuntimeError):
                with contextlib.suppress(ApiException, HTTPError, ValueError):
                    for event in watch.stream(
                        list_method,
                        *arguments,
                        resource_version=version,
                        timeout_seconds=WATCH_S,
                        _request_timeout=(CONNECT_TIMEOUT_S, WATCH_TIMEOUT_S),
                    ):
                        free.acquire()
                        loop.call_soon_threadsafe(events.put_nowait, event)
                loop.call_soon_threadsafe(events.put_nowait, None)

        threading.Thread(target=read, name="kubernetes-watch", daemon=True).start()
        try:
            while (event := await events.get()) is not None:
                free.release()
                yield event
        finally:
            watch.stop()
            free.release()  # The thread may wait for it; its next look finds the watch stopped.
