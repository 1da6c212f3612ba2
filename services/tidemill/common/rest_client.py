"""The client of the admin process's REST API, for the command line and release jobs."""

from __future__ import annotations

import base64
import contextlib
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

if TYPE_CHECKING:
    import httpx

BASE_PATH: Final = "/api/v1"
# Names of proxies that have not confirmed a change of users or rights in time.
UNCONFIRMED_HEADER: Final = "Tidemill-Unconfirmed"
PROBLEM: Final = "application/problem+json"  # the content type of each rejection by the API

Json = Any  # What json.loads returns: a foreign edge.


class RestOptionError(Exception):
    """The address or the CA file of the API cannot be used; the message says why."""


class RestUnreachable(Exception):
    """The API did not answer; the message says why."""

    def __init__(self, error: Exception, *, is_other_protocol: bool) -> None:
        super().__init__(str(error))
        self.tls_error = _find_tls_error(error)
        self.is_other_protocol = is_other_protocol  # Something listens that does not speak HTTP.


class RestProblem(NamedTuple):
    """The reason that the API gives for a rejection."""

    title: str
    detail: str


class RestRejection(Exception):
    """The API rejected a request, or the response is not from the API (`problem` is None)."""

    def __init__(
        self, text: str, status: int, reason_phrase: str, problem: RestProblem | None
    ) -> None:
        super().__init__(text)
        self.status = status
        self.reason_phrase = reason_phrase
        self.problem = problem


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestClient:
    """The REST API at one address."""

    url: str  # scheme, host and port
    user: str  # for the log of the broker
    token: str = ""
    credentials: tuple[str, str] | None = None  # user and secret; a token precedes them
    ca_file: Path | None = None  # signers of the API's certificate; default: public authorities
    is_insecure: bool = False  # accepts any certificate
    timeout_s: float
    transport: httpx.BaseTransport | None = None  # for tests
    # Called with the names of proxies that have not confirmed a change of users or rights.
    on_unconfirmed: Callable[[str], None] = lambda _names: None
    connection: httpx.Client | None = None  # for all calls; default: each call has its own

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Json = None,
        content: bytes | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        """Send one request and return the JSON of the response; None if it is empty.

        `content` is a body that is not JSON; `headers` then has its type.
        Raises RestRejection, RestUnreachable, RestOptionError.
        """
        response = self._request(method, path, body, query, headers or {}, content)
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise _rejection(response, None) from error

    def download(self, path: str) -> bytes:
        """Return the content of a file. Raises as `call`."""
        return self._request("GET", path, None, None, {}).content

    def _request(
        self,
        method: str,
        path: str,
        body: Json,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
        content: bytes | None = None,
    ) -> httpx.Response:
        with _without_command_line():
            import httpx

        with contextlib.ExitStack() as opened:
            client = self.connection or opened.enter_context(self._connect())
            try:
                response = client.request(
                    method,
                    self.at(path),
                    json=body,
                    content=content,
                    params=query,
                    headers=httpx.Headers({**self._headers(), **headers}, encoding="utf-8"),
                )
            except httpx.InvalidURL as error:
                raise RestOptionError(f"{self.url} is not an address: {error}") from error
            except httpx.HTTPError as error:
                is_other_protocol = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
                raise RestUnreachable(error, is_other_protocol=is_other_protocol) from error
        if not response.is_success:
            raise _rejection(response, _find_problem(response))
        if names := response.headers.get(UNCONFIRMED_HEADER):
            self.on_unconfirmed(names)
        return response

    @contextlib.contextmanager
    def connected(self) -> Iterator[RestClient]:
        """Yield this client with one connection for all calls, which it opens again if needed."""
        with self._connect() as connection:
            yield replace(self, connection=connection)

    def _connect(self) -> httpx.Client:
        with _without_command_line():
            import httpx

        # trust_env is off, because an HTTP proxy of the environment does not reach our network.
        return httpx.Client(
            verify=self._trust(), timeout=self.timeout_s, trust_env=False, transport=self.transport
        )

    def at(self, path: str) -> str:
        """Return the URL of a path."""
        return f"{self.url}{BASE_PATH}{path}"

    def _headers(self) -> dict[str, str]:
        headers = {"Tidemill-User": self.user}
        if self.token:
            return headers | {"Authorization": f"Bearer {self.token}"}
        if self.credentials is not None:
            encoded = base64.b64encode(":".join(self.credentials).encode()).decode()
            return headers | {"Authorization": f"Basic {encoded}"}
        return headers

    def _trust(self) -> ssl.SSLContext | bool:
        if self.is_insecure:
            return False
        if self.ca_file is None:
            # Plain HTTP needs no certificates, and reading them takes time.
            return not self.url.startswith("http://")
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise RestOptionError(f"{self.ca_file} holds no certificates: {error}") from error


@contextlib.contextmanager
def _without_command_line() -> Iterator[None]:
    """Import httpx without its command line.

    Its command line imports click, rich and pygments, which take a third of a command's time.
    """
    is_blocked = sys.modules.setdefault("httpx._main", None) is None  # type: ignore[arg-type]  # None blocks an import
    try:
        yield
    finally:
        if is_blocked:
            del sys.modules["httpx._main"]


def _rejection(response: httpx.Response, problem: RestProblem | None) -> RestRejection:
    request, status = response.request, response.status_code
    path = request.url.raw_path.decode("ascii").removeprefix(BASE_PATH)
    reason = f"{problem.title}: {problem.detail}" if problem else response.text[:200]
    text = f"{request.method} {path}: {status} {reason}"
    return RestRejection(text, status, response.reason_phrase, problem)


def _find_problem(response: httpx.Response) -> RestProblem | None:
    if not response.headers.get("content-type", "").startswith(PROBLEM):
        return None
    try:
        problem = response.json()
        return RestProblem(problem["title"], problem["detail"])
    except (ValueError, KeyError, TypeError):
        return None


def _find_tls_error(error: BaseException | None) -> ssl.SSLError | None:
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
