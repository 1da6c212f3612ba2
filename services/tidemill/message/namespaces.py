"""Namespaces of topics and consumer groups: the name NAMESPACE%NAME, as RocketMQ wraps names.

A client names a topic by its namespace and a bare name. Everything behind the proxy, and every
metric, log line and REST path, has the full name. Names without a namespace are their own full
names.

    client            full name              full name of a topic of the broker
    shop, orders      shop%orders
    shop, %DLQ%g      %DLQ%shop%g            dead letters of the consumer group shop%g
    shop, %RETRY%g+t  %RETRY%shop%g+shop%t   retries of topic shop%t for shop%g
    (none), shop%t    shop%t                 the same topic as of a client with the namespace shop
"""

from __future__ import annotations

import re
from typing import Final

from tidemill.common.errors import BadRequest
from tidemill.message import limits
from tidemill.message.resource_names import (
    NAMESPACE_SEPARATOR,
    RETRY_TOPIC_PREFIX,
    is_reserved,
    split_prefix,
)

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_\-|]+")
_RETRIED_TOPIC: Final = "+"  # separates consumer group and topic in the name of a retry topic


def check_namespace(namespace: str) -> None:
    """Raise BadRequest unless the text may be a namespace; an empty one is none."""
    limits.NAMESPACE.check_text(namespace)
    if namespace and not _NAMESPACE.fullmatch(namespace):
        raise BadRequest("a resource namespace may only contain A-Z a-z 0-9 _ - |")


def full_name(namespace: str, name: str) -> str:
    """Return the full name of a client's topic or consumer group; raise BadRequest.

    A name that has this namespace already, and a reserved name, stays as it is. The caller checks
    the full name.
    """
    if not namespace:
        return name
    check_namespace(namespace)
    if not name.strip() or is_reserved(name):
        return name
    prefix, rest = split_prefix(name)
    wrapped = [
        part
        if part.startswith(f"{namespace}{NAMESPACE_SEPARATOR}")
        else f"{namespace}{NAMESPACE_SEPARATOR}{part}"
        for part in _parts(prefix, rest)
    ]
    return prefix + _RETRIED_TOPIC.join(wrapped)


def without_namespace(namespace: str, full: str) -> str:
    """Return a full name without this namespace; a name of another namespace stays as it is."""
    if not namespace:
        return full
    prefix, rest = split_prefix(full)
    own = f"{namespace}{NAMESPACE_SEPARATOR}"
    return prefix + _RETRIED_TOPIC.join(part.removeprefix(own) for part in _parts(prefix, rest))


def namespace_of(full: str) -> str:
    """Return the namespace of a full name; empty if it has none."""
    before, separator, _ = split_prefix(full)[1].partition(NAMESPACE_SEPARATOR)
    return before if separator else ""


def _parts(prefix: str, rest: str) -> list[str]:
    return rest.split(_RETRIED_TOPIC) if prefix == RETRY_TOPIC_PREFIX else [rest]
