"""Formats of our document, and a repair of schemathesis 4.32; it loads this by SCHEMATHESIS_HOOKS.

Each request has the credentials of the environment: malformed ones use up the failed logins of this
address, and all further requests are refused then.

The repair: it decodes each generated value of a path before it encodes it. A name such as `a%EFb`
is valid for the API, and becomes another, invalid one. Later it decodes what this function has
encoded.
"""

from __future__ import annotations

import os
from ipaddress import IPv4Network, ip_network
from typing import Any
from urllib.parse import quote

import schemathesis
from hypothesis import strategies as st
from schemathesis.specs.openapi.adapter import parameters


def _encode(value: dict[str, Any]) -> dict[str, Any]:
    try:
        return {
            name: quote(each, safe="") if isinstance(each, str) else each
            for name, each in value.items()
        }
    except UnicodeEncodeError:
        return value  # A later filter drops them.


assert callable(parameters._quote_all_safe), "schemathesis has changed: is the repair needed still?"
parameters._quote_all_safe = _encode


def _network(address: int, bits: int) -> str:
    return str(ip_network(IPv4Network((address, bits), strict=False)))


addresses = st.ip_addresses().map(str)
networks = st.builds(_network, st.integers(0, 2**32 - 1), st.integers(0, 32))
schemathesis.openapi.format("ip-address", addresses)
schemathesis.openapi.format("cidr", addresses | networks)


@schemathesis.serializer("application/x-ndjson")
def serialize_lines(_context: schemathesis.SerializationContext, value: Any) -> bytes:
    """Return the body of a batch of messages; it is a text, not a document.

    On the wire, every value is a text. One of another type becomes a body without a line, which the
    document forbids, too.
    """
    return value.encode("utf-8", "replace") if isinstance(value, str) else b"\n"


@schemathesis.hook
def before_call(
    _context: schemathesis.HookContext, case: schemathesis.Case[Any], _options: dict[str, Any]
) -> None:
    """Replace the credentials of a request by right ones, and drop its dedup key and ETag.

    The document cannot tell whether the topic of a message has deduplication, which a key needs,
    and which version a resource has.
    It cannot tell either that a `pageToken` belongs to a filter.
    """
    case.headers["Authorization"] = f"Bearer {os.environ['CONFORMANCE_TOKEN']}"
    for name in ("Idempotency-Key", "If-Match", "If-None-Match"):
        case.headers.pop(name, None)
    (case.query or {}).pop("pageToken", None)
