"""The id of a log, which tells positions in different logs apart."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine


def log_id_of(engine: Engine) -> str:
    """Return the id of the log: a hash of its secret, which is unique."""
    return blake2b(engine.catalog.handle_secret, digest_size=8, person=b"log id").hexdigest()
