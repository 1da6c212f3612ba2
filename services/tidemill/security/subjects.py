"""Names of security items that are about one subject: bans and quotas (ADR 0078).

The name is the kind and the value, such as `user:orders`. A value is percent-encoded, so that the
name is one segment of a path. One subject has one name, so it has at most one item of a kind.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

# The home stores names of up to 255 bytes. A client id has as many before it is encoded.
ENCODED_BYTES_MAX: Final = 200
_HASHED: Final = "sha256-"  # prefix of the hash in place of a long value
_SAFE: Final = ":@,+|=!$*;"  # besides letters, digits and `_.-~`


@lru_cache(maxsize=4_096)  # Each call of a client asks for the same name.
def subject_name(kind: str, value: str) -> str:
    """Return the name of the item about a subject. Long values have a hash in it."""
    return uncached_name(kind, value)


def uncached_name(kind: str, value: str) -> str:
    """Do as `subject_name`, for names that are asked for once."""
    encoded = quote(value, safe=_SAFE)
    if len(encoded) > ENCODED_BYTES_MAX:
        encoded = f"{_HASHED}{hashlib.sha256(value.encode()).hexdigest()}"
    return f"{kind}:{encoded}"


def subject_of(name: str) -> tuple[str, str | None]:
    """Return the kind and the value of the item about a subject. A hashed value is unknown: None.

    A value that only looks like a hash counts as one.
    """
    kind, _, encoded = name.partition(":")
    return kind, None if encoded.startswith(_HASHED) else unquote(encoded)
