"""`tidemill topic create NEW --like OLD`: the settings of another topic."""

from __future__ import annotations

from typing import Final

import typer

from tidemill.cli.rest import call, segment
from tidemill.common.rest_client import Json

SETTINGS: Final = ("messageType", "queues", "deliverySpreadMs")
# Settings with fields of their own. The other fields of a deduplication are its state.
NESTED: Final = {
    "retention": ("ms", "bytes", "acked"),
    "transaction": ("firstCheckMs", "periodMs", "attempts"),
    "dedup": ("windowMs", "keyFrom", "mode", "maxWaitMs", "memoryBytes"),
}


def like(context: typer.Context, model: str, given: dict[str, Json]) -> dict[str, Json]:
    """Return the given settings, and for missing ones those of the topic `model`."""
    old = call(context, "GET", f"/topics/{segment(model)}")
    if old["isSystem"]:
        raise typer.BadParameter(f"{model} is a system topic, and its settings are not copied")
    merged = {key: old[key] for key in SETTINGS if key in old}
    for key, fields in NESTED.items():
        if key in old:
            merged[key] = {field: old[key][field] for field in fields if field in old[key]}
    for key, value in given.items():
        is_merged = isinstance(value, dict) and key in merged
        merged[key] = {**merged[key], **value} if is_merged else value
    return merged
