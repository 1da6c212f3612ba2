"""Certificates from files, read again when the files change (ADR 0019).

    tls = ReloadableCredentials("clients", files, functools.partial(server_context, files))
    certificates = Certificates([tls])
    async with certificates.watching(): ...     # and certificates.reload at SIGHUP
    await loop.create_server(..., ssl=newest_of(tls))

What cannot be used keeps the old ones in place, and is told by the log and a metric; so is what
expires soon. Connections that are open keep what they were opened with.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, final

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.common.file_changes import FileChanges
from tidemill.common.lifecycle import StartError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.common.shared_settings import ClusterTlsSettings

log = structlog.get_logger()

CHECK_PERIOD_S: Final = 5.0  # between two looks at the files; a look is three calls of stat
DAY_S: Final = 86_400
# Time for somebody to ask for a new one; what renews by itself has done so weeks before.
EXPIRES_SOON_S: Final = 14 * DAY_S
TOLD_AGAIN_S: Final = DAY_S  # of a certificate that expires: seen in any day's log
HANDSHAKE_TURNS_MAX: Final = 8  # of both ends; TLS 1.2 takes three
# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which the library has no name for: an expired certificate is
# asked for its date as well.
_NO_CHECK_TIME: Final = 0x200000
_PEM: Final = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Files of one end of connections, and the settings that name them."""

    certificate: str
    key: str
    authorities: str = ""  # who has signed the certificates of the other end; empty: nobody need
    certificate_setting: str = "tls_certificate_file"
    key_setting: str = "tls_key_file"
    authorities_setting: str = "tls_client_ca_file"

    @property
    def all(self) -> list[str]:
        """The names of the files."""
        return [file for file in (self.certificate, self.key, self.authorities) if file]


def cluster_files(settings: ClusterTlsSettings) -> TlsFiles | None:
    """Return the files for connections between the processes, None where there are none."""
    if not settings.cluster_tls_ca_file:
        return None
    return TlsFiles(
        certificate=settings.cluster_tls_certificate_file,
        key=settings.cluster_tls_key_file,
        authorities=settings.cluster_tls_ca_file,
        certificate_setting="cluster_tls_certificate_file",
        key_setting="cluster_tls_key_file",
        authorities_setting="cluster_tls_ca_file",
    )


@final
class ReloadableCredentials(Generic[T]):
    """What was made of some files, and is made again of the new ones."""

    def __init__(
        self, use: str, files: TlsFiles, make: Callable[[], T], *, is_server: bool = True
    ) -> None:
        """Make it; raise StartError. `use` says what it is for, in logs and metrics."""
        self.use = use
        self.file = files.certificate
        self._files = files
        self._make = make
        self._is_server = is_server
        self._changes = FileChanges(files.all)
        self.newest = make()
        self.expires_at_s: float | None = None  # Unix time; None: nobody can tell
        try:
            self.expires_at_s = _expiry(files, is_server=is_server)
        except StartError as refusal:
            # There is no older one, and it may do for others that look at less.
            log.warning("certificate may be refused by others", use=use, reason=str(refusal))
        self.results: Counter[str] = Counter()
        self.on_reload: set[Callable[[], None]] = set()  # called after each that has worked

    def check(self) -> None:
        """Reload if a file has changed since the last look."""
        if self._changes.detect():
            self.reload()

    def reload(self) -> None:
        """Make it of the files as they are now, or keep what there is."""
        try:
            newest = self._make()
            expires_at_s = _expiry(self._files, is_server=self._is_server)
        except StartError as refusal:
            self.results["failed"] += 1
            log.error(  # noqa: TRY400  # The reason says it all.
                "certificates not reloaded, the old ones stay",
                use=self.use,
                reason=str(refusal),
                expires_at_s=self.expires_at_s,
            )
            return
        self.newest, self.expires_at_s = newest, expires_at_s
        self.results["done"] += 1
        log.info("certificates reloaded", use=self.use, expires_at_s=expires_at_s)
        for tell in list(self.on_reload):
            tell()


class _Told(NamedTuple):
    """What was last said of a certificate that expires."""

    at_s: float
    reloads: int
    is_expired: bool


