"""Header blocks (RFC 7541): decode and check those of the peer, encode ours.

We send literals without indexing, so a block with constant fields is a constant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple, final

# The Rust decoder has no public name; `jh2.connection` imports it from here too.
from jh2._hazmat import Decoder, HPACKError, OversizedHeaderListError
from jh2.hpack.huffman_constants import REQUEST_CODES_LENGTH

from tidemill.transport.http2.frames import ConnectionFailure, ErrorCode
from tidemill.transport.http2.limits import Limit

Fields = dict[str, str]
DecodedFields = list[tuple[str, str, bool]]  # name, value, and whether it must never be indexed

TABLE_BYTES: Final = 4_096  # of the decoder; the default of the protocol
EMPTY_TABLE: Final = b"\x20"  # at the start of a block: sets the size of the peer's table to 0

# One-byte fields: entries 1 to 126 of the tables. A repeated block consists mostly of these.
_INDEXED: Final = re.compile(rb"[\x81-\xfe]*")
_CODE_BITS: Final = bytes(REQUEST_CODES_LENGTH[:256])  # by byte (RFC 7541 appendix B)
_SIZES_MAX: Final = 2  # per block (RFC 7541 section 4.2)
_INTEGER_BYTES_MAX: Final = 5  # a longer number would be larger than any block

# Names are lower case tokens (RFC 9113 section 8.2.1).
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+")
_CONTENT_LENGTH_DIGITS_MAX: Final = 18
_CONNECTION_FIELDS: Final = frozenset(
    {"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"}
)
_REQUEST_PSEUDO: Final = frozenset({":method", ":scheme", ":path", ":authority"})
# Names that passed the check. Clients use a few names, and a lookup is cheaper than a check.
_CACHED_MAX: Final = 1_024
_CACHED_BYTES_MAX: Final = 128
_valid_names: Final[set[str]] = set()
# The same for all names of a request, in order.
_KNOWN_NAMES_MAX: Final = 256
_NAMES_BYTES_MAX: Final = 2_048
_known_names: Final[dict[tuple[str, ...], int]] = {}  # the value is their total size
# The same for Huffman codes: paths, names and other constant strings.
_valid_codes: Final[set[bytes]] = set()
_FIELD_BYTES: Final = 32  # added per field to the size of a header list
_NAME_AND_VALUE: Final = (0, 1)  # the strings of a literal field
_VALUE: Final = (1,)  # the string of a field with an indexed name


class MalformedHeaders(Exception):
    """The fields are not a valid request or response of HTTP/2."""


@final
class HeaderDecoder:
    """The decoder of one connection; each block may change its table."""

    def __init__(self, list_bytes_max: int) -> None:
        self._decoder = Decoder(list_bytes_max)
        self._decoder.max_allowed_table_size = TABLE_BYTES

    def decode(self, block: bytes) -> DecodedFields:
        """Return (name, value, is sensitive) of each field.

        Raises ConnectionFailure, after which the table differs from that of the peer.
        """
        coded = walk(block)
        try:
            decoded: DecodedFields = self._decoder.decode(block, False)
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
    """A Huffman-coded string and its position in the block."""

    field_index: int
    part: int  # 0 for the name, 1 for the value
    code: bytes

    def check_padding(self, decoded: DecodedFields) -> None:
        """Raise ConnectionFailure unless the padding is all ones; the decoder does not check.

        The length of the padding follows from the text, because each character has a code length.
        """
        text = str(decoded[self.field_index][self.part])
        padding = 8 * len(self.code) - sum(text.encode().translate(_CODE_BITS))
        ones = (1 << max(padding, 0)) - 1
        if not 0 <= padding <= 7 or self.code[-1] & ones != ones:
            raise _compression_failure("a Huffman-coded string has wrong padding")
        if len(self.code) <= _CACHED_BYTES_MAX:
            if len(_valid_codes) >= _CACHED_MAX:
                _valid_codes.clear()  # A peer sends new strings on purpose. Those in use come back.
            _valid_codes.add(self.code)


def walk(block: bytes) -> list[CodedString]:
    """Return the Huffman-coded strings of `block` that have not been checked before.

    Raises ConnectionFailure unless every string ends within the block and table sizes come first.
    The Rust decoder reads beyond the end otherwise, which ends the thread.
    """
    coded: list[CodedString] = []
    at, end, field_index, sizes = 0, len(block), 0, 0
    skip_indexed, checked = _INDEXED.match, _valid_codes
    try:
        while True:
            run = skip_indexed(block, at)
            assert run is not None, "the pattern also matches an empty string"
            field_index += run.end() - at
            at = run.end()
            if at == end:
                return coded
            first = block[at]
            if first >= 0x80:  # An entry beyond 126, or entry 0, which the decoder rejects.
                _, at = _integer(block, at, 0x7F)
            elif 0x20 <= first < 0x40:  # A new table size.
                if field_index:
                    raise _compression_failure("a table size follows a field")
                sizes += 1
                if sizes > _SIZES_MAX:
                    raise _compression_failure("a block has more than two table sizes")
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
                        raise _compression_failure("a string ends after its block")
                    if head >= 0x80 and size and (code := block[begin:at]) not in checked:
                        coded.append(CodedString(field_index, part, code))
            field_index += 1
    except IndexError:
        raise _compression_failure("the block ends inside a field") from None


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Return the integer at `at` and its end."""
    if at >= len(block):
        raise _compression_failure("the block ends inside a field")
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in range(0, 7 * _INTEGER_BYTES_MAX, 7):
        if at >= len(block):
            raise _compression_failure("the block ends inside an integer")
        value += (block[at] & 0x7F) << shift
        at += 1
        if block[at - 1] < 0x80:
            return value, at
    raise _compression_failure("an integer is too long")


