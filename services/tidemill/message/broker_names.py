"""Names and addresses of broker groups: rules, and the natural order of names."""

from __future__ import annotations

import re
from typing import Final

from tidemill.common.addresses import HostPort, is_loopback
from tidemill.common.errors import BadRequest

NAME_CHARS_MAX: Final = 64  # of a broker group; every handle repeats it
# Safe in a path of the API, in a label of a metric and as the name of a folder.
NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)


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
    try:
        HostPort.parse(address)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def is_loopback_address(address: str) -> bool:
    """Return whether `address` leads each machine to itself."""
    return is_loopback(address.rpartition(":")[0])
