"""Header blocks: decoding what a peer sends, checking it, and encoding what we send (RFC 7541).

What we send are literals that no table remembers, so a block that does not change is a constant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple, final

# The decoder in Rust has no public name of its own; `jh2.connection` uses this one too.
from jh2._hazmat import Decoder, HPACKError, OversizedHeaderListError
from jh2.hpack.huffman_constants import REQUEST_CODES_LENGTH

from tidemill.transport.http2.frames import ConnectionFailure, ErrorCode
from tidemill.transport.http2.limits import Limit

Fields = dict[str, str]
Decoded = list[tuple[str, str, bool]]  # name, value, and whether it must never be indexed

TABLE_BYTES: Final = 4_096  # of the decoder, the protocol's default
NO_TABLE: Final = b"\x20"  # at the beginning of a block: what follows needs a table of 0 bytes

# Fields of one byte: entry 1 to 126 of the tables. Most of a repeated block is such.
_INDEXED: Final = re.compile(rb"[\x81-\xfe]*")
_CODE_BITS: Final = bytes(REQUEST_CODES_LENGTH[:256])  # by byte (RFC 7541 appendix B)
_SIZES_MAX: Final = 2  # the smallest since the last block, and the last (RFC 7541 section 4.2)
_INTEGER_BYTES_MAX: Final = 5  # beyond them a number is larger than any block

# Names are lower case tokens (RFC 9113 section 8.2.1).
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+")
_CONTENT_LENGTH_DIGITS_MAX: Final = 18
_CONNECTION_FIELDS: Final = frozenset(
    {"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"}
)
_REQUEST_PSEUDO: Final = frozenset({":method", ":scheme", ":path", ":authority"})
# Names that were found to be good. Clients use the same few, and checking one costs more than
# finding it here.
_CHECKED_MAX: Final = 1_024
_CHECKED_BYTES_MAX: Final = 128
_checked: Final[set[str]] = set()
# The same for the names of a whole request, in their order.
_KNOWN_NAMES_MAX: Final = 256
_NAMES_BYTES_MAX: Final = 2_048
_known_names: Final[dict[tuple[str, ...], int]] = {}  # with their bytes together
# The same for strings in Huffman's code: paths, names, and what else does not change.
_checked_codes: Final[set[bytes]] = set()
_FIELD_BYTES: Final = 32  # that a field counts for beside its name and value
_NAME_AND_VALUE: Final = (0, 1)  # what a literal field has strings for
_VALUE: Final = (1,)  # and one whose name is in a table


class MalformedHeaders(Exception):
    """The fields are no request or response of HTTP/2; the message says why."""


@final
class HeaderDecoder:
    """Decodes the blocks of one connection, in their order: each may change the table."""

    def __init__(self, list_bytes_max: int) -> None:
        self._decoder = Decoder(list_bytes_max)
        self._decoder.max_allowed_table_size = TABLE_BYTES

    def decode(self, block: bytes) -> Decoded:
        """Return (name, value, is sensitive) of each field.

        Raises ConnectionFailure: after a failure the table is not the peer's any more.
        """
        coded = walk(block)
        try:
            decoded: Decoded = self._decoder.decode(block, False)
        except OversizedHeaderListError:
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, "the header list is too long", limit=Limit.HEADER_BYTES
            ) from None
        except HPACKError as error:
            raise ConnectionFailure(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        for string in coded:
            string.check_padding(decoded)
        return decoded


class CodedString(NamedTuple):
    """A string in Huffman's code, and what it is part of."""

    field_index: int
    part: int  # 0 for the name, 1 for the value
    code: bytes

    def check_padding(self, decoded: Decoded) -> None:
        """Raise ConnectionFailure unless the code is filled up with ones; the decoder accepts more.

        How many bits are left is known from the text: each character has its length of code.
        """
        text = str(decoded[self.field_index][self.part])
        padding = 8 * len(self.code) - sum(text.encode().translate(_CODE_BITS))
        ones = (1 << max(padding, 0)) - 1
        if not 0 <= padding <= 7 or self.code[-1] & ones != ones:
            raise _broken("a string in Huffman's code is filled up wrongly")
        if len(self.code) <= _CHECKED_BYTES_MAX:
            if len(_checked_codes) >= _CHECKED_MAX:
                _checked_codes.clear()  # Somebody makes them up; those in use come again.
            _checked_codes.add(self.code)


