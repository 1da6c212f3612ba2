"""Errors that an operator sees: invalid files, too few file descriptors, misuse by clients."""

from __future__ import annotations

import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs

from tests.e2e.conftest import Certificates, ListenerFiles
from tests.support.clients.rpc_server import rpc_server
from tests.support.eventually import eventually
from tidemill.common.lifecycle import StartError, raise_file_limit
from tidemill.transport.aio.listener import FILES_RESERVED, ListenSettings, tls_context
from tidemill.transport.aio.misuse_log import MisuseLog


class Files(ListenerFiles):
    """All TLS files."""

    tls_client_ca_file: str


def all_files(certificates: Certificates) -> Files:
    return {**certificates.served, "tls_client_ca_file": certificates.authority}


def but(files: Files, name: str, path: Path) -> Files:
    """Return the files with another file for one name."""
    return cast("Files", {**files, name: str(path)})


def refusal(files: ListenerFiles | Files) -> str:
    with pytest.raises(StartError) as refused:
        tls_context(ListenSettings(host="127.0.0.1", port=0, tls="required", **files))
    return str(refused.value)


@pytest.mark.parametrize("name", ["tls_certificate_file", "tls_key_file", "tls_client_ca_file"])
def test_a_missing_or_invalid_tls_file_is_named(
    certificates: Certificates, tmp_path: Path, name: str
) -> None:
    files = all_files(certificates)
    assert f"{name} must name a file" in refusal(but(files, name, tmp_path / "none"))
    (tmp_path / "garbage").write_text("garbage")
    reason = refusal(but(files, name, tmp_path / "garbage"))
    assert f"{name} {tmp_path / 'garbage'}" in reason


def test_an_encrypted_key_is_rejected_without_a_prompt(
    certificates: Certificates, tmp_path: Path
) -> None:
    key = str(tmp_path / "encrypted.key")
    subprocess.run(
        [
            "openssl",
            "ec",
            "-aes128",
            "-passout",
            "pass:x",
            "-in",
            certificates.served["tls_key_file"],
            "-out",
            key,
        ],
        check=True,
        capture_output=True,
    )
    assert "is encrypted" in refusal({**certificates.served, "tls_key_file": key})


@pytest.fixture
def few_files() -> Iterator[int]:
    """Leave this process file descriptors for ten connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_RESERVED + 10, before[1]))
    yield 10
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_clients_do_not_get_the_last_files_of_a_process(few_files: int) -> None:
    with capture_logs() as logs, rpc_server() as running:
        clients = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(20)]
        refused = [one for one in clients if not readable_and_open(one)]
        assert len(refused) == 20 - few_files
        for one in clients:
            one.close()
    [line] = [line for line in logs if line["event"] == "fewer connections than configured"]
    assert line["connections_max"] == few_files


def readable_and_open(client: socket.socket) -> bool:
    """Return whether the server keeps a connection; it sends nothing before its client does."""
    client.settimeout(0.3)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def test_a_process_raises_its_limit_of_open_files(few_files: int) -> None:
    raise_file_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard > few_files


def test_a_tls_client_at_a_plain_port_is_logged(certificates: Certificates) -> None:
    with capture_logs() as logs, rpc_server() as running:
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            client.sendall(b"\x16\x03\x01\x02\x00\x01")
            while client.recv(1_000):
                pass
        eventually(lambda: running.server.misuse.failures["protocol_error"] == 1)
    [line] = [line for line in logs if line["event"] == "clients were refused"]
    assert line["reason"] == "the client uses TLS, which is off at this port"
    assert line["last_peer"] == "127.0.0.1"


def test_a_client_without_its_certificate_is_logged(certificates: Certificates) -> None:
    files = all_files(certificates)
    with capture_logs() as logs, rpc_server(tls="required", **files) as running:
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while client.recv(1_000):
                pass
        eventually(lambda: running.server.misuse.failures["tls_handshake"] == 1)
    assert "clients were refused" in {line["event"] for line in logs}


def test_misuse_is_logged_once_and_always_counted() -> None:
    misuse = MisuseLog()
    with capture_logs() as logs:
        for number in range(100):
            misuse.report_failure("protocol_error", peer=f"10.0.0.{number}", reason="why")
    assert [(line["count"], line["last_peer"]) for line in logs] == [(1, "10.0.0.0")]
    assert misuse.failures == {"protocol_error": 100}
