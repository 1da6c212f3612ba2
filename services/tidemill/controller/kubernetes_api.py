"""The Kubernetes API server as a controller reaches it: plain HTTP, with this pod's account.

The full client library is not used: what is needed of it are two files in a pod, and four fields
of a kubeconfig, and its import costs each start more than all of the rest (ADR 0045).
"""

from __future__ import annotations

import base64
import contextlib
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import httpx
import yaml

# Where kubelet puts what a pod's account may show.
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_TIMEOUT_S: Final = 1.0  # of one try (failover.md 5); the server answers in milliseconds
CONNECT_TIMEOUT_S: Final = 0.3
WATCH_S: Final = 60  # after which a watch begins anew, from what was seen last
# Of a watch without events no byte comes: it ends by itself, or the connection is a dead one.
WATCH_TIMEOUT_S: Final = WATCH_S + 5.0

Json = dict[str, Any]


class NoAccount(Exception):
    """This process has no account at an API server."""


class Access(NamedTuple):
    """Where an API server is, and how this process shows who it is."""

    url: str
    tls: ssl.SSLContext | bool
    namespace: str
    token_file: Path | None = None  # it is renewed every hour, so it is read for each call

    @classmethod
    def of_pod(cls, account: Path = ACCOUNT) -> Access:
        """Return the access that kubelet gives this pod. Raises NoAccount."""
        try:
            host = os.environ["KUBERNETES_SERVICE_HOST"]
            port = os.environ["KUBERNETES_SERVICE_PORT"]
            return cls(
                url=f"https://{f'[{host}]' if ':' in host else host}:{port}",
                tls=ssl.create_default_context(cafile=account / "ca.crt"),
                namespace=(account / "namespace").read_text("ascii").strip(),
                token_file=account / "token",
            )
        except (KeyError, OSError) as error:
            raise NoAccount(f"this is no pod with an account of Kubernetes: {error!r}") from error

    @classmethod
    def of_kubeconfig(cls, path: Path, namespace: str) -> Access:
        """Return the access of a kubeconfig's current context, by a client certificate."""
        config = yaml.safe_load(path.read_text("utf-8"))
        context = _named(config["contexts"], config["current-context"])["context"]
        cluster = _named(config["clusters"], context["cluster"])["cluster"]
        user = _named(config["users"], context["user"])["user"]
        with tempfile.TemporaryDirectory() as folder:
            tls = ssl.create_default_context(
                cafile=_file(cluster, "certificate-authority", path, folder)
            )
            tls.load_cert_chain(
                _file(user, "client-certificate", path, folder),
                _file(user, "client-key", path, folder),
            )
        return cls(cluster["server"], tls, namespace)


@final
class KubernetesApi:
    """Calls of one namespace, over connections that are kept."""

    def __init__(self, access: Access, client: httpx.AsyncClient) -> None:
        self.namespace = access.namespace
        self._token_file = access.token_file
        self._client = client

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, access: Access, transport: httpx.AsyncBaseTransport | None = None
    ) -> AsyncIterator[KubernetesApi]:
        """Yield the calls. `transport` is for tests."""
        async with httpx.AsyncClient(
            base_url=access.url,
            verify=access.tls,
            timeout=httpx.Timeout(CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            transport=transport,
        ) as client:
            yield cls(access, client)

    async def call(
        self, method: str, path: str, body: Json | None = None, *, kind: str = "application/json"
    ) -> httpx.Response:
        """Make one call, once. Raises httpx.TransportError."""
        return await self._client.request(
            method, path, json=body, headers={"Content-Type": kind, **self._shown()}
        )

    @contextlib.asynccontextmanager
    async def watching(
        self, path: str, parameters: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """Yield the answer to a watch: a JSON object a line. Raises httpx.TransportError."""
        timeout = httpx.Timeout(WATCH_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        query = {**parameters, "watch": "true", "timeoutSeconds": str(WATCH_S)}
        async with self._client.stream(
            "GET", path, params=query, headers=self._shown(), timeout=timeout
        ) as response:
            yield response

    def _shown(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        return {"Authorization": f"Bearer {self._token_file.read_text('ascii').strip()}"}


def _named(among: list[Json], name: str) -> Json:
    [found] = [one for one in among if one["name"] == name]
    return found


def _file(of: Json, field: str, beside: Path, folder: str) -> Path:
    """Return a file of a kubeconfig, written into `folder` where it stands in the kubeconfig."""
    if field in of:
        return beside.parent / str(of[field])
    written = Path(folder) / field
    written.write_bytes(base64.b64decode(of[f"{field}-data"]))
    return written
