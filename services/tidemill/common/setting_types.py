"""Types of settings, with their checks."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import CliImplicitFlag, NoDecode

from tidemill.common.addresses import HostPort


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _checked_address(value: str) -> str:
    return str(HostPort.parse(value))


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


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]  # a,b or repeated flags
Addresses = Annotated[list[Address], NoDecode, BeforeValidator(_split)]
# IP addresses or networks.
Networks = Annotated[
    list[Annotated[str, AfterValidator(_checked_network)]], NoDecode, BeforeValidator(_split)
]