@final
class Certificates:
    """All certificates of a process."""

    def __init__(
        self,
        reloading: Sequence[ReloadableCredentials[Any]],
        *,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Take the certificates, and where Unix time comes from."""
        self._all = reloading
        self._now_s = now_s
        self._told: dict[str, _Told] = {}  # by use

    def reload(self) -> None:
        """Read all files again."""
        for each in self._all:
            each.reload()
            self._tell(each)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look at the files until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            self.look()
            watch = tasks.create_task(self._watch(), name="certificates") if self._all else None
            try:
                yield
            finally:
                if watch is not None:
                    watch.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            self.look()

    def look(self) -> None:
        """Reload what has changed, and say what expires."""
        for each in self._all:
            try:
                each.check()
                self._tell(each)
            except Exception:
                # What is in use goes on being used, and the process with it.
                log.exception("certificates could not be looked at", use=each.use)

    def _tell(self, each: ReloadableCredentials[Any]) -> None:
        """Log that a certificate expires soon or has expired: once a day, and after each reload."""
        now_s = self._now_s()
        if each.expires_at_s is None or each.expires_at_s - now_s > EXPIRES_SOON_S:
            return
        is_expired = each.expires_at_s <= now_s
        told = self._told.get(each.use)
        is_told = (
            told is not None
            and told.reloads == each.results.total()
            and told.is_expired == is_expired
            and 0 <= now_s - told.at_s < TOLD_AGAIN_S
        )
        if is_told:
            return
        self._told[each.use] = _Told(now_s, each.results.total(), is_expired)
        expires_at = datetime.fromtimestamp(each.expires_at_s, UTC).isoformat()
        if is_expired:
            log.error(
                "a certificate has expired, and its clients refuse it",
                use=each.use,
                file=each.file,
                expired_at=expires_at,
            )
        else:
            log.warning(
                "a certificate expires soon",
                use=each.use,
                file=each.file,
                expires_at=expires_at,
                days_left=int((each.expires_at_s - now_s) // DAY_S),
            )

    def collect(self) -> Iterator[Metric]:
        """Yield how long the certificates are good for, and what became of reloads."""
        expiry = GaugeMetricFamily(
            "rocketmq_tls_certificate_expires_at_seconds",
            "When the certificate in use expires, Unix time.",
            labels=("use",),
        )
        reloads = CounterMetricFamily(
            "rocketmq_tls_reloads_total",
            "Certificates read again; of those that failed the old one is in use.",
            labels=("use", "result"),
        )
        for each in self._all:
            if each.expires_at_s is not None:
                expiry.add_metric((each.use,), each.expires_at_s)
            for result in ("done", "failed"):
                reloads.add_metric((each.use, result), each.results[result])
        yield expiry
        yield reloads


@final
class _NewestContext(ssl.SSLContext):
    """A context that makes each connection from the newest one.

    Event loops ask a context for nothing but `wrap_bio`.
    """

    source: ReloadableCredentials[ssl.SSLContext]

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # As the library has it.
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Begin a connection."""
        return self.source.newest.wrap_bio(
            incoming, outgoing, server_side, server_hostname, session
        )


def newest_of(reloading: ReloadableCredentials[ssl.SSLContext]) -> ssl.SSLContext:
    """Return a context for whoever keeps one: its connections are made from the newest."""
    context = _NewestContext(reloading.newest.protocol)
    context.source = reloading
    return context


def server_context(files: TlsFiles, *, protocols: Sequence[str] = ("h2",)) -> ssl.SSLContext:
    """Return what a server serves TLS with; raise StartError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # HTTP/2 asks for it (RFC 9113 section 9.2)
    context.options |= ssl.OP_NO_RENEGOTIATION  # forbidden there
    context.set_alpn_protocols(list(protocols))
    _load(context, files)
    if files.authorities:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return what a client of our own servers connects with; raise StartError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    names = [(files.certificate_setting, files.certificate), (files.key_setting, files.key)]
    if files.authorities:
        names.append((files.authorities_setting, files.authorities))
    for name, file in names:
        try:
            is_file = Path(file).is_file()
        except OSError as error:  # A folder above it may not be searched, or cannot be read.
            raise StartError(f"{name} {file} cannot be looked at: {error}") from error
        if not is_file:
            raise StartError(f"{name} must name a file, not {file!r}")

    def no_password() -> str:
        # The library would ask for one at the terminal.
        raise StartError(
            f"{files.key_setting} {files.key} is encrypted; give one without a passphrase"
        )

    try:
        context.load_cert_chain(files.certificate, files.key, password=no_password)
    except (OSError, ssl.SSLError) as error:
        raise StartError(
            f"{files.certificate_setting} {files.certificate} and {files.key_setting} {files.key}"
            f" are no certificate with its key: {error}"
        ) from error
    if files.authorities:
        try:
            context.load_verify_locations(files.authorities)
        except (OSError, ssl.SSLError) as error:
            raise StartError(
                f"{files.authorities_setting} {files.authorities} holds no certificates: {error}"
            ) from error


def _expiry(files: TlsFiles, *, is_server: bool) -> float | None:
    """Try the certificate in a handshake, and return when it expires, as the other end learns it.

    The library tells the date of nothing but a peer's certificate that it has verified. Raises
    StartError when the other end refuses it for anything but its date.
    """
    ends = ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT
    try:
        certificate = _PEM.search(Path(files.certificate).read_text("latin-1"))
        if certificate is None:
            return None  # In a form of OpenSSL's own.
        own, other = (ssl.SSLContext(end) for end in (ends if is_server else ends[::-1]))
        own.load_cert_chain(files.certificate, files.key)
        own.check_hostname, other.check_hostname = False, False
        own.verify_mode, other.verify_mode = ssl.CERT_NONE, ssl.CERT_REQUIRED
        other.load_verify_locations(cadata=certificate[0])
        other.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        other.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
        if not is_server:
            # A server must show one as well; nobody looks at it.
            other.load_cert_chain(files.certificate, files.key)
        told = _handshake(own, other, is_server=is_server).getpeercert()
    except (OSError, ssl.SSLError, ValueError) as error:
        raise StartError(
            f"{files.certificate_setting} {files.certificate} does not work in a handshake: {error}"
        ) from error
    return ssl.cert_time_to_seconds(str(told["notAfter"])) if told else None


def _handshake(own: ssl.SSLContext, other: ssl.SSLContext, *, is_server: bool) -> ssl.SSLObject:
    """Let the two shake hands in memory; return the other's end."""
    to_own, to_other = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        own.wrap_bio(to_own, to_other, server_side=is_server),
        other.wrap_bio(to_other, to_own, server_side=not is_server),
    ]
    for _ in range(HANDSHAKE_TURNS_MAX):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                if end is ends[1]:
                    return end
    raise ssl.SSLError("the handshake does not end")
