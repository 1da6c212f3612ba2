"""What stores need of a Kubernetes API server, in memory: objects, versions, conflicts, watches.

Versions come from one counter, as etcd's do. `lose_answers` is how many writes from now on are done
and not answered.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import httpx

Json = dict[str, Any]


class MemoryKubernetes(httpx.AsyncBaseTransport):
    """An API server without validation: the kinds that it holds are those that are put there."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.lose_answers = 0
        self.fails_with: HTTPStatus | None = None
        self._version = 0
        self._changes: list[Json] = []
        self._changed = asyncio.Condition()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one call."""
        await asyncio.sleep(0)
        path, query = request.url.path, request.url.params
        if self.fails_with is not None:
            return httpx.Response(self.fails_with, text="as the test wants it")
        if request.method == "GET":
            if "watch" in query:
                lines = self._follow(path, int(query["resourceVersion"]))
                return httpx.Response(HTTPStatus.OK, stream=_Lines(lines))
            return self._read(path)
        body = json.loads(request.content)
        response = await self._write(request.method, path, body)
        if self.lose_answers and response.is_success:
            self.lose_answers -= 1
            raise httpx.ReadTimeout("the answer is lost", request=request)
        return response

    def _read(self, path: str) -> httpx.Response:
        if path.rpartition("/")[2] in {"brokergroups", "leases"}:
            items = [one for name, one in self.objects.items() if name.startswith(f"{path}/")]
            listed = {"metadata": {"resourceVersion": str(self._version)}, "items": items}
            return httpx.Response(HTTPStatus.OK, json=listed)
        found = self.objects.get(path)
        if found is None:
            return httpx.Response(HTTPStatus.NOT_FOUND, text="not found")
        return httpx.Response(HTTPStatus.OK, json=found)

    async def _write(self, method: str, path: str, body: Json) -> httpx.Response:
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return httpx.Response(HTTPStatus.CONFLICT, text="already exists")
            return await self._store(path, body, "ADDED")
        part = path.rpartition("/")[2]
        if method == "PATCH":
            there = self.objects[path]
            version = body.get("metadata", {}).get("resourceVersion")
            if version not in {None, there["metadata"]["resourceVersion"]}:
                return httpx.Response(HTTPStatus.CONFLICT, text="the object has been modified")
            return await self._store(path, _merged(there, body), "MODIFIED")
        path = path.removesuffix("/status")
        found = self.objects.get(path)
        if found is None:
            return httpx.Response(HTTPStatus.NOT_FOUND, text="not found")
        if body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return httpx.Response(HTTPStatus.CONFLICT, text="the object has been modified")
        changed = {**found, "status": body["status"]} if part == "status" else body
        return await self._store(path, changed, "MODIFIED")

    async def _store(self, path: str, body: Json, kind: str) -> httpx.Response:
        self._version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self._version)}
        one = self.objects[path] = {**body, "metadata": metadata}
        async with self._changed:
            self._changes.append({"path": path, "type": kind, "object": one})
            self._changed.notify_all()
        return httpx.Response(HTTPStatus.OK, json=one)

    async def _follow(self, path: str, version: int) -> AsyncIterator[bytes]:
        told = 0
        while True:
            async with self._changed:
                while len(self._changes) == told:
                    await self._changed.wait()
                changes, told = self._changes[told:], len(self._changes)
            for change in changes:
                is_later = int(change["object"]["metadata"]["resourceVersion"]) > version
                if is_later and change["path"].startswith(f"{path}/"):
                    yield json.dumps({"type": change["type"], "object": change["object"]}).encode()
                    yield b"\n"


def _merged(there: Json, patch: Json) -> Json:
    """Return an object with a merge patch (RFC 7386) that removes nothing."""
    merged = dict(there)
    for key, value in patch.items():
        inner = merged.get(key)
        both = isinstance(value, dict) and isinstance(inner, dict)
        merged[key] = _merged(inner, value) if both else value  # type: ignore[arg-type]  # checked
    return merged


class _Lines(httpx.AsyncByteStream):
    def __init__(self, lines: AsyncIterator[bytes]) -> None:
        self._lines = lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for line in self._lines:
            yield line
