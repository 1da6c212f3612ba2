"""Errors of calls of the Kubernetes API, with their remedies."""

from __future__ import annotations

from http import HTTPStatus

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError


def explain_failure(error: Exception) -> str:
    """Return what failed at the Kubernetes API and what to do; "" for an error of another kind."""
    if isinstance(error, ApiException):
        detail = f"{error.status} {error.reason}: {error.body or ''}".rstrip(": ")
        remedy = " Give the ServiceAccount of this pod the rights of the chart's Role" * (
            error.status == HTTPStatus.FORBIDDEN
        )
        return f"the Kubernetes API server refused a call: {detail}.{remedy}"
    if isinstance(error, HTTPError):
        return (
            f"the Kubernetes API server cannot be reached: {error}. If the namespace denies egress"
            " by default, a NetworkPolicy must permit this pod to reach the API server and DNS: set"
            " networkPolicy.egress.enabled, or apply the policy of docs/kubernetes/security.md"
        )
    return ""
