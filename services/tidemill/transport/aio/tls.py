"""Certificates from files, read again when the files change (ADR 0019).

    tls = ReloadableCredentials("clients", files, functools.partial(server_context, files))
    certificates = Certificates([tls])
    async with certificates.watching(): ...     # and certificates.reload at SIGHUP
    await loop.create_server(..., ssl=newest_context(tls))

If new files are invalid, the old certificate stays in use, and a log line and a metric report it.
They also report a certificate that expires soon. Open connections keep their certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
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

CHECK_PERIOD_S: Final = 5.0  # between two checks of the files; a check is three calls of stat
DAY_S: Final = 86_400
# Time for a person to get a new one. Automatic renewal happens weeks before.
EXPIRES_SOON_S: Final = 14 * DAY_S
REPORT_PERIOD_S: Final = DAY_S  # of an expiring certificate, so that every day's log has it
NAMES_MAX: Final = 64  # of a certificate that are used
HANDSHAKE_TURNS_MAX: Final = 8  # of both ends; TLS 1.2 needs three
# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which the library does not name. With it, an expired
# certificate also shows its date.
_NO_CHECK_TIME: Final = 0x200000
_PEM_CERTIFICATE: Final = re.compile(
    "-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of one end of a connection, and the settings that name them."""

    certificate: str
    key: str
    authorities: str = ""  # they sign the certificates of the other end; empty: no check
    certificate_setting: str = "tls_certificate_file"
    key_setting: str = "tls_key_file"
    authorities_setting: str = "tls_client_ca_file"

    @property
    def all(self) -> list[str]:
        """The names of the files."""
        return [file for file in (self.certificate, self.key, self.authorities) if file]


def cluster_files(settings: ClusterTlsSettings) -> TlsFiles | None:
    """Return the files for connections between processes; None if there are none."""
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
    """A value made from files, made again when they change."""

    def __init__(
        self, use: str, files: TlsFiles, make: Callable[[], T], *, is_server: bool = True
    ) -> None:
        """Make the value; raise StartError. `use` names its purpose in logs and metrics."""
        self.use = use
        self.file = files.certificate
        self._files = files
        self._make = make
        self._is_server = is_server
        self._changes = FileChanges(files.all)
        self.newest = make()
        self.expires_at_s: float | None = None  # Unix time; None: unknown
        try:
            self.expires_at_s = _expiry(files, is_server=is_server)
        except StartError as refusal:
            # There is no older value, and some clients may accept the certificate.
            log.warning("certificate may be rejected by others", use=use, reason=str(refusal))
        self.results: Counter[str] = Counter()
        self.on_reload: set[Callable[[], None]] = set()  # called after each successful reload

    def check(self) -> None:
        """Reload if a file has changed since the last check."""
        if self._changes.detect():
            self.reload()

    def reload(self) -> None:
        """Make the value from the current files; keep the old one if that fails."""
        try:
            newest = self._make()
            expires_at_s = _expiry(self._files, is_server=self._is_server)
        except StartError as refusal:
            self.results["failed"] += 1
            log.error(  # noqa: TRY400  # The reason says it all.
                "certificate reload failed",
                use=self.use,
                reason=str(refusal),
                expires_at_s=self.expires_at_s,
            )
            return
        self.newest, self.expires_at_s = newest, expires_at_s
        self.results["done"] += 1
        log.info("certificates reloaded", use=self.use, expires_at_s=expires_at_s)
        for notify in list(self.on_reload):
            notify()


class CertificateExpiry(NamedTuple):
    """The use of a certificate, and when it expires."""

    use: str
    at_ms: int | None  # Unix time; None: unknown


