"""Ids of items at a broker group, as REST has them: BROKER:NUMBER."""

from __future__ import annotations

from typing import Final

from tidemill.common.errors import BadRequest

NUMBER_MAX: Final = 2**63 - 1


def split_item_id(text: str, what: str) -> tuple[str, int]:
    """Return the broker group and the number of an id. Raises BadRequest."""
    broker, _, number = text.rpartition(":")
    if not broker or not number.isascii() or not number.isdecimal() or int(number) > NUMBER_MAX:
        raise BadRequest(f"the id of {what}, as a list shows it, not {text}")
    return broker, int(number)
