"""A REST API whose answers a test chooses, for the command line."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple, TypeAlias

from tests.support.http_server import PatientHTTPServer
from tidemill.common.rest_client import BASE_PATH, PROBLEM


class ApiRequest(NamedTuple):
    """One request of the command line."""

    method: str
    path: str  # without the base path, with the query
    body: Any  # of NDJSON: a list with a value per line
    authorization: str


class ApiAnswer(NamedTuple):
    """The answer to a request."""

    body: Any
    status: int = 200


LOST = ApiAnswer(None, 0)  # The server closes the connection instead.
Answer: TypeAlias = Callable[[ApiRequest], ApiAnswer]


def refusal(detail: str, status: int = 409) -> ApiAnswer:
    """Return a problem document."""
    return ApiAnswer({"title": "Conflict", "detail": detail}, status)


@contextlib.contextmanager
def scripted_api(answer: Answer) -> Iterator[str]:
    """Run the API during the block; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Do not log requests."""

        def _read(self, content: bytes) -> Any:
            if self.headers.get("content-type") == "application/x-ndjson":
                return [json.loads(line) for line in content.splitlines()]
            return json.loads(content) if content else None

        def _reply(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            request = ApiRequest(
                self.command,
                self.path.removeprefix(BASE_PATH),
                self._read(content),
                self.headers.get("authorization", ""),
            )
            found = answer(request)
            if found is LOST:
                self.close_connection = True
                return
            encoded = json.dumps(found.body).encode()
            self.send_response(found.status)
            media_type = "application/json" if found.status < 400 else PROBLEM
            self.send_header("content-type", media_type)
            self.send_header("content-length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_GET = do_PUT = do_POST = do_DELETE = _reply  # noqa: N815  # Names of the library.

    with PatientHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