def walk(block: bytes) -> list[CodedString]:
    """Return the strings of `block` in Huffman's code that have not been checked before.

    Raises ConnectionFailure unless every string lies within the block, and sizes of the table come
    first: the decoder reads over the end otherwise, which it notices by ending the thread.
    """
    coded: list[CodedString] = []
    at, end, field_index, sizes = 0, len(block), 0, 0
    skip_indexed, checked = _INDEXED.match, _checked_codes
    try:
        while True:
            run = skip_indexed(block, at)
            assert run is not None, "the pattern matches nothing, too"
            field_index += run.end() - at
            at = run.end()
            if at == end:
                return coded
            first = block[at]
            if first >= 0x80:  # An entry beyond 126, or entry 0, which the decoder refuses.
                _, at = _integer(block, at, 0x7F)
            elif 0x20 <= first < 0x40:  # The table's new size.
                if field_index:
                    raise _broken("a table size comes after a field")
                sizes += 1
                if sizes > _SIZES_MAX:
                    raise _broken("a block has two table sizes at most")
                _, at = _integer(block, at, 0x1F)
                continue
            else:
                mask = 0x3F if first >= 0x40 else 0x0F
                index = first & mask
                at += 1
                if index == mask:
                    _, at = _integer(block, at - 1, mask)
                for part in _VALUE if index else _NAME_AND_VALUE:
                    head = block[at]
                    begin = at + 1
                    size = head & 0x7F
                    if size == 0x7F:
                        size, begin = _integer(block, at, 0x7F)
                    at = begin + size
                    if at > end:
                        raise _broken("a string reaches over the end of its block")
                    if head >= 0x80 and size and (code := block[begin:at]) not in checked:
                        coded.append(CodedString(field_index, part, code))
            field_index += 1
    except IndexError:
        raise _broken("the block ends in a field") from None


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Return the integer at `at`, and where it ends."""
    if at >= len(block):
        raise _broken("the block ends in a field")
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in range(0, 7 * _INTEGER_BYTES_MAX, 7):
        if at >= len(block):
            raise _broken("the block ends in an integer")
        value += (block[at] & 0x7F) << shift
        at += 1
        if block[at - 1] < 0x80:
            return value, at
    raise _broken("an integer is too long")


def _broken(reason: str) -> ConnectionFailure:
    return ConnectionFailure(ErrorCode.COMPRESSION_ERROR, reason)


def list_bytes(decoded: Decoded) -> int:
    """Return the size of a header list, as RFC 9113 section 6.5.2 counts."""
    # Joined: that takes a third of the time that adding numbers does.
    return len("".join([name + value for name, value, _ in decoded])) + _FIELD_BYTES * len(decoded)


def known_request(decoded: Decoded) -> tuple[Fields, int] | None:
    """Return what `check_request` does, and the size of the list, where the names are known.

    None: let that look at it.
    """
    fields = {name: value for name, value, _ in decoded}
    names_bytes = _known_names.get(tuple(fields))
    text = "".join(fields.values())
    # Of a name that comes twice one value would be missing.
    if names_bytes is None or len(fields) != len(decoded) or not text.isprintable():
        return None
    if fields.get("te", "trailers") != "trailers" or not fields[":path"]:
        return None
    return fields, names_bytes + len(text) + _FIELD_BYTES * len(decoded)


def check_request(decoded: Decoded) -> Fields:
    """Return the fields of a request, the pseudo-fields first.

    The values of a repeated name are joined by commas. Raises MalformedHeaders (RFC 9113
    section 8.2 and 8.3).
    """
    fields: Fields = {}
    pseudo_count, checked = 0, _checked
    for name, value, _ in decoded:
        if not value.isprintable():
            raise MalformedHeaders(f"the value of {name} has control characters")
        if name in checked:
            fields[name] = value if name not in fields else f"{fields[name]},{value}"
        elif name in _REQUEST_PSEUDO:
            if name in fields or len(fields) > pseudo_count:
                raise MalformedHeaders(f"{name} is repeated, or after other fields")
            pseudo_count += 1
            fields[name] = value
        else:
            _check_name(name)
            fields[name] = value if name not in fields else f"{fields[name]},{value}"
    if fields.get("te", "trailers") != "trailers":
        raise MalformedHeaders("te may only be trailers")
    if ":method" not in fields or ":scheme" not in fields or not fields.get(":path"):
        raise MalformedHeaders("a request has :method, :scheme and :path")
    if len(fields) == len(decoded):
        _remember(tuple(fields))
    return fields


def _remember(names: tuple[str, ...]) -> None:
    """Know the names of a request that are good, and no two of them the same."""
    names_bytes = len("".join(names))
    if names_bytes <= _NAMES_BYTES_MAX:
        if len(_known_names) >= _KNOWN_NAMES_MAX:
            _known_names.clear()
        _known_names[names] = names_bytes


def content_length(fields: Fields) -> int:
    """Return how much content is announced, -1 where nothing is; raise MalformedHeaders."""
    text = fields.get("content-length")
    if text is None:
        return -1
    if not (text.isdecimal() and text.isascii() and len(text) <= _CONTENT_LENGTH_DIGITS_MAX):
        raise MalformedHeaders("content-length is one number")
    return int(text)


def check_response(decoded: Iterable[tuple[str, str, bool]]) -> Fields:
    """Return the fields of a response or of trailers with `:status`; raise MalformedHeaders."""
    fields: Fields = {}
    for name, value, _ in decoded:
        if name == ":status":
            if fields:
                raise MalformedHeaders(":status comes first and once")
        else:
            _check_name(name)
        fields[name] = f"{fields[name]},{value}" if name in fields else value
    return fields


def check_trailers(decoded: Iterable[tuple[str, str, bool]]) -> Fields:
    """Return the fields that follow a request's data; raise MalformedHeaders."""
    fields: Fields = {}
    for name, value, _ in decoded:
        _check_name(name)
        fields[name] = value
    return fields


def _check_name(name: str) -> None:
    if name in _checked:
        return
    if _NAME.fullmatch(name) is None:
        raise MalformedHeaders("a field name is no lower case token")
    if name in _CONNECTION_FIELDS:
        raise MalformedHeaders(f"{name} belongs to HTTP/1.1")
    if len(name) <= _CHECKED_BYTES_MAX:
        if len(_checked) >= _CHECKED_MAX:
            _checked.clear()
        _checked.add(name)


def encode(fields: Iterable[tuple[str, str]]) -> bytes:
    """Encode fields as literals that are not remembered."""
    parts = []
    for name, value in fields:
        raw_name, raw_value = name.encode(), value.encode()
        parts += [b"\0", _length(len(raw_name)), raw_name, _length(len(raw_value)), raw_value]
    return b"".join(parts)


def _length(size: int) -> bytes:
    if size < 0x7F:
        return bytes((size,))
    encoded = bytearray((0x7F,))
    size -= 0x7F
    while size > 0x7F:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)
