"""A Kubernetes API server in memory, on a loopback port: objects, versions, conflicts, watches.

It does not validate objects, and it knows each collection that a test or a client names. Versions
come from one counter, as those of etcd do.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

from kubernetes.client import Configuration

from tests.support.http_server import PatientHTTPServer
from tidemill.common.kubernetes_access import KubernetesAccess

Json = dict[str, Any]

COLLECTIONS = frozenset({"brokergroups", "leases"})  # those that clients list
LOOK_S = 0.05  # between two looks of a watch whether the server closes


class Answer(NamedTuple):
    """The answer to one call."""

    status: HTTPStatus
    body: Json


class KubernetesServer:
    """An HTTP server whose answers a subclass gives, one thread for each connection."""

    def __init__(self) -> None:
        self.url = ""
        self.is_closed = False
        self.authorizations: list[str] = []  # one for each call
        self.failure: HTTPStatus | None = None  # the answer to each call, where it is set

    def answer(self, method: str, path: str, body: Json) -> Answer | None:
        """Answer a call; None: close the connection instead."""
        raise NotImplementedError

    def follow(self, path: str, version: int) -> Iterator[Json]:
        """Yield the events of a watch."""
        raise NotImplementedError

    def access(self) -> KubernetesAccess:
        """Return the access of a client in the namespace `messages`."""
        return KubernetesAccess(Configuration(host=self.url, proxy=""), "messages")

    @contextlib.contextmanager
    def serving(self, tls: ssl.SSLContext | None = None) -> Iterator[Self]:
        """Serve on a free port until the block ends."""
        handler = type("_BoundHandler", (_Handler,), {"kubernetes": self})
        with PatientHTTPServer(("127.0.0.1", 0), handler) as server:
            server.daemon_threads = True
            server.block_on_close = False
            if tls is not None:
                server.socket = tls.wrap_socket(server.socket, server_side=True)
            thread = threading.Thread(target=server.serve_forever, args=(LOOK_S,), daemon=True)
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self
            finally:
                self.is_closed = True
                server.shutdown()
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    kubernetes: ClassVar[KubernetesServer]

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        is_watch = query.get("watch", "").lower() == "true"
        if is_watch and self.kubernetes.failure is None:
            self._stream(self.kubernetes.follow(url.path, int(query["resourceVersion"])))
        else:
            self._call()

    def do_POST(self) -> None:
        self._call()

    def do_PUT(self) -> None:
        self._call()

    def do_PATCH(self) -> None:
        self._call()

    def do_DELETE(self) -> None:
        self._call()

    def _call(self) -> None:
        self.kubernetes.authorizations.append(self.headers.get("Authorization", ""))
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else {}
        answer: Answer | None
        if self.kubernetes.failure is not None:
            answer = Answer(self.kubernetes.failure, {"message": "as the test wants it"})
        else:
            answer = self.kubernetes.answer(self.command, urlsplit(self.path).path, body)
        if answer is None:
            self.close_connection = True
            return
        content = json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, events: Iterator[Json]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            for event in events:
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))


class MemoryKubernetes(KubernetesServer):
    """An API server that holds the objects that tests and clients put there."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, Json] = {}
        self.lost_answers = 0  # writes from now on that are done and not answered
        self._version = 0
        self._events: list[tuple[str, Json]] = []  # path and event of each change
        self._changed = threading.Condition()

    def answer(self, method: str, path: str, body: Json) -> Answer | None:
        with self._changed:
            if method == "GET":
                return self._read(path)
            answer = self._write(method, path, body)
            if self.lost_answers and answer.status < HTTPStatus.BAD_REQUEST:
                self.lost_answers -= 1
                return None
            return answer

    def follow(self, path: str, version: int) -> Iterator[Json]:
        sent = 0
        while not self.is_closed:
            with self._changed:
                self._changed.wait_for(lambda: len(self._events) > sent, timeout=LOOK_S)  # noqa: B023  # called here
                events, sent = self._events[sent:], len(self._events)
            for changed_path, event in events:
                is_later = int(event["object"]["metadata"]["resourceVersion"]) > version
                if is_later and changed_path.startswith(f"{path}/"):
                    yield event

    def _read(self, path: str) -> Answer:
        if path.rpartition("/")[2] in COLLECTIONS:
            items = [one for name, one in self.objects.items() if name.startswith(f"{path}/")]
            metadata = {"resourceVersion": str(self._version)}
            return Answer(HTTPStatus.OK, {"metadata": metadata, "items": items})
        found = self.objects.get(path)
        return _missing(path) if found is None else Answer(HTTPStatus.OK, found)

    def _write(self, method: str, path: str, body: Json) -> Answer:
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return Answer(HTTPStatus.CONFLICT, {"message": "the object exists"})
            return self._store(path, body, "ADDED")
        is_status = path.endswith("/status")
        path = path.removesuffix("/status")
        found = self.objects.get(path)
        if found is None:
            return _missing(path)
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in {None, found["metadata"]["resourceVersion"]}:
            return Answer(HTTPStatus.CONFLICT, {"message": "the object has been modified"})
        if method == "PATCH":
            body = _merged(found, body)
        elif is_status:
            body = {**found, "status": body["status"]}
        return self._store(path, body, "MODIFIED")

    def _store(self, path: str, body: Json, kind: str) -> Answer:
        self._version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self._version)}
        stored = self.objects[path] = {**body, "metadata": metadata}
        self._events.append((path, {"type": kind, "object": stored}))
        self._changed.notify_all()
        return Answer(HTTPStatus.OK, stored)


def _missing(path: str) -> Answer:
    return Answer(HTTPStatus.NOT_FOUND, {"message": f"{path} not found"})


def _merged(old: Mapping[str, Any], patch: Mapping[str, Any]) -> Json:
    """Return an object with a merge patch (RFC 7386) that removes nothing."""
    merged = dict(old)
    for key, value in patch.items():
        inner = merged.get(key)
        is_nested = isinstance(value, dict) and isinstance(inner, dict)
        merged[key] = _merged(inner, value) if is_nested else value  # type: ignore[arg-type]  # checked
    return merged
