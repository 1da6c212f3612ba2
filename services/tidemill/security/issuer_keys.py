"""The keys of the issuer of Kubernetes tokens, read from a file or over HTTPS (ADR 0079).

keys = IssuerKeys(KeySource("https://kubernetes.default.svc/openid/v1/jwks"), monotonic_ms)
async with keys.running():
    keys.present()                  # None: unknown
    await keys.read_for_unknown()   # a token has named another key
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final
from urllib.parse import urlsplit

import structlog
from prometheus_client.core import GaugeMetricFamily

from tidemill.common.lifecycle import StartError
from tidemill.security.json_web_keys import SET_BYTES_MAX, KeySet, parse_key_set

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.common.shared_settings import SecuritySettings

READ_PERIOD_MS: Final = 600_000
RETRY_PERIOD_MS: Final = 60_000  # after a failure
# Between two reads because of unknown keys. Strangers can name such keys without end, so this is
# also the longest time, beside one read, after which a new key of the issuer is known.
UNKNOWN_PERIOD_MS: Final = 10_000
AGE_MS_MAX: Final = 86_400_000  # of keys that cannot be read again
READ_TIMEOUT_S: Final = 10.0  # of a whole read
SOCKET_TIMEOUT_S: Final = 5.0  # of one step of it
WAITING_MAX: Final = 1_000  # calls that wait for a read, a few KB each; a further one is refused
# The API server of Kubernetes knows the first one alone. Source: RFC 7517.
MEDIA_TYPES: Final = "application/jwk-set+json, application/json"
TOKEN_BYTES_MAX: Final = 16 << 10  # of the token that authorizes a read

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+")

log = structlog.get_logger()


class UnreadableKeys(Exception):
    """The keys cannot be read; the message says why."""


@final
@dataclass(frozen=True, slots=True)
class KeySource:
    """Where the keys are, and how to get them."""

    location: str  # a file, or a URL that begins with https://
    ca_file: str = ""  # signers of the server's certificate; empty: those of the system
    token_file: str = ""  # a bearer token for the server; empty: none

    @property
    def is_remote(self) -> bool:
        """Whether a server has the keys."""
        return self.location.startswith("https://")


@final
class KeyReading:
    """One read in a thread. The event loop can end it."""

    def __init__(self, source: KeySource) -> None:
        self._source = source
        self._socket: socket.socket | None = None

    def read(self) -> KeySet:
        """Return the keys. Raises UnreadableKeys."""
        source = self._source
        try:
            content = self._fetch() if source.is_remote else _read_file(source.location)
            return parse_key_set(content)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UnreadableKeys(str(error) or type(error).__name__) from error

    def end(self) -> None:
        """Let a read that is too slow fail."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _fetch(self) -> bytes:
        source, url = self._source, urlsplit(self._source.location)
        assert url.hostname is not None, "the settings check the address"
        headers = {"Accept": MEDIA_TYPES, "Connection": "close"}
        if source.token_file:
            headers["Authorization"] = f"Bearer {_read_token(source.token_file)}"
        connection = http.client.HTTPSConnection(
            url.hostname,
            url.port,
            timeout=SOCKET_TIMEOUT_S,
            context=ssl.create_default_context(cafile=source.ca_file or None),
        )
        with contextlib.closing(connection):
            connection.connect()
            self._socket = connection.sock  # The connection forgets it before the body is read.
            path = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            # A redirection is not followed: it would lead the token to another server.
            if response.status != http.HTTPStatus.OK:
                raise ValueError(f"the server answered {response.status}")
            return response.read(SET_BYTES_MAX + 1)


def _read_file(file: str, bytes_max: int = SET_BYTES_MAX) -> bytes:
    with Path(file).open("rb") as opened:
        return opened.read(bytes_max + 1)


def _read_token(file: str) -> str:
    """Return the token of a file. Raises OSError; ValueError, whose text must not contain it."""
    token = _read_file(file, TOKEN_BYTES_MAX).decode("ascii", errors="replace").strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"the file {file} of oidc_token_file contains no bearer token")
    return token


@final
class KeyAges:
    """The last keys, and the times of the next reads. It has no clock and no I/O."""

    def __init__(self) -> None:
        self.keys: KeySet | None = None  # None: unknown
        self.error = ""  # of the last read
        self._read_at_ms = 0  # time of the keys
        self._failing_since_ms: int | None = None  # None: the last read was successful
        self._tried_at_ms: int | None = None
        self._for_unknown_at_ms: int | None = None
        self._is_unknown_wanted = False  # since the last read has begun

    def note_keys(self, keys: KeySet, now_ms: int) -> bool:
        """Take over keys; return whether they have changed."""
        has_changed = keys != self.keys
        self.keys, self.error, self._failing_since_ms = keys, "", None
        self._read_at_ms = self._tried_at_ms = now_ms
        return has_changed

    def note_failure(self, reason: str, now_ms: int) -> bool:
        """Keep the keys for a day; return whether they have become unknown."""
        self.error, self._tried_at_ms = reason, now_ms
        if self._failing_since_ms is None:
            self._failing_since_ms = now_ms
        if self.keys is None or now_ms - self._read_at_ms < AGE_MS_MAX:
            return False
        self.keys = None
        return True

    def failing_ms(self, now_ms: int) -> int:
        """Return the time since the first failed read; 0 after a successful one."""
        return 0 if self._failing_since_ms is None else now_ms - self._failing_since_ms

    def pause_ms(self, now_ms: int) -> int:
        """Return the time until the next read."""
        if self._tried_at_ms is None:
            return 0
        due_ms = self._tried_at_ms + (RETRY_PERIOD_MS if self.error else READ_PERIOD_MS)
        if self._is_unknown_wanted:
            last_ms = self._for_unknown_at_ms
            due_ms = min(due_ms, now_ms if last_ms is None else last_ms + UNKNOWN_PERIOD_MS)
        return max(due_ms - now_ms, 0)

    def note_unknown(self) -> bool:
        """Note that a token names an unknown key; return whether it is the first since a read."""
        is_first, self._is_unknown_wanted = not self._is_unknown_wanted, True
        return is_first

    def begin_read(self, now_ms: int) -> None:
        """Note that a read begins, for all unknown keys so far."""
        if self._is_unknown_wanted:
            self._for_unknown_at_ms, self._is_unknown_wanted = now_ms, False


