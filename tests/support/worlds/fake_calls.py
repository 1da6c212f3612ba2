"""`BrokerClient.call` for fake brokers."""

from __future__ import annotations

import re
from typing import Any


class CallsByRequest:
    """A fake broker whose methods have the names of the RPCs, such as `get_topic_status`."""

    async def call(self, call: object, request: Any) -> Any:
        """Pass `request` to the method that its type names; `call` does not matter."""
        words = type(request).__name__.removesuffix("Request")
        return await getattr(self, re.sub(r"(?<!^)(?=[A-Z])", "_", words).lower())(request)
