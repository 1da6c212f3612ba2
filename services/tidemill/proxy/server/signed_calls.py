"""The check of signatures under the secrets of users, which are decrypted on their first use."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import structlog

from tidemill.common.errors import KeyMissing, WrongCredentials
from tidemill.security.identities import SECRETS_MAX, SealedSecret, User
from tidemill.security.secret_keys import SecretKeys, UnknownKey
from tidemill.security.signatures import SignedHeader, Signer, find_signer

if TYPE_CHECKING:
    from tidemill.security.table import KnownUser, SecurityTable

WRONG: Final = "the access key or the signature is wrong"

log = structlog.get_logger()


@final
class SignedCalls:
    """The check of the signatures of all calls of the process."""

    def __init__(self, table: SecurityTable, keys: Callable[[], SecretKeys | None]) -> None:
        """`keys` returns the keys of the secrets; None without a key file."""
        self._table = table
        self._keys = keys
        self._random_signers = tuple([Signer(secrets.token_bytes(32)) for _ in range(SECRETS_MAX)])
        # Ids of users and of their secrets. The owner clears it after each change.
        self.undecryptable: set[tuple[int, int]] = set()

    @property
    def has_keys(self) -> bool:
        """Whether there is a key file."""
        return self._keys() is not None

    def verify(self, header: SignedHeader) -> tuple[KnownUser, SealedSecret]:
        """Return the user and the secret that signed. Raises Unauthorized, KeyMissing.

        An unknown user costs the same time as a wrong signature.
        """
        known = self._table.user(header.access_key)
        signers = self._random_signers if known is None else known.signers or self._open(known)
        index = find_signer(header, signers)
        if known is None or index is None or index >= len(known.user.secrets):
            error = WrongCredentials(WRONG)
            error.claimed_user = header.access_key
            raise error
        return known, known.user.secrets[index]

    def find_again(self, before: User, sealed: bytes) -> tuple[KnownUser, SealedSecret] | None:
        """Return the present user and secret of a verified header, if both still exist."""
        known = self._table.user(before.name)
        if known is None or known.user.id != before.id:
            return None
        for secret in known.user.secrets:
            if secret.sealed == sealed:
                return known, secret
        return None

    def _open(self, known: KnownUser) -> tuple[Signer, ...]:
        """Return the signers of a user's secrets, filled up to SECRETS_MAX with random ones."""
        keys, user = self._keys(), known.user
        if keys is None:
            raise KeyMissing("this proxy has no security_key_file, so it verifies no signature")
        opened = []
        for secret in user.secrets:
            try:
                opened.append(Signer(keys.open(secret, user_id=user.id)))
            except UnknownKey as error:
                if (user.id, secret.id) not in self.undecryptable:
                    self.undecryptable.add((user.id, secret.id))
                    log.error(  # noqa: TRY400  # A traceback adds nothing to the reason.
                        "secret not decrypted", user=user.name, reason=str(error)
                    )
                raise KeyMissing(f"a secret cannot be decrypted: {error}") from None
        known.signers = (*opened, *self._random_signers)[:SECRETS_MAX]
        return known.signers
