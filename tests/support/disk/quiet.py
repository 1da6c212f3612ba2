"""Whether an engine has something that is not durable yet."""

from __future__ import annotations

from tidemill.broker.engine.engine import Engine


def has_pending(engine: Engine) -> bool:
    """Whether memory is ahead of what is durable."""
    return not engine.quiet.is_now