@final
class IssuerKeys:
    """The keys of the issuer, kept up to date while `running`."""

    def __init__(self, source: KeySource, monotonic_ms: Callable[[], int]) -> None:
        """Check a file. Raises StartError."""
        self._source = source
        self._monotonic_ms = monotonic_ms
        self._ages = KeyAges()
        self._wanted = asyncio.Event()  # The time of the next read may have changed.
        self._ended = asyncio.Event()  # of the present or next read; a new one for each read
        self._is_reading = False
        self._waiting_count = 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="issuer-keys")
        # Called after the keys have changed or have become unknown.
        self.on_change: Callable[[], None] = lambda: None
        if not source.is_remote:
            try:
                self._ages.note_keys(KeyReading(source).read(), monotonic_ms())
            except UnreadableKeys as error:
                raise StartError(
                    f"oidc_keys {source.location!r} cannot be used: {error}"
                ) from error

    def present(self) -> KeySet | None:
        """Return the keys; None if they are unknown."""
        return self._ages.keys

    @property
    def failing_s(self) -> float:
        """The time since the first failed read; 0 after a successful one."""
        return self._ages.failing_ms(self._monotonic_ms()) / 1_000

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the keys, and again each ten minutes, until the block ends."""
        try:
            if self._ages.keys is None:
                await self._read()
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self._follow(), name="issuer keys")
                yield
                following.cancel()
        finally:
            # A read in progress goes on for at most SOCKET_TIMEOUT_S.
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def read_for_unknown(self) -> None:
        """Wait for a read if one is in progress or may begin now.

        Otherwise, a read begins UNKNOWN_PERIOD_MS after the last one for an unknown key, also
        without another call. Strangers can name unknown keys, so the number of reads does not
        depend on the number of calls.
        """
        if not self._is_reading:
            is_first = self._ages.note_unknown()
            is_due = self._ages.pause_ms(self._monotonic_ms()) == 0
            if is_first or is_due:
                self._wanted.set()
            if not is_due:
                return
        if self._waiting_count >= WAITING_MAX:
            return
        self._waiting_count += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_TIMEOUT_S):
                    await self._ended.wait()
        finally:
            self._waiting_count -= 1

    async def _follow(self) -> None:
        while True:
            self._wanted.clear()
            pause_ms = self._ages.pause_ms(self._monotonic_ms())
            if not pause_ms:
                await self._read()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_ms / 1_000):
                    await self._wanted.wait()

    async def _read(self) -> None:
        self._is_reading = True
        self._ages.begin_read(self._monotonic_ms())
        reading = KeyReading(self._source)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                keys = await loop.run_in_executor(self._threads, reading.read)
        except (UnreadableKeys, TimeoutError) as error:
            self._note_failure(str(error) or f"no answer after {READ_TIMEOUT_S:g} s")
        else:
            if self._ages.note_keys(keys, self._monotonic_ms()):
                log.info("issuer keys read", keys=len(keys))
                self.on_change()
        finally:
            reading.end()
            self._is_reading = False
            ended, self._ended = self._ended, asyncio.Event()
            ended.set()

    def _note_failure(self, reason: str) -> None:
        is_repeated = bool(self._ages.error)
        has_changed = self._ages.note_failure(reason, self._monotonic_ms())
        if not is_repeated or has_changed:
            log.error(
                "issuer keys not read",
                location=self._source.location,
                reason=reason,
                has_keys=self._ages.keys is not None,
            )
        if has_changed:
            self.on_change()


def issuer_key_metrics(keys: IssuerKeys | None) -> Iterator[Metric]:
    """Yield the time without a successful read; 0 without an issuer."""
    failing = GaugeMetricFamily(
        "rocketmq_auth_issuer_keys_stale_seconds",
        "Time since the first failed read of the keys of the issuer; 0 after a successful read.",
    )
    failing.add_metric((), 0 if keys is None else keys.failing_s)
    yield failing


def issuer_keys_of(
    settings: SecuritySettings, monotonic_ms: Callable[[], int]
) -> IssuerKeys | None:
    """Return the keys of the settings; None without an issuer. Raises StartError."""
    if not settings.oidc_issuer:
        return None
    source = KeySource(settings.oidc_keys, settings.oidc_ca_file, settings.oidc_token_file)
    return IssuerKeys(source, monotonic_ms)


@contextlib.asynccontextmanager
async def following(keys: IssuerKeys | None) -> AsyncIterator[None]:
    """Keep the keys up to date until the block ends."""
    async with contextlib.nullcontext() if keys is None else keys.running():
        yield
