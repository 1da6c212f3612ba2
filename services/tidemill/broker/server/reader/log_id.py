"""The name of a log, by which a position in it is known to be of it."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine


def log_id_of(engine: Engine) -> str:
    """Return a name of the log: what its secret, which no other log has, is hashed to."""
    return blake2b(engine.catalog.handle_secret, digest_size=8, person=b"log id").hexdigest()
