"""Named tokens in the header of a call: `authorization: Bearer tmk_ID_SECRET` (ADR 0075)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tidemill.common.errors import WrongCredentials
from tidemill.security.signatures import AUTHORIZATION
from tidemill.security.table import token_identity
from tidemill.security.tokens import WRONG, hash_secret, parse_bearer

if TYPE_CHECKING:
    from tidemill.security.table import KnownUser, SecurityTable

SCHEME: Final = "bearer "
SIGNATURE: Final = "signature"
TOKEN: Final = "token"  # noqa: S105  # A label.
KUBERNETES: Final = "kubernetes"
CERTIFICATE: Final = "certificate"
METHODS: Final = (SIGNATURE, TOKEN, KUBERNETES, CERTIFICATE)  # of credentials; a label of metrics


def is_bearer(authorization: str) -> bool:
    """Whether a header has a token instead of a signature."""
    return authorization[: len(SCHEME)].lower() == SCHEME


def method_of(headers: Mapping[str, str]) -> str:
    """Return the kind of the credentials of a call."""
    return TOKEN if is_bearer(headers.get(AUTHORIZATION, "")) else SIGNATURE


def verify_token(table: SecurityTable, authorization: str, now_ms: int) -> KnownUser:
    """Return the user of a bearer token. Raises Unauthorized.

    The order of the checks is: token, its end, enabled. A text names the user only after a
    correct token.
    """
    shown = parse_bearer(authorization)
    known = None if shown is None else table.token_user(shown)
    if known is None or known.token is None:
        error = WrongCredentials(WRONG)
        if shown is not None:
            # The token may have been deleted while its client runs (`revoked_clients.py`).
            error.identities = (token_identity(hash_secret(shown.secret)),)
        raise error
    known.check_token(now_ms)
    return known
