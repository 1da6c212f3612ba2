"""Types of settings, with their checks, and properties of the hosts that settings name."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import CliImplicitFlag, NoDecode


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def _checked_address(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if match is None or not 0 < int(match[2]) < 65_536:
        raise ValueError(f"{value!r} is not an address of the form host:port")
    return value


def _checked_folder(value: object) -> object:
    if value == "":
        raise ValueError("the name of the folder is empty")
    return value


Port = Annotated[int, Field(ge=0, le=65_535)]
Flag = CliImplicitFlag[bool]  # --thing and --no-thing
Address = Annotated[str, AfterValidator(_checked_address)]  # host:port, or [IPv6]:port
Folder = Annotated[Path, BeforeValidator(_checked_folder)]


def _checked_network(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"{error}; write 10.1.2.3 or 10.1.0.0/16") from None
    return value


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Return whether `host` stands for all addresses of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return not host


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]  # a,b or repeated flags
Addresses = Annotated[list[Address], NoDecode, BeforeValidator(_split)]
# IP addresses or networks.
Networks = Annotated[
    list[Annotated[str, AfterValidator(_checked_network)]], NoDecode, BeforeValidator(_split)
]
