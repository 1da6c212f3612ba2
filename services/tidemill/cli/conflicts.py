"""The text of the conflicts of a consumer group."""

from __future__ import annotations

from tidemill.cli.messages import printable
from tidemill.common.rest_client import Json
from tidemill.common.times import span


def filter_text(polled: Json) -> str:
    """Describe a filter of a consumer group, and its last poll."""
    expression, client_id = printable(polled["expression"]), printable(polled["clientId"])
    return f"{polled['topic']}: {expression} ({client_id}, {span(polled['polledMs'])} ago)"


def conflict_text(conflict: Json) -> str:
    """Describe a conflict of a consumer group, and what to do."""
    if conflict["kind"] == "order":
        return (
            f"{conflict['topic']} is FIFO and {conflict['group']} is CONCURRENT: the group receives"
            f" its messages out of order; read the topic with a FIFO group"
        )
    filters = ", ".join(
        f"{printable(each['expression'])} ({printable(each['clientId'])})"
        for each in conflict["filters"]
    )
    return (
        f"consumers of {conflict['group']} filter {conflict['topic']} differently: {filters}."
        f" Messages that only one filter matches can be lost for the group; use one filter, or a"
        f" group for each filter"
    )
