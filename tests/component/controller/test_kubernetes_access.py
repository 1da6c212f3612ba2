"""A process finds the API server by its pod's account or a kubeconfig, and renews its token."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import ssl
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
from kubernetes.client import CoreV1Api
from kubernetes.config import incluster_config

from tests.support.worlds.memory_kubernetes import MemoryKubernetes
from tidemill.common.kubernetes_access import (
    KubernetesAccess,
    NoKubernetesAccess,
    find_access,
    open_client,
)
from tidemill.release.certificates import CertificatePlan, secrets_to_write

SECRET = "/api/v1/namespaces/messages/secrets/s"


@pytest.fixture
def server() -> Iterator[MemoryKubernetes]:
    with MemoryKubernetes().serving() as server:
        server.objects[SECRET] = {"metadata": {"name": "s"}}
        yield server


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for name, text in (("token", "first"), ("ca.crt", "a certificate"), ("namespace", "messages")):
        (tmp_path / name).write_text(text)
    return tmp_path


def read_secret(access: KubernetesAccess) -> None:
    with contextlib.closing(open_client(access)) as client:
        CoreV1Api(client).read_namespaced_secret("s", access.namespace)


def test_a_pod_has_the_address_and_namespace_of_its_account(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    access = find_access(account)
    assert access.namespace == "messages"
    assert access.configuration.host == "https://[fd00::1]:443"
    assert not access.configuration.proxy


def test_a_pod_sends_its_renewed_token_after_a_minute(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = CertificatePlan(
        authority="ca",
        certificates={"api": ("localhost",)},
        tokens={},
        key_files={},
        administrators=(),
        job_users={},
        days=1,
        authority_days=2,
    )
    files = secrets_to_write(plan, {}, dt.datetime.now(dt.UTC))["api"]
    for name, content in files.items():
        (account / name).write_bytes(content)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(account / "tls.crt", account / "tls.key")

    class LaterDatetime(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Self:
            return super().now(tz) + dt.timedelta(seconds=61)

    with MemoryKubernetes().serving(tls) as server:
        server.objects[SECRET] = {"metadata": {"name": "s"}}
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.url.rpartition(":")[2])
        access = find_access(account)
        read_secret(access)
        (account / "token").write_text("second")
        read_secret(access)
        later = SimpleNamespace(datetime=LaterDatetime, timedelta=dt.timedelta)
        monkeypatch.setattr(incluster_config, "datetime", later)
        read_secret(access)
        assert server.authorizations == ["bearer first", "bearer first", "bearer second"]


def test_a_kubeconfig_may_get_its_token_from_an_exec_plug_in(
    tmp_path: Path, server: MemoryKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in = tmp_path / "plug_in.py"
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "from-a-plug-in"},
    }
    plug_in.write_text(f"print({json.dumps(json.dumps(credential))})")
    config = tmp_path / "config"
    config.write_text(
        textwrap.dedent(f"""\
            apiVersion: v1
            kind: Config
            current-context: test
            contexts: [{{name: test, context: {{cluster: c, user: u, namespace: messages}}}}]
            clusters: [{{name: c, cluster: {{server: "{server.url}"}}}}]
            users:
            - name: u
              user:
                exec:
                  apiVersion: client.authentication.k8s.io/v1
                  command: {sys.executable}
                  args: [{plug_in}]
            """)
    )
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(config))
    access = find_access()
    assert access.namespace == "messages"
    read_secret(access)
    assert server.authorizations == ["Bearer from-a-plug-in"]


def test_missing_kubernetes_access_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none")
    )
    with pytest.raises(NoKubernetesAccess, match="name a kubeconfig with KUBECONFIG"):
        find_access()
