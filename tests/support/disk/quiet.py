"""A check for state of an engine that is not durable yet."""

from __future__ import annotations

from tidemill.broker.engine.engine import Engine


def has_pending(engine: Engine) -> bool:
    """Return whether the memory is ahead of the durable state."""
    return not engine.quiet.is_now
