"""The names of broker groups, in the order in which people count them."""

from __future__ import annotations

import re


def natural_order(name: str) -> list[tuple[str, int]]:
    """Return a key by which broker-2 comes before broker-10."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name)]
