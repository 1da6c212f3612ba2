"""A standalone with TLS on every connection and a renewal of its certificates under load."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.e2e.conftest import Certificates, make_certificate
from tests.support.clients.client_process import run_python_client
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, command, environment, standalone
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc

TOKEN = "correct-horse"  # of this test's own
CALL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuredStandalone:
    """A running standalone, and the folder of its certificates."""

    standalone: Standalone
    folder: Path

    @property
    def authority(self) -> str:
        return str(self.folder / "ca.crt")

    @property
    def pids(self) -> dict[str, int]:
        return {name: each.pid for name, each in self.standalone.processes.items()}

    def lines(self, event: str) -> list[dict[str, object]]:
        """Return the log lines of an event."""
        lines = map(json.loads, self.standalone.log.read_text().splitlines())
        return [line for line in lines if line["event"] == event]


@pytest.fixture(scope="module")
def secured(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[SecuredStandalone]:
    folder = tmp_path_factory.mktemp("secured")
    for name in ("ca.crt", "ca.key", "server.crt", "server.key"):
        shutil.copy(certificates.folder / name, folder)
    chain, key = folder / "server.crt", folder / "server.key"
    (folder / "token").write_text(TOKEN + "\n")
    (folder / "token").chmod(0o600)
    (folder / "tidemill.yaml").write_text(
        f"cluster_tls_ca_file: {folder / 'ca.crt'}\n"
        f"cluster_tls_certificate_file: {chain}\ncluster_tls_key_file: {key}\n"
    )
    with standalone(
        folder / "data",
        f"--config={folder / 'tidemill.yaml'}",
        "--tls=required",
        "--groups=2",
        f"--tls-certificate-file={chain}",
        f"--tls-key-file={key}",
        f"--admin-tls-certificate-file={chain}",
        f"--admin-tls-key-file={key}",
        f"--admin-token-file={folder / 'token'}",
    ) as started:
        yield SecuredStandalone(standalone=started, folder=folder)


def test_the_home_reaches_its_members_by_tls(secured: SecuredStandalone) -> None:
    eventually(lambda: secured.lines("member connected"))
    assert not secured.lines("certificate may be rejected by others")


def test_certificates_are_renewed_without_losing_a_call(
    secured: SecuredStandalone, tmp_path: Path
) -> None:
    before, is_over = secured.pids, threading.Event()

    def renew() -> None:
        while True:
            make_certificate(secured.folder, "server")
            secured.standalone.process.send_signal(signal.SIGHUP)
            if is_over.wait(0.5):  # Some renewals are enough.
                return

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        facts = run_python_client(
            tmp_path,
            "tls_round_trip",
            secured.standalone.grpc,
            topic="tls",
            group="tls",
            authority=secured.authority,
        )
    finally:
        is_over.set()
        renewing.join()
    sent = {fact["id"]: fact["sha"] for fact in facts.of("sent")}
    assert len(sent) == 100
    assert {fact["id"]: fact["sha"] for fact in facts.of("received")} == sent

    def uses() -> bool:
        reloaded = {
            (line["process"], line["use"]) for line in secured.lines("certificates reloaded")
        }
        return reloaded >= {
            ("broker-0", "cluster"),
            ("proxy-0", "clients"),
            ("proxy-0", "cluster"),
            ("admin", "admin"),
            ("admin", "cluster"),
        }

    eventually(uses)
    assert secured.pids == before
    assert not secured.lines("child died")


def test_the_admin_api_asks_for_tls_and_the_token(secured: SecuredStandalone) -> None:
    context = ssl.create_default_context(cafile=secured.authority)
    url = secured.standalone.admin
    assert url.startswith("https://")
    with httpx.Client(base_url=url, verify=context, trust_env=False, timeout=CALL_S) as client:
        assert client.get("/api/v1/topics").status_code == 401
        shown = {"Authorization": f"Bearer {TOKEN}"}
        assert client.get("/api/v1/topics", headers=shown).status_code == 200
        assert client.get("/openapi.json").status_code == 200


def test_the_command_line_shows_the_token(secured: SecuredStandalone) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        options = ("--admin", secured.standalone.admin, "--admin-ca-file", secured.authority)
        return subprocess.run(
            command("topic", "list", *options, *arguments),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    assert run("--token-file", str(secured.folder / "token")).returncode == 0
    refused = run("--token=wrong")
    assert (refused.returncode, "Unauthorized" in refused.stderr) == (1, True)


def test_the_broker_rejects_clients_without_a_certificate(
    secured: SecuredStandalone, certificates: Certificates
) -> None:
    address = str(secured.lines("broker serves")[0]["grpc"])
    authority = Path(secured.authority).read_bytes()
    chain, key = (Path(file).read_bytes() for file in certificates.client)

    async def config(credentials: grpc.ChannelCredentials | None) -> pb.ConfigUpdate:
        channel = (
            grpc.aio.secure_channel(address, credentials)
            if credentials
            else grpc.aio.insecure_channel(address)
        )
        async with channel:
            stub: broker_pb2_grpc.BrokerAdminAsyncStub = broker_pb2_grpc.BrokerAdminStub(channel)
            return await stub.GetConfig(pb.GetConfigRequest(), timeout=CALL_S)

    member = grpc.ssl_channel_credentials(authority, key, chain)
    assert asyncio.run(config(member)).broker_name
    for stranger in (None, grpc.ssl_channel_credentials(authority)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            asyncio.run(config(stranger))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_operators_see_the_days_of_all_certificates(secured: SecuredStandalone) -> None:
    options = ("--token-file", str(secured.folder / "token"), "--admin-ca-file", secured.authority)

    def document(*arguments: str) -> dict[str, Any]:
        shown = tidemill(secured.standalone, *arguments, *options, "-o", "json")
        found: dict[str, Any] = json.loads(shown.stdout)
        return found

    def soon() -> dict[str, Any]:
        problems = document("cluster", "show")["problems"]
        return {each["object"]: each for each in problems if each["code"] == "CertificateExpires"}

    # The certificates of these tests last two days.
    names = {"admin", "broker-0", "broker-1", "proxy-0"}
    eventually(lambda: soon().keys() == names)
    assert tidemill(secured.standalone, "doctor", *options).returncode == 4
    make_certificate(secured.folder, "server", days=61)
    secured.standalone.process.send_signal(signal.SIGHUP)

    def checks() -> dict[str, dict[str, Any]]:
        return {each["check"]: each for each in document("doctor")["checks"]}

    eventually(lambda: checks()["certificates"]["state"] == "ok")
    # The sampler needs some seconds for each consumer group. The disk of the test machine may be
    # nearly full.
    eventually(
        lambda: {name for name, each in checks().items() if each["state"] != "ok"} <= {"disks"}
    )
    assert checks()["certificates"]["finding"] == "the first certificate expires in 60 days"
    shown = tidemill(secured.standalone, "process", "show", "proxy-0", *options).stdout
    assert "clients 60 d 23 h, cluster 60 d 23 h" in " ".join(shown.split())
    # The overview asks the processes twice a minute.
    eventually(lambda: not soon(), within_ms=60_000)
    certificates = document("cluster", "show")["certificates"]
    assert {(each["process"], each["use"]) for each in certificates} == {
        ("admin", "admin"),
        ("admin", "cluster"),
        ("broker-0", "cluster"),
        ("broker-0", "members"),
        ("broker-1", "cluster"),
        ("broker-1", "members"),
        ("proxy-0", "clients"),
        ("proxy-0", "cluster"),
    }
    assert not [each for each in certificates if "expiresAtMs" not in each]
    assert " 60 d " in tidemill(secured.standalone, "cluster", "show", *options).stdout


def test_every_process_exports_the_expiry_of_its_certificates(secured: SecuredStandalone) -> None:
    for name, uses in {
        "broker-0": ["cluster"],
        "proxy-0": ["clients", "cluster"],
        "admin": ["admin", "cluster"],
    }.items():
        text = httpx.get(secured.standalone.processes[name].metrics, trust_env=False).text
        samples = [
            line for line in text.splitlines() if line.startswith("rocketmq_tls_certificate_")
        ]
        for use in uses:
            assert [line for line in samples if f'use="{use}"' in line], (name, use)
