"""Names and addresses of broker groups: rules, and the natural order of names."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final

from tidemill.common.errors import BadRequest

NAME_CHARS_MAX: Final = 64  # of a broker group; every handle repeats it
# Safe in a path of the API, in a label of a metric and as the name of a folder.
NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
PORT_MAX: Final = 65_535
HOST_CHARS_MAX: Final = 253  # of a DNS name
# A DNS label has 1 to 63 characters. Host names do not allow an underscore, but container networks
# assign names with one.
HOST_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,63}", re.ASCII)
PORT: Final = re.compile(r"[0-9]{1,5}", re.ASCII)


def natural_order(name: str) -> list[tuple[str, int]]:
    """Return a key by which broker-2 comes before broker-10."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def check_name(name: str) -> None:
    """Raise BadRequest unless `name` is a valid name for a broker group."""
    if len(name) > NAME_CHARS_MAX or not NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} is not a valid name of a broker group; use 1 to {NAME_CHARS_MAX}"
            f" letters, digits, dots, hyphens and underscores, without a dot in front"
        )


def check_address(address: str) -> None:
    """Raise BadRequest unless `address` is a valid address (host:port) of a broker."""
    host, _, port = address.rpartition(":")
    if not host:
        raise BadRequest(f"{address!r} is not an address of the form host:port")
    if not PORT.fullmatch(port) or not 0 < int(port) <= PORT_MAX:
        raise BadRequest(f"the port of {address!r} is not a number from 1 to {PORT_MAX}")
    if not _is_ip(host) and not _is_name(host):
        raise BadRequest(
            f"the host of {address!r} is neither an IP address nor a host name; labels have 1 to "
            f"63 letters, digits and hyphens, with a dot between them"
        )


def is_loopback(address: str) -> bool:
    """Return whether `address` leads each machine to itself."""
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
    # A dot at the end marks a complete name.
    return all(HOST_LABEL.fullmatch(label) for label in host.removesuffix(".").split("."))
