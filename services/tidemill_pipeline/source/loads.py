"""Loads with pushdown: the source rejects a second predicate for the same load.

Spark keeps one read per `.load()`, with the predicates of the last pushdown. It may reuse this read
for other predicates on the same frame, and then rows are missing without an error. The source can
detect and reject other predicates. It cannot detect a later use of the frame without a predicate.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path
from typing import Final

from tidemill_pipeline.errors import BadOption

# Folder of Spark's local files, deleted at the end of its session.
_FOLDERS: Final = "SPARK_LOCAL_DIRS"


def new_load() -> str:
    """Return a new load id. Spark's copies of a source share it."""
    return uuid.uuid4().hex


def check_same_predicates(load: str, asked: str) -> None:
    """Raise BadOption if the load was planned before with other predicates.

    Notes in Spark's local folder record the predicates, since any process of the driver may plan.
    """
    folders = os.environ.get(_FOLDERS, "")
    if not folders:
        return  # Not called by Spark.
    notes = Path(folders.split(",")[0]) / f"tidemill-load-{load}"
    notes.mkdir(exist_ok=True)
    # Write before reading: of two concurrent plans, at least one sees the other.
    (notes / hashlib.sha256(asked.encode()).hexdigest()).touch()
    if len(list(notes.iterdir())) > 1:
        raise BadOption(
            "option pushdown = true: this load was planned with other predicates before, and Spark"
            " may reuse one read for all of them. Use a separate .load() for each predicate, or"
            " omit pushdown"
        )
