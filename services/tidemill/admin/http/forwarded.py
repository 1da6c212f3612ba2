"""The address of a caller behind load balancers, by the header `X-Forwarded-For` (ADR 0076).

    X-Forwarded-For: 203.0.113.9, 10.0.0.7

Each balancer adds the address that it sees on the right. So only the entries of trusted balancers
are true, and the first other one from the right is the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, Final, TypeAlias

from starlette.datastructures import Headers

from tidemill.common.addresses import is_ip, unmapped, without_brackets

if TYPE_CHECKING:
    from starlette.types import Scope

HEADER: Final = "x-forwarded-for"
HOPS_MAX: Final = 16  # balancers one after the other; a longer header is not read to its begin
IpNetworks: TypeAlias = Sequence[IPv4Network | IPv6Network]


def parse_networks(texts: Sequence[str]) -> IpNetworks:
    """Return the networks of a setting, which has checked them."""
    return tuple(map(ip_network, texts))


def with_caller_address(scope: Scope, balancers: IpNetworks) -> Scope:
    """Return the request with the address of its caller instead of that of a balancer."""
    client = scope.get("client")
    if not balancers or client is None:
        return scope
    connected = unmapped(client[0])
    hops = ",".join(Headers(scope=scope).getlist(HEADER)).split(",")
    address = find_caller(connected, hops, balancers)
    return scope if address == connected else {**scope, "client": (address, 0)}


def find_caller(connected: str, hops: Sequence[str], balancers: IpNetworks) -> str:
    """Return the rightmost address that is not a balancer; a malformed hop ends the search."""
    address = connected
    for hop in reversed(hops[-HOPS_MAX:]):
        found = unmapped(without_brackets(hop.strip()).lower())
        if not _is_within(address, balancers) or not is_ip(found):
            break
        address = found
    return address


def _is_within(address: str, networks: IpNetworks) -> bool:
    if not is_ip(address):
        return False
    parsed = ip_address(address)
    return any(parsed in network for network in networks)
