"""A second evaluator of rights, written from the rules and not from the code under test.

It reads entries as users write them, ranks each by a tuple, and looks at all of them each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address, ip_network
from typing import NamedTuple


class Line(NamedTuple):
    """An entry as users write it."""

    resource: str
    actions: tuple[str, ...]
    sources: tuple[str, ...]
    decision: str


def is_allowed(lines: Sequence[Line], *, action: str, resource: str, address: str | None) -> bool:
    """Whether the lines of a user and its roles allow one action on one resource."""
    matching = [
        line
        for line in lines
        if _rank(line.resource, resource) is not None
        and (action in line.actions or "All" in line.actions)
        and _is_from(line.sources, address)
    ]
    if not matching:
        return False
    best = max(_rank(line.resource, resource) or () for line in matching)
    decisions = {line.decision for line in matching if _rank(line.resource, resource) == best}
    return decisions == {"ALLOW"}


def _rank(pattern: str, resource: str) -> tuple[int, int, int] | None:
    """Return (type given, literal, length of the prefix); None if the pattern does not match."""
    if pattern == "*":
        return (0, 0, 0)
    pattern_type, pattern_name = pattern.split(":", 1)
    type_, name = resource.split(":", 1)
    if pattern_type != type_:
        return None
    if not pattern_name.endswith("*"):
        return (1, 1, 0) if pattern_name == name else None
    prefix = pattern_name[:-1]
    return (1, 0, len(prefix)) if name[: len(prefix)] == prefix else None


def _is_from(sources: Sequence[str], address: str | None) -> bool:
    if not sources:
        return True
    if address is None:
        return False
    found = ip_address(address)
    if isinstance(found, IPv6Address) and found.ipv4_mapped:
        found = found.ipv4_mapped
    return any(found in ip_network(source) for source in sources)
