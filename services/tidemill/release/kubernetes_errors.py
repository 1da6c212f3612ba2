"""Errors of calls of the Kubernetes API, with their remedies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

TEXT_LENGTH_MAX: Final = 1_000  # characters of an answer that is not from an API server
TLS_STATUS: Final = 0  # the client's status of a call that ended with a TLS error
# The marks of a disruption budget in the answer to an eviction. Other answers with the status 429
# are flow control.
BUDGET_CAUSE: Final = "DisruptionBudget"
BUDGET_WORDS: Final = "disruption budget"

AGAIN: Final = "run the Helm command again"
REMEDIES: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: f"The token of this pod is not valid; {AGAIN}",
    HTTPStatus.FORBIDDEN: (
        "Give the ServiceAccount of this pod the rights of the chart's Role, or change the quota or"
        " policy that the answer names"
    ),
    HTTPStatus.NOT_FOUND: f"Another process deleted the object or its namespace; {AGAIN}",
    HTTPStatus.CONFLICT: f"Another process changed the object at the same time; {AGAIN}",
    HTTPStatus.UNPROCESSABLE_ENTITY: (
        f"Change the policy or the value that the answer names, and {AGAIN}"
    ),
}


def message_of(error: ApiException) -> str:
    """Return the API server's reason; the status text if a proxy or web page answers instead."""
    text = str(error.body or "").strip()
    message = _status_of(error).get("message")
    if message:
        return str(message)
    is_page = text.startswith(("<", "{", "["))
    return str(error.reason or error.status) if is_page or not text else text[:TEXT_LENGTH_MAX]


def is_disruption_budget(error: ApiException) -> bool:
    """Return whether a disruption budget rejects an eviction, for now."""
    if error.status != HTTPStatus.TOO_MANY_REQUESTS:
        return False
    details = _status_of(error).get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    has_cause = any(
        isinstance(one, dict) and one.get("reason") == BUDGET_CAUSE for one in causes or ()
    )
    return has_cause or BUDGET_WORDS in message_of(error)


def may_succeed_later(error: Exception) -> bool:
    """Return whether an outage or flow control of the API server caused an error."""
    if isinstance(error, ApiException):
        status = error.status or TLS_STATUS
        if status == TLS_STATUS:
            return "CERTIFICATE_VERIFY_FAILED" not in str(error.reason)
        is_flow_control = status == HTTPStatus.TOO_MANY_REQUESTS and not is_disruption_budget(error)
        return is_flow_control or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(error, HTTPError)


def explain_failure(error: Exception) -> str:
    """Return what failed at the Kubernetes API and what to do; "" for an error of another kind."""
    if isinstance(error, ApiException) and error.status:
        reason, message = str(error.reason or "").strip(), message_of(error).rstrip(".")
        detail = f"{error.status} {reason}" + (f": {message}" if message != reason else "")
        remedy = REMEDIES.get(error.status)
        return f"the Kubernetes API server refused a call: {detail}" + (
            f". {remedy}" if remedy else ""
        )
    if isinstance(error, ApiException):
        return f"the Kubernetes API server cannot be reached with TLS: {error.reason}".replace(
            "\n", " "
        )
    if isinstance(error, HTTPError):
        return (
            f"the Kubernetes API server cannot be reached: {error}. If the namespace denies egress"
            " by default, a NetworkPolicy must permit this pod to reach the API server and DNS: set"
            " networkPolicy.egress.enabled, or apply the policy of docs/kubernetes/security.md"
        )
    return ""


def _status_of(error: ApiException) -> dict[str, Any]:
    """Return the Status object of an answer; {} if the answer is not from an API server."""
    try:
        read: Any = json.loads(error.body or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
