"""Addresses of hosts and ports: parsing, printing, properties, and listening sockets.

An IPv6 address stands in brackets before a port, as in URLs (RFC 3986): `[::1]:8081`.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PORT_MAX: Final = 65_535  # the largest 16-bit number
HOST_CHARS_MAX: Final = 253  # of a DNS name
# A DNS label has 1 to 63 characters. Host names do not allow an underscore, but container networks
# assign names with one.
_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,63}", re.ASCII)
_AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@/\[\]]+)(:\d*)?")
_PORT: Final = re.compile(r"[0-9]{1,5}", re.ASCII)
# A name may have addresses of a kind that this machine does not use, such as `::1` of localhost.
_NOT_HERE: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host, without brackets, and a port. `str` returns `host:port` or `[IPv6]:port`."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Parse `host:port` or `[IPv6]:port`, with a port from 1 on; raise ValueError."""
        host, _, port = text.rpartition(":")
        if not host:
            raise ValueError(f"{text!r} is not an address of the form host:port")
        if not _PORT.fullmatch(port) or not 0 < int(port) <= PORT_MAX:
            raise ValueError(f"the port of {text!r} is not a number from 1 to {PORT_MAX}")
        if ":" in host and is_ip(host) and not host.startswith("["):
            raise ValueError(f"{text!r} has an IPv6 address without brackets; write [IPv6]:port")
        bare = without_brackets(host)
        if not is_ip(bare) and not _is_name(bare):
            raise ValueError(
                f"the host of {text!r} is neither an IP address nor a host name; labels have 1 to "
                f"63 letters, digits and hyphens, with a dot between them"
            )
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"{in_brackets(self.host)}:{self.port}"


def host_of_peer(peer: str) -> str:
    """Return the host of a peer of gRPC: `ipv4:10.0.0.1:5000`, or `ipv6:[::1]:5000`."""
    return without_brackets(peer.partition(":")[2].rpartition(":")[0])


def host_of_authority(authority: str) -> str:
    """Return the normalized host of a header `Host`; "" for a malformed one."""
    found = _AUTHORITY.fullmatch(authority.strip().lower())
    return found[1].strip("[]").rstrip(".") if found else ""


def normalized_hosts(hosts: Iterable[str]) -> frozenset[str]:
    """Return host names in the form of `host_of_authority`, without empty ones."""
    return frozenset([host.lower().strip("[]").rstrip(".") for host in hosts]) - {""}


def without_brackets(host: str) -> str:
    """Return `host` without the brackets of an IPv6 address."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def in_brackets(host: str) -> str:
    """Return `host` as it stands before a port or in a URL."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def unmapped(host: str) -> str:
    """Return the IPv4 address of an IPv4-mapped IPv6 address (RFC 4291), or `host`.

    A socket for both families reports IPv4 clients in this form.
    """
    return host[7:] if host.startswith("::ffff:") and "." in host else host


def is_ip(host: str) -> bool:
    """Return whether `host` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(without_brackets(host))
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether `host` leads each machine to itself."""
    name = without_brackets(host).lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return is_ip(name) and ipaddress.ip_address(name).is_loopback


def is_unspecified(host: str) -> bool:
    """Return whether `host` stands for all addresses of this machine."""
    return not host or (is_ip(host) and ipaddress.ip_address(without_brackets(host)).is_unspecified)


def bind(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Return a bound TCP socket for each address of `host`; raise OSError.

    A socket of `::` accepts IPv4 also. Port 0 picks a free port, which the sockets share.
    """
    bare = without_brackets(host)
    is_dual = ":" in bare and is_unspecified(bare)
    found = socket.getaddrinfo(bare or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    with contextlib.ExitStack() as on_error:
        for family, *_, address in found:
            one = on_error.enter_context(socket.socket(family, socket.SOCK_STREAM))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_dual)
            try:
                one.bind((address[0], port, *address[2:]))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                one.close()
                missing = error
            else:
                port = one.getsockname()[1]
                sockets.append(one)
        if missing and not sockets:
            raise missing
        on_error.pop_all()
    return sockets


def _is_name(host: str) -> bool:
    if len(host) > HOST_CHARS_MAX:
        return False
    # A dot at the end marks a complete name.
    return all(_LABEL.fullmatch(label) for label in host.removesuffix(".").split("."))
