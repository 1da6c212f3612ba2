"""Certificates that are renewed while a server uses them."""

from __future__ import annotations

import asyncio
import functools
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.e2e.conftest import Certificates, make_certificate
from tests.support.clients.http2_peer import grpc_message
from tests.support.clients.rpc_server import RawClient, rpc_server
from tests.support.eventually import eventually
from tidemill.common.lifecycle import StartError
from tidemill.transport.aio.tls import Certificates as All
from tidemill.transport.aio.tls import (
    ReloadableCredentials,
    TlsFiles,
    client_context,
    newest_context,
    server_context,
)

DAY_S = 86_400


@pytest.fixture
def files(tmp_path: Path, certificates: Certificates) -> TlsFiles:
    """TLS files of a server, which a test may overwrite."""
    for name in ("server.crt", "server.key", "ca.crt", "ca.key"):
        shutil.copy(certificates.folder / name, tmp_path)
    return TlsFiles(certificate=str(tmp_path / "server.crt"), key=str(tmp_path / "server.key"))


def reloading(files: TlsFiles) -> ReloadableCredentials[ssl.SSLContext]:
    return ReloadableCredentials("clients", files, functools.partial(server_context, files))


def served_certificate(client: RawClient) -> bytes | None:
    assert isinstance(client.socket, ssl.SSLSocket)
    return client.socket.getpeercert(binary_form=True)


def test_a_renewed_certificate_serves_new_connections(
    tmp_path: Path, files: TlsFiles, certificates: Certificates
) -> None:
    trust = ssl.create_default_context(cafile=certificates.authority)
    tls = reloading(files)
    with (
        rpc_server(tls="required", tls_context=newest_context(tls)) as running,
        RawClient(running.port, tls=trust) as before,
    ):
        assert before.call(1) == grpc_message(b"hello")
        tls.check()
        assert not tls.results  # No file has changed.
        make_certificate(tmp_path, "server", days=30)
        tls.check()
        with RawClient(running.port, tls=trust) as after:
            assert after.call(1) == grpc_message(b"hello")
            assert served_certificate(after) != served_certificate(before)
        # Open connections stay open.
        assert before.call(3) == grpc_message(b"hello")
    assert tls.results == {"done": 1}
    assert tls.expires_at_s is not None
    assert 29 * DAY_S < tls.expires_at_s - time.time() < 31 * DAY_S


def test_a_broken_certificate_keeps_the_old_one_and_is_reported(
    tmp_path: Path, files: TlsFiles, certificates: Certificates
) -> None:
    trust = ssl.create_default_context(cafile=certificates.authority)
    tls = reloading(files)
    expires_at_s = tls.expires_at_s
    nowhere = tmp_path / "nowhere"
    nowhere.symlink_to("k" * 300)
    with rpc_server(tls="required", tls_context=newest_context(tls)) as running:
        for breaking in (
            lambda: Path(files.certificate).write_text("no certificate"),
            lambda: Path(files.key).unlink(),
            # A certificate without its new key.
            lambda: shutil.copy(certificates.folder / "client.key", files.key),
            # A name that the system does not look up, for example below a file.
            lambda: nowhere.rename(files.key),
        ):
            breaking()
            with capture_logs() as logs:
                tls.check()
            [line] = [line for line in logs if line["log_level"] == "error"]
            assert "tls_" in line["reason"]
            with RawClient(running.port, tls=trust) as client:
                assert client.call(1) == grpc_message(b"hello")
    assert tls.results == {"failed": 4}
    assert tls.expires_at_s == expires_at_s
    samples = {
        (sample.name, sample.labels.get("result")): sample.value
        for metric in All([tls]).collect()
        for sample in metric.samples
    }
    assert samples["rocketmq_tls_reloads_total", "failed"] == 4
    assert samples["rocketmq_tls_certificate_expires_at_seconds", None] == expires_at_s


def test_the_end_of_a_certificate_is_in_ms_or_unknown(files: TlsFiles) -> None:
    known, unknown = reloading(files), reloading(files)
    assert known.expires_at_s is not None
    unknown.expires_at_s = None
    found = All([known, unknown]).expiries()
    assert found == [("clients", int(known.expires_at_s) * 1_000), ("clients", None)]


def test_an_error_of_a_check_does_not_end_the_checks(files: TlsFiles) -> None:
    made: list[str] = []

    def make() -> ssl.SSLContext:
        made.append("made")
        if len(made) > 1:
            raise LookupError("nobody thought of it")
        return server_context(files)

    tls = ReloadableCredentials("clients", files, make)
    Path(files.key).write_bytes(Path(files.key).read_bytes() + b"\n")
    all_of_them = All([tls])
    with capture_logs() as logs:
        all_of_them.check()
        all_of_them.check()
    assert [line["event"] for line in logs if line["log_level"] == "error"] == [
        "certificate check failed"
    ]
    assert len(made) == 2, "the second check had nothing to do"


