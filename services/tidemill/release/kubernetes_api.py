"""The Kubernetes API as the jobs of a release reach it, with the rights of their account."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Final

import httpx

# Where kubelet puts what a pod's account may show.
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S: Final = 10.0  # the API server answers in milliseconds, or is about to be replaced


def own_namespace(account: Path = ACCOUNT) -> str:
    """Return the namespace of this pod."""
    return (account / "namespace").read_text("ascii").strip()


def api_client(account: Path = ACCOUNT) -> httpx.Client:
    """Return a client with the rights of this pod's account."""
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    port = os.environ["KUBERNETES_SERVICE_PORT"]
    return httpx.Client(
        base_url=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        headers={"Authorization": f"Bearer {(account / 'token').read_text('ascii').strip()}"},
        verify=ssl.create_default_context(cafile=account / "ca.crt"),
        timeout=TIMEOUT_S,
        trust_env=False,
    )


def checked(response: httpx.Response) -> httpx.Response:
    """Return an answer that is none of an error; raise what the server says otherwise.

    It says which right is missing, which is what whoever reads the log needs.
    """
    if response.is_error:
        raise httpx.HTTPStatusError(
            f"{response.request.method} {response.request.url.path}: {response.status_code}"
            f" {response.text}",
            request=response.request,
            response=response,
        )
    return response