class _ExpiryReport(NamedTuple):
    """The last log line about an expiring certificate."""

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
        """Check `reloading`; `now_s` returns Unix time."""
        self._all = reloading
        self._now_s = now_s
        self._reports: dict[str, _ExpiryReport] = {}  # by use

    def reload(self) -> None:
        """Read all files again."""
        for each in self._all:
            each.reload()
            self._warn_of_expiry(each)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Check the files periodically until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            self.check()
            watch = tasks.create_task(self._watch(), name="certificates") if self._all else None
            try:
                yield
            finally:
                if watch is not None:
                    watch.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            self.check()

    def check(self) -> None:
        """Reload changed certificates, and log those that expire soon."""
        for each in self._all:
            try:
                each.check()
                self._warn_of_expiry(each)
            except Exception:
                # The process continues with the current certificate.
                log.exception("certificate check failed", use=each.use)

    def _warn_of_expiry(self, each: ReloadableCredentials[Any]) -> None:
        """Log once a day, and after each reload, that a certificate expires soon or has expired."""
        now_s = self._now_s()
        if each.expires_at_s is None or each.expires_at_s - now_s > EXPIRES_SOON_S:
            return
        is_expired = each.expires_at_s <= now_s
        last = self._reports.get(each.use)
        is_reported = (
            last is not None
            and last.reloads == each.results.total()
            and last.is_expired == is_expired
            and 0 <= now_s - last.at_s < REPORT_PERIOD_S
        )
        if is_reported:
            return
        self._reports[each.use] = _ExpiryReport(now_s, each.results.total(), is_expired)
        expires_at = datetime.fromtimestamp(each.expires_at_s, UTC).isoformat()
        if is_expired:
            log.error("certificate expired", use=each.use, file=each.file, expired_at=expires_at)
        else:
            log.warning(
                "certificate expires soon",
                use=each.use,
                file=each.file,
                expires_at=expires_at,
                days_left=int((each.expires_at_s - now_s) // DAY_S),
            )

    def expiries(self) -> list[CertificateExpiry]:
        """Return when each certificate expires."""
        return [
            CertificateExpiry(
                each.use, None if each.expires_at_s is None else int(each.expires_at_s * 1_000)
            )
            for each in self._all
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield the expiry of the certificates and the results of reloads."""
        expiry = GaugeMetricFamily(
            "rocketmq_tls_certificate_expires_at_seconds",
            "Unix time at which the current certificate expires.",
            labels=("use",),
        )
        reloads = CounterMetricFamily(
            "rocketmq_tls_reloads_total",
            "Reloads of certificates; after a failed one, the old certificate stays in use.",
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
    """A context that creates each connection from the newest one.

    Event loops only call `wrap_bio` of a context.
    """

    source: ReloadableCredentials[ssl.SSLContext]

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # As in the library.
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Begin a connection."""
        return self.source.newest.wrap_bio(
            incoming, outgoing, server_side, server_hostname, session
        )


def newest_context(reloading: ReloadableCredentials[ssl.SSLContext]) -> ssl.SSLContext:
    """Return a context for code that keeps one; its connections use the newest certificate."""
    context = _NewestContext(reloading.newest.protocol)
    context.source = reloading
    return context


def server_context(files: TlsFiles, *, protocols: Sequence[str] = ("h2",)) -> ssl.SSLContext:
    """Return the TLS context of a server; raise StartError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # HTTP/2 requires it (RFC 9113 section 9.2)
    context.options |= ssl.OP_NO_RENEGOTIATION  # HTTP/2 forbids it
    context.set_alpn_protocols(list(protocols))
    _load(context, files)
    if files.authorities:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context of a client of our servers; raise StartError."""
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
        except OSError as error:  # A parent folder may be unreadable.
            raise StartError(f"{name} {file} cannot be checked: {error}") from error
        if not is_file:
            raise StartError(f"{name} must name a file, not {file!r}")

    def no_password() -> str:
        # The library would ask for a password at the terminal.
        raise StartError(
            f"{files.key_setting} {files.key} is encrypted; use a key without a passphrase"
        )

    try:
        context.load_cert_chain(files.certificate, files.key, password=no_password)
    except (OSError, ssl.SSLError) as error:
        raise StartError(
            f"{files.certificate_setting} {files.certificate} and {files.key_setting} {files.key}"
            f" are not a certificate and its key: {error}"
        ) from error
    if files.authorities:
        try:
            context.load_verify_locations(files.authorities)
        except (OSError, ssl.SSLError) as error:
            raise StartError(
                f"{files.authorities_setting} {files.authorities} contains no certificates: {error}"
            ) from error


def _expiry(files: TlsFiles, *, is_server: bool) -> float | None:
    """Try the certificate in a handshake; return when it expires, as the other end sees it.

    The library returns the date only for a verified certificate of a peer. Raises StartError if the
    other end rejects the certificate for any reason except its date.
    """
    ends = ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT
    try:
        certificate = _PEM_CERTIFICATE.search(Path(files.certificate).read_text("latin-1"))
        if certificate is None:
            return None  # In OpenSSL's own format.
        own, other = (ssl.SSLContext(end) for end in (ends if is_server else ends[::-1]))
        own.load_cert_chain(files.certificate, files.key)
        own.check_hostname, other.check_hostname = False, False
        own.verify_mode, other.verify_mode = ssl.CERT_NONE, ssl.CERT_REQUIRED
        other.load_verify_locations(cadata=certificate[0])
        other.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        other.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
        if not is_server:
            # A server must present a certificate too; it is not verified.
            other.load_cert_chain(files.certificate, files.key)
        verified = _handshake(own, other, is_server=is_server).getpeercert()
    except (OSError, ssl.SSLError, ValueError) as error:
        raise StartError(
            f"{files.certificate_setting} {files.certificate} does not work in a handshake: {error}"
        ) from error
    return ssl.cert_time_to_seconds(str(verified["notAfter"])) if verified else None


def _handshake(own: ssl.SSLContext, other: ssl.SSLContext, *, is_server: bool) -> ssl.SSLObject:
    """Perform a handshake in memory; return the other end."""
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
    raise ssl.SSLError("the handshake does not complete")


def names_of(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the URI names, the DNS names and the common name of a verified certificate, in order.

    `certificate` has the form of `SSLSocket.getpeercert`, which is empty without a certificate. A
    subject with several common names has none.
    """
    if not certificate:
        return ()
    alternatives = certificate.get("subjectAltName", ())
    names = [name for kind, name in alternatives if kind == "URI"]
    names += [name for kind, name in alternatives if kind == "DNS"]
    subject = [field for fields in certificate.get("subject", ()) for field in fields]
    common = [value for kind, value in subject if kind == "commonName"]
    return tuple([*names, *common][:NAMES_MAX] if len(common) == 1 else names[:NAMES_MAX])