def _compression_failure(reason: str) -> ConnectionFailure:
    return ConnectionFailure(ErrorCode.COMPRESSION_ERROR, reason)


def list_bytes(decoded: DecodedFields) -> int:
    """Return the size of a header list (RFC 9113 section 6.5.2)."""
    # Joining takes a third of the time of a sum.
    return len("".join([name + value for name, value, _ in decoded])) + _FIELD_BYTES * len(decoded)


def known_request(decoded: DecodedFields) -> tuple[Fields, int] | None:
    """Return the result of `check_request` and the list size, if the names are known to be valid.

    Otherwise return None; then call `check_request`.
    """
    fields = {name: value for name, value, _ in decoded}
    names_bytes = _known_names.get(tuple(fields))
    text = "".join(fields.values())
    # If a name comes twice, one value is missing in `fields`.
    if names_bytes is None or len(fields) != len(decoded) or not text.isprintable():
        return None
    if fields.get("te", "trailers") != "trailers" or not fields[":path"]:
        return None
    return fields, names_bytes + len(text) + _FIELD_BYTES * len(decoded)


def check_request(decoded: DecodedFields) -> Fields:
    """Return the fields of a request, with the pseudo-fields first.

    The values of a repeated name are joined by commas. Raises MalformedHeaders (RFC 9113 section
    8.2 and 8.3).
    """
    fields: Fields = {}
    pseudo_count, checked = 0, _valid_names
    for name, value, _ in decoded:
        if not value.isprintable():
            raise MalformedHeaders(f"the value of {name} has control characters")
        if name in checked:
            fields[name] = value if name not in fields else f"{fields[name]},{value}"
        elif name in _REQUEST_PSEUDO:
            if name in fields or len(fields) > pseudo_count:
                raise MalformedHeaders(f"{name} is repeated or follows other fields")
            pseudo_count += 1
            fields[name] = value
        else:
            _check_name(name)
            fields[name] = value if name not in fields else f"{fields[name]},{value}"
    if fields.get("te", "trailers") != "trailers":
        raise MalformedHeaders("te must be trailers")
    if ":method" not in fields or ":scheme" not in fields or not fields.get(":path"):
        raise MalformedHeaders("a request needs :method, :scheme and :path")
    if len(fields) == len(decoded):
        _remember(tuple(fields))
    return fields


def _remember(names: tuple[str, ...]) -> None:
    """Remember the valid names of a request without repeated names."""
    names_bytes = len("".join(names))
    if names_bytes <= _NAMES_BYTES_MAX:
        if len(_known_names) >= _KNOWN_NAMES_MAX:
            _known_names.clear()
        _known_names[names] = names_bytes


def content_length(fields: Fields) -> int:
    """Return the announced content length, or -1; raise MalformedHeaders."""
    text = fields.get("content-length")
    if text is None:
        return -1
    if not (text.isdecimal() and text.isascii() and len(text) <= _CONTENT_LENGTH_DIGITS_MAX):
        raise MalformedHeaders("content-length is not one number")
    return int(text)


def check_response(decoded: Iterable[tuple[str, str, bool]]) -> Fields:
    """Return the fields of a response or of trailers with `:status`; raise MalformedHeaders."""
    fields: Fields = {}
    for name, value, _ in decoded:
        if name == ":status":
            if fields:
                raise MalformedHeaders(":status must be the first field, once")
        else:
            _check_name(name)
        fields[name] = f"{fields[name]},{value}" if name in fields else value
    return fields


def check_trailers(decoded: Iterable[tuple[str, str, bool]]) -> Fields:
    """Return the trailers of a request; raise MalformedHeaders."""
    fields: Fields = {}
    for name, value, _ in decoded:
        _check_name(name)
        fields[name] = value
    return fields


def _check_name(name: str) -> None:
    if name in _valid_names:
        return
    if _NAME.fullmatch(name) is None:
        raise MalformedHeaders("a field name is not a lower case token")
    if name in _CONNECTION_FIELDS:
        raise MalformedHeaders(f"{name} is only valid in HTTP/1.1")
    if len(name) <= _CACHED_BYTES_MAX:
        if len(_valid_names) >= _CACHED_MAX:
            _valid_names.clear()
        _valid_names.add(name)


def encode(fields: Iterable[tuple[str, str]]) -> bytes:
    """Encode fields as literals without indexing."""
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
