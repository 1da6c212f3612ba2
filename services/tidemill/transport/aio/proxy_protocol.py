"""The header with which a load balancer says for whom it connects: PROXY protocol, version 2.

     0              12       13       14         16
    ┌──────────────┬────────┬────────┬──────────┬───────────┬──────┐
    │ signature 12 │ 2, cmd │ family │ size u16 │ addresses │ TLVs │   big-endian
    └──────────────┴────────┴────────┴──────────┴───────────┴──────┘

    addresses   of TCP over IPv4: source 4, target 4, source port u16, target port u16
                of TCP over IPv6: source 16, target 16, the same ports

It comes before TLS. Command 0 (LOCAL) is the balancer speaking for itself, such as a health check,
and with family 0 (UNSPEC) it does not know for whom it speaks: the address of its connection counts
in both. Other families are refused; of what follows the addresses nothing is read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from typing import Final, NamedTuple

SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
HEAD: Final = struct.Struct(">12sBBH")
# What follows the head: addresses of up to 216 bytes, and a few TLVs; one with certificates in it
# is none that we have a use for.
REST_BYTES_MAX: Final = 4_096
_LOCAL, _PROXY = 0x20, 0x21  # version 2 and the command
_UNSPEC, _TCP4, _TCP6 = 0x00, 0x11, 0x21
_ADDRESSES: Final = {_TCP4: struct.Struct(">4s4sHH"), _TCP6: struct.Struct(">16s16sHH")}


class BadProxyHeader(Exception):
    """What came is no header, or no whole one."""


class ClientAddress(NamedTuple):
    """Where a connection really comes from."""

    host: str
    port: int


async def read_source(accepted: socket.socket) -> ClientAddress | None:
    """Read the header, and not a byte more; None: the connection's own address counts.

    Raises BadProxyHeader, OSError.
    """
    command, family, rest_bytes = parse_head(await _read(accepted, HEAD.size))
    rest = await _read(accepted, rest_bytes)
    return None if command == _LOCAL or family == _UNSPEC else parse_source(family, rest)


def parse_head(head: bytes) -> tuple[int, int, int]:
    """Return command, family, and how many bytes follow. Raises BadProxyHeader."""
    signature, command, family, rest_bytes = HEAD.unpack(head)
    if signature != SIGNATURE:
        raise BadProxyHeader("the connection does not begin with a header of PROXY protocol 2")
    if command not in {_LOCAL, _PROXY}:
        raise BadProxyHeader(f"version and command {command:#x} of PROXY protocol are not known")
    if rest_bytes > REST_BYTES_MAX:
        raise BadProxyHeader(
            f"{rest_bytes} bytes of a PROXY header, at most {REST_BYTES_MAX} are read"
        )
    return command, family, rest_bytes


def parse_source(family: int, rest: bytes) -> ClientAddress:
    """Return the address of the client. Raises BadProxyHeader."""
    layout = _ADDRESSES.get(family)
    if layout is None or len(rest) < layout.size:
        raise BadProxyHeader(f"{len(rest)} bytes of family {family:#x} are no address of TCP")
    source, _, port, _ = layout.unpack_from(rest)
    return ClientAddress(str(ipaddress.ip_address(source)), port)


async def _read(accepted: socket.socket, size_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    read = b""
    while len(read) < size_bytes:
        part = await loop.sock_recv(accepted, size_bytes - len(read))
        if not part:
            raise BadProxyHeader("the connection ended within its PROXY header")
        read += part
    return read
