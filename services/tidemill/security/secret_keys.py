"""The key file, which encrypts the secrets of users in the log.

    KEYID HEX64     one line per key: its id, and 32 bytes in hexadecimal digits

The first key encrypts, all keys decrypt. A sealed secret is a nonce of 12 bytes and the result of
AES-256-GCM. Its associated data names the user, the secret and the key, so a sealed secret cannot
be moved to another user. Source: NIST SP 800-38D.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

from tidemill.security.identities import SealedSecret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_FILE: Final = "security.key"  # in the data directory of a standalone
NONCE_BYTES: Final = 12
KEY_BYTES: Final = 32
KEYS_MAX: Final = 16
CHECK_PURPOSE: Final = "tidemill/key-check/1"
CHECK_BYTES: Final = 8
FILE_BYTES_MAX: Final = 4_096
_LINE: Final = re.compile(r"([A-Za-z0-9._-]{1,32}) +([0-9A-Fa-f]{64})")


class UnknownKey(Exception):
    """A secret is encrypted under a key that the file lacks, or is damaged."""


@final
class SecretKeys:
    """The keys of a key file."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        """`keys` has the encrypting key first."""
        assert keys, "a key file has at least one key"
        self._keys = dict(keys)
        self.first = next(iter(keys))
        self.has_missed = False  # a key that a secret needs; the file may have it by now

    @property
    def ids(self) -> list[str]:
        """The ids of the keys, the encrypting one first."""
        return list(self._keys)

    @property
    def checks(self) -> list[str]:
        """A value of each key that tells it from another key with its id, and not the key."""
        return [derived[:CHECK_BYTES].hex() for derived in self.derive(CHECK_PURPOSE)]

    def derive(self, purpose: str) -> tuple[bytes, ...]:
        """Return a key of 32 bytes for another purpose from each key, the first one first.

        Source: RFC 5869, with SHA-256.
        """
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        info = purpose.encode()
        return tuple(
            [
                HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(key)
                for key in self._keys.values()
            ]
        )

    def seal(
        self, secret: bytes, *, user_id: int, secret_id: int, created_at_ms: int, key_id: str = ""
    ) -> SealedSecret:
        """Encrypt a secret of a user under a key, by default the first one. Raises UnknownKey."""
        key_id = key_id or self.first
        key, nonce = self._find(key_id), secrets.token_bytes(NONCE_BYTES)
        data = _associated(user_id, secret_id, key_id)
        ciphertext = _cipher(key).encrypt(nonce, secret, data)
        return SealedSecret(
            id=secret_id, key_id=key_id, sealed=nonce + ciphertext, created_at_ms=created_at_ms
        )

    def _find(self, key_id: str) -> bytes:
        key = self._keys.get(key_id)
        if key is None:
            self.has_missed = True
            raise UnknownKey(f"the key file has no key {key_id!r}")
        return key

    def check_of(self, key_id: str) -> str:
        """Return the check value of a key. Raises UnknownKey."""
        self._find(key_id)
        return self.checks[self.ids.index(key_id)]

    def seal_again(self, sealed: SealedSecret, *, user_id: int) -> SealedSecret:
        """Encrypt a secret under the first key; return it unchanged if it is. Raises UnknownKey."""
        if sealed.key_id == self.first:
            return sealed
        secret = self.open(sealed, user_id=user_id)
        new = self.seal(
            secret, user_id=user_id, secret_id=sealed.id, created_at_ms=sealed.created_at_ms
        )
        return replace(new, not_after_ms=sealed.not_after_ms)

    def open(self, sealed: SealedSecret, *, user_id: int) -> bytes:
        """Decrypt a secret of a user. Raises UnknownKey."""
        from cryptography.exceptions import InvalidTag  # Costs 10 MB, and most need no key file.

        key = self._find(sealed.key_id)
        nonce, ciphertext = sealed.sealed[:NONCE_BYTES], sealed.sealed[NONCE_BYTES:]
        data = _associated(user_id, sealed.id, sealed.key_id)
        try:
            return _cipher(key).decrypt(nonce, ciphertext, data)
        except (InvalidTag, ValueError):
            raise UnknownKey(
                f"the key {sealed.key_id!r} does not decrypt secret {sealed.id}"
            ) from None


def parse_keys(text: str) -> SecretKeys:
    """Read a key file. Raises ValueError, without a key in its text."""
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"line {number} is not KEYID and {2 * KEY_BYTES} hexadecimal digits")
        if match[1] in keys:
            raise ValueError(f"line {number} repeats the key {match[1]!r}")
        keys[match[1]] = bytes.fromhex(match[2])
    if not keys:
        raise ValueError("it has no key")
    if len(keys) > KEYS_MAX:
        raise ValueError(f"it has {len(keys)} keys, and at most {KEYS_MAX} are allowed")
    return SecretKeys(keys)


def new_key_id() -> str:
    """Return a random id of a key, so that the keys of two key files fit into one."""
    return f"key-{secrets.token_hex(4)}"


def new_key_line(key_id: str) -> str:
    """Return a line of a key file, with a random key."""
    return f"{key_id} {secrets.token_hex(KEY_BYTES)}\n"


def _associated(user_id: int, secret_id: int, key_id: str) -> bytes:
    return f"tidemill/secret/1|{user_id}|{secret_id}|{key_id}".encode()


def _cipher(key: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)
