"""The names of broker groups, in the order in which people count them, and where they serve."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final

from tidemill.common.errors import BadRequest

NAME_CHARS_MAX: Final = 64  # of a broker group: it stands in every handle
# What is safe in a path of the API, in a label of a metric and as the name of a folder.
NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
PORT_MAX: Final = 65_535
HOST_CHARS_MAX: Final = 253  # of a name in DNS
# A label of DNS has 1 to 63 characters. The underscore is in no host name by the letter, but in
# those that container networks give.
HOST_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,63}", re.ASCII)
PORT: Final = re.compile(r"[0-9]{1,5}", re.ASCII)


def natural_order(name: str) -> list[tuple[str, int]]:
    """Return a key by which broker-2 comes before broker-10."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def check_name(name: str) -> None:
    """Raise BadRequest unless this can be the name of a broker group."""
    if len(name) > NAME_CHARS_MAX or not NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} cannot be the name of a broker group: that has 1 to {NAME_CHARS_MAX}"
            f" letters, digits, dots, hyphens and underscores, and no dot in front"
        )


def check_address(address: str) -> None:
    """Raise BadRequest unless this can be the address (host:port) of a broker."""
    host, _, port = address.rpartition(":")
    if not host:
        raise BadRequest(f"{address!r} is not an address of the form host:port")
    if not PORT.fullmatch(port) or not 0 < int(port) <= PORT_MAX:
        raise BadRequest(f"the port of {address!r} is not a number from 1 to {PORT_MAX}")
    if not _is_ip(host) and not _is_name(host):
        raise BadRequest(
            f"the host of {address!r} is neither an IP address nor a name: labels of 1 to 63 "
            f"letters, digits and hyphens, with a dot between two of them"
        )


def is_loopback(address: str) -> bool:
    """Return whether this is an address that leads each machine to itself."""
    host = address.rpartition(":")[0].strip("[]").lower().removesuffix(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return _is_ip(host) and ip_address(host).is_loopback


def _is_ip(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _is_name(host: str) -> bool:
    if len(host) > HOST_CHARS_MAX:
        return False
    # A dot at the end says that the name is whole.
    return all(HOST_LABEL.fullmatch(label) for label in host.removesuffix(".").split("."))
