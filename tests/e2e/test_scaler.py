"""KEDA's contract, with KEDA's requests, over two broker groups."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.e2e.conftest import Certificates
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, command, environment, standalone
from tidemill.stubs.externalscaler import externalscaler_pb2 as keda
from tidemill.stubs.externalscaler import externalscaler_pb2_grpc

CALL_S = 20.0  # A hanging broker group delays a call by the request timeout.
HOUR_MS = 3_600_000
FLAGS = ("--groups=2", "--scaler-port=0")


class ScaledGroup:
    """A consumer group under KEDA's control, and its scaler."""

    def __init__(self, running: Standalone, name: str) -> None:
        self.running = running
        self.name = name
        self.rest = httpx.Client(
            base_url=f"{running.admin}/api/v1", trust_env=False, timeout=CALL_S
        )
        self.channel = grpc.insecure_channel(running.scaler)
        self.stub = externalscaler_pb2_grpc.ExternalScalerStub(self.channel)
        for path in (f"topics/{name}", f"groups/{name}"):
            running.put(path)

    def close(self) -> None:
        self.rest.close()
        self.channel.close()

    def send(self, count: int = 1, **fields: Any) -> None:
        for _ in range(count):
            sent = self.rest.post(f"/topics/{self.name}/messages", json={"body": "work", **fields})
            assert sent.status_code == 200, sent.text

    def ref(self, **metadata: str) -> keda.ScaledObjectRef:
        given = {
            "scalerAddress": "as KEDA knows it",
            "group": self.name,
            "topic": self.name,
            "messagesPerReplica": "10",
            **metadata,
        }
        return keda.ScaledObjectRef(name="consumer", namespace="default", scalerMetadata=given)

    def value(self, **metadata: str) -> int:
        request = keda.GetMetricsRequest(
            scaledObjectRef=self.ref(**metadata), metricName="tidemill-messages"
        )
        [value] = self.stub.GetMetrics(request, timeout=CALL_S).metricValues
        assert value.metricValue == value.metricValueFloat
        return int(value.metricValue)

    def is_active(self, **metadata: str) -> bool:
        return bool(self.stub.IsActive(self.ref(**metadata), timeout=CALL_S).result)

    def refusal(self, **metadata: str) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as refused:
            self.value(**metadata)
        return refused.value.code(), refused.value.details() or ""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("scaler") / "data", *FLAGS) as started:
        yield started


@pytest.fixture
def scaled(running: Standalone, request: pytest.FixtureRequest) -> Iterator[ScaledGroup]:
    name = request.node.name.removeprefix("test_").split("[")[0][:40]
    with contextlib.closing(ScaledGroup(running, name)) as scaled:
        yield scaled


def test_a_backlog_is_the_value_at_all_broker_groups(scaled: ScaledGroup) -> None:
    assert not scaled.is_active()
    scaled.send(7)
    eventually(lambda: scaled.value() == 7)
    assert scaled.is_active()
    assert not scaled.is_active(activationMessages="7")
    [spec] = scaled.stub.GetMetricSpec(scaled.ref(), timeout=CALL_S).metricSpecs
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("tidemill-messages", 10, 10)


def test_a_wave_within_the_horizon_makes_it_active_before_it_is_due(scaled: ScaledGroup) -> None:
    scaled.send(5, delayMs=HOUR_MS)
    eventually(lambda: scaled.value(scheduledHorizonSeconds="7200") == 5)
    assert scaled.is_active(scheduledHorizonSeconds="7200")
    assert not scaled.is_active(scheduledHorizonSeconds="60")
    # No message is due yet: the whole backlog is delayed.
    hint = scaled.rest.get(
        f"/groups/{scaled.name}/scaling",
        params={"topic": scaled.name, "horizonSeconds": 7200, "messagesPerReplica": 2},
    ).json()
    assert (hint["ready"], hint["inFlight"], hint["scheduled"]) == (0, 0, 5)
    assert (hint["value"], hint["replicas"]) == (5, 3)