def test_an_expiring_certificate_is_logged_every_day(tmp_path: Path, files: TlsFiles) -> None:
    make_certificate(tmp_path, "server", days=30)
    tls = reloading(files)
    assert tls.expires_at_s is not None
    now_s = 0.0
    watched = All([tls], now_s=lambda: now_s)

    def levels(at_s: float, act: Callable[[], None] = watched.check) -> list[tuple[str, object]]:
        nonlocal now_s
        now_s = at_s
        with capture_logs() as logs:
            act()
        return [
            (line["log_level"], line.get("days_left"))
            for line in logs
            if line["event"].startswith("certificate e")
        ]

    soon_s = tls.expires_at_s - 14 * DAY_S
    assert levels(soon_s - 1) == []
    assert levels(soon_s) == [("warning", 14)]
    assert levels(soon_s + DAY_S - 1) == []
    assert levels(soon_s + DAY_S) == [("warning", 13)]
    assert levels(soon_s + DAY_S, watched.reload) == [("warning", 13)]
    assert levels(soon_s + DAY_S + 1) == []
    assert levels(tls.expires_at_s - 1) == [("warning", 0)]
    assert levels(tls.expires_at_s) == [("error", None)]
    assert levels(tls.expires_at_s + 1) == []
    assert levels(tls.expires_at_s + DAY_S) == [("error", None)]
    assert levels(soon_s - 1, watched.reload) == []


def test_an_expired_certificate_is_logged_at_the_start(tmp_path: Path, files: TlsFiles) -> None:
    tls = reloading(files)
    watched = All([tls], now_s=lambda: (tls.expires_at_s or 0) + 1)

    async def start() -> None:
        async with watched.watching():
            pass

    with capture_logs() as logs:
        asyncio.run(start())
    [line] = logs
    assert (line["log_level"], line["use"], line["file"]) == ("error", "clients", files.certificate)


def test_removed_authorities_are_not_trusted(
    tmp_path: Path, files: TlsFiles, certificates: Certificates
) -> None:
    asked = TlsFiles(
        certificate=files.certificate, key=files.key, authorities=str(tmp_path / "ca.crt")
    )
    tls = reloading(asked)
    trust = ssl.create_default_context(cafile=certificates.authority)
    trust.load_cert_chain(*certificates.client)
    with rpc_server(tls="required", tls_context=newest_context(tls)) as running:
        with RawClient(running.port, tls=trust) as client:
            assert client.call(1) == grpc_message(b"hello")
        make_certificate(tmp_path, "other", days=2, is_authority=True)
        shutil.copy(tmp_path / "other.crt", asked.authorities)
        tls.reload()
        with RawClient(running.port, greeting=b"", tls=trust) as refused:
            refused.to_the_end()
        eventually(lambda: running.server.misuse.failures["tls_handshake"] == 1)


def test_the_expiry_of_an_expired_certificate_is_known(tmp_path: Path, files: TlsFiles) -> None:
    for command in (
        ["req", "-new", "-key", "server.key", "-subj", "/CN=localhost", "-out", "late.csr"],
        [
            "x509",
            "-req",
            "-in",
            "late.csr",
            "-signkey",
            "server.key",
            "-days",
            "-1",
            "-out",
            "server.crt",
        ],
    ):
        subprocess.run(["openssl", *command], cwd=tmp_path, check=True, capture_output=True)
    expires_at_s = reloading(files).expires_at_s
    assert expires_at_s is not None
    assert expires_at_s < time.time()


@pytest.mark.parametrize("is_server", [True, False])
def test_a_certificate_that_fails_in_a_handshake_keeps_the_old_one(
    tmp_path: Path, files: TlsFiles, *, is_server: bool
) -> None:
    make = functools.partial(server_context if is_server else client_context, files)
    tls = ReloadableCredentials("cluster", files, make, is_server=is_server)
    old, expires_at_s = tls.newest, tls.expires_at_s
    uses = ["clientAuth", "serverAuth"]
    for use in uses if is_server else uses[::-1]:  # The first certificate is for the other end.
        subprocess.run(
            [
                "openssl",
                "req",
                "-x509",
                "-key",
                "server.key",
                "-subj",
                "/CN=localhost",
                "-addext",
                f"extendedKeyUsage={use}",
                "-days",
                "9",
                "-out",
                "server.crt",
            ],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
        with capture_logs() as logs:
            tls.reload()
        if not tls.results["done"]:
            assert (tls.newest, tls.expires_at_s) == (old, expires_at_s)
            assert "does not work in a handshake" in logs[0]["reason"]
    assert tls.results == {"failed": 1, "done": 1}
    assert tls.newest is not old
    # Without an older one it is accepted.
    assert (
        ReloadableCredentials("cluster", files, make, is_server=not is_server).expires_at_s is None
    )


def test_invalid_files_prevent_the_start(tmp_path: Path) -> None:
    files = TlsFiles(certificate=str(tmp_path / "none"), key=str(tmp_path / "none"))
    with pytest.raises(StartError, match="tls_certificate_file must name a file"):
        reloading(files)


def test_every_user_of_a_certificate_is_notified_of_a_new_one(
    tmp_path: Path, files: TlsFiles
) -> None:
    """The admin process has a connection to each broker group."""
    tls = reloading(files)
    heard: list[str] = []
    for name in ("first", "second"):
        tls.on_reload.add(functools.partial(heard.append, name))
    make_certificate(tmp_path, "server", days=30)
    tls.check()
    assert sorted(heard) == ["first", "second"]
