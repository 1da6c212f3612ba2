"""The Kubernetes API server, and the account of this process there.

In a pod, kubelet provides the address, the certificate and a token. Elsewhere, the current context
of the kubeconfig provides them, with client certificates, tokens or exec plug-ins. The client
renews tokens by itself.

The import of the official client takes about 0.2 s and 15 MiB. Processes that do not call the
Kubernetes API must not import this module.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from kubernetes.client import ApiClient, Configuration
from kubernetes.config import ConfigException, list_kube_config_contexts, load_kube_config
from kubernetes.config.incluster_config import SERVICE_HOST_ENV_NAME, InClusterConfigLoader

# The files that kubelet mounts into each pod with a service account.
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NoKubernetesAccess(Exception):
    """This process has neither a service account nor a kubeconfig."""


class KubernetesAccess(NamedTuple):
    """An API server with the credentials of this process, and its namespace."""

    configuration: Configuration
    namespace: str


def find_access(account: Path = ACCOUNT) -> KubernetesAccess:
    """Return the access of this pod, or outside of pods that of the kubeconfig.

    Raises NoKubernetesAccess.
    """
    try:
        if SERVICE_HOST_ENV_NAME in os.environ:
            return _pod_access(account)
        return _kubeconfig_access()
    except (ConfigException, OSError) as error:
        raise NoKubernetesAccess(
            f"no access to a Kubernetes API server: {error}; run in a pod with a service account,"
            " or name a kubeconfig with KUBECONFIG"
        ) from error


def open_client(access: KubernetesAccess, *, connections: int = 1) -> ApiClient:
    """Return a client that sends each request once, over at most `connections` connections.

    Callers decide about retries.
    """
    access.configuration.retries = False
    access.configuration.connection_pool_maxsize = connections
    return ApiClient(access.configuration)


def _pod_access(account: Path) -> KubernetesAccess:
    # An HTTP proxy of the environment leads to the Internet and not to the API server.
    configuration = Configuration(proxy="")
    loader = InClusterConfigLoader(str(account / "token"), str(account / "ca.crt"))
    loader.load_and_set(configuration)
    return KubernetesAccess(configuration, (account / "namespace").read_text("ascii").strip())


def _kubeconfig_access() -> KubernetesAccess:
    configuration = Configuration()
    load_kube_config(client_configuration=configuration)
    _, context = list_kube_config_contexts()
    return KubernetesAccess(configuration, context["context"].get("namespace", "default"))