def test_a_scaler_stream_reports_a_wave_at_once_and_ends_with_the_process(tmp_path: Path) -> None:
    with (
        standalone(tmp_path / "data", *FLAGS) as running,
        contextlib.closing(ScaledGroup(running, "told")) as scaled,
        ThreadPoolExecutor(1) as thread,
    ):
        stream = scaled.stub.StreamIsActive(scaled.ref(), timeout=120)
        assert [next(stream).result] == [False]
        scaled.send(1, delayMs=30_000)
        assert [next(stream).result] == [True]
        rest = thread.submit(list, stream)
        assert running.stop() == 0
        assert rest.result(CALL_S) == []
        assert stream.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("metadata", "code", "reason"),
    [
        ({"mesagesPerReplica": "1"}, "INVALID_ARGUMENT", "did you mean messagesPerReplica?"),
        ({"inFlight": "perhaps"}, "INVALID_ARGUMENT", "count or ignore"),
        ({"group": "nobody"}, "NOT_FOUND", "nobody"),
        ({"topic": "nothing"}, "NOT_FOUND", "nothing"),
        ({"topic": ""}, "FAILED_PRECONDITION", "name its topic"),
    ],
)
def test_an_invalid_trigger_is_rejected_with_the_reason(
    scaled: ScaledGroup, metadata: dict[str, str], code: str, reason: str
) -> None:
    code_name, details = scaled.refusal(**metadata)
    assert code_name.name == code
    assert reason in details
    # KEDA does not show reasons. The log has one line per minute and kind with the reason.
    assert "default/consumer: " in scaled.running.log.read_text()


def test_the_cli_shows_the_value_that_keda_gets(scaled: ScaledGroup) -> None:
    scaled.send(3)
    eventually(lambda: scaled.value() == 3)
    shown = subprocess.run(
        command(
            "--admin",
            scaled.running.admin,
            "group",
            "show",
            scaled.name,
            "--scaling",
            "--topic",
            scaled.name,
            "--messages-per-replica",
            2,
        ),
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=CALL_S,
    ).stdout
    assert "KEDA gets 3: 2 consumers" in shown
    metrics = httpx.get(scaled.running.processes["admin"].metrics, trust_env=False).text
    [line] = [
        line
        for line in metrics.splitlines()
        if line.startswith("rocketmq_scaler_metric{")
        and f'consumer_group="{scaled.name}"' in line
        and 'signal="ready"' in line
    ]
    assert line.endswith(" 3.0")
    assert "rocketmq_scaler_requests_total{" in metrics


def test_the_scaler_returns_unavailable_while_a_broker_group_hangs(scaled: ScaledGroup) -> None:
    scaled.send(2)
    eventually(lambda: scaled.value() == 2)
    pid = scaled.running.processes["broker-1"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        # The last answer is valid for a short time.
        refusal = eventually(lambda: refused(scaled), within_ms=60_000)
        assert refusal is not None
        code, details = refusal
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "broker-1" in details
        with pytest.raises(grpc.RpcError) as unknown:
            scaled.is_active()
        assert unknown.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: not refused(scaled), within_ms=60_000)
    assert scaled.value() == 2


def refused(scaled: ScaledGroup) -> tuple[grpc.StatusCode, str] | None:
    """Return the error of the value's request, None on success."""
    try:
        scaled.value()
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    return None


def test_keda_shows_its_certificate_where_one_is_asked_for(
    tmp_path: Path, certificates: Certificates
) -> None:
    served = certificates.served
    files = {
        "certificate": served["tls_certificate_file"],
        "key": served["tls_key_file"],
        "client-ca": certificates.authority,
    }
    flags = [f"--scaler-tls-{name}-file={file}" for name, file in files.items()]
    with standalone(tmp_path / "data", "--scaler-port=0", *flags) as running:
        for path in ("topics/t", "groups/g"):
            running.put(path)
        ref = keda.ScaledObjectRef(
            scalerMetadata={"group": "g", "topic": "t", "messagesPerReplica": "1"}
        )
        ca, certificate, key = (
            Path(name).read_bytes() for name in (certificates.authority, *certificates.client)
        )
        for credentials, is_let_in in (
            (grpc.ssl_channel_credentials(ca, key, certificate), True),
            (grpc.ssl_channel_credentials(ca), False),
        ):
            with grpc.secure_channel(running.scaler, credentials) as channel:
                stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)
                if is_let_in:
                    assert not stub.IsActive(ref, timeout=CALL_S).result
                else:
                    with pytest.raises(grpc.RpcError) as kept_out:
                        stub.IsActive(ref, timeout=CALL_S)
                    assert kept_out.value.code() is grpc.StatusCode.UNAVAILABLE
