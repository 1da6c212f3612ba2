"""Loads whose predicates are handed to the source: each is for one predicate, or fails.

Spark keeps one read of a `.load()`: that of the predicates that it handed over last. Where its
frame is looked at with other predicates as well, in one query or in the next, or whole, they may
all be answered by that one read, and what it leaves out is missing without a word. Where Spark
hands over other predicates of the same load the source can tell, and refuses. Of a frame that is
looked at whole behind a predicate it is not told.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path
from typing import Final

from tidemill_pipeline.errors import BadOption

# Where Spark has its own files on this machine. They go when its session ends.
_FOLDERS: Final = "SPARK_LOCAL_DIRS"


def new_load() -> str:
    """Return the name of a load, which everything has that Spark copies of its source."""
    return uuid.uuid4().hex


def check_same_predicates(load: str, asked: str) -> None:
    """Raise BadOption where a load was planned before, and asked for something else then.

    What was asked is noted in Spark's folder: loads are planned in any of several processes, which
    are all beside the driver.
    """
    folders = os.environ.get(_FOLDERS, "")
    if not folders:
        return  # It is not Spark that plans.
    notes = Path(folders.split(",")[0]) / f"tidemill-load-{load}"
    notes.mkdir(exist_ok=True)
    # Written before it is looked: of two that plan at once one at least sees the other.
    (notes / hashlib.sha256(asked.encode()).hexdigest()).touch()
    if len(list(notes.iterdir())) > 1:
        raise BadOption(
            "option pushdown = true: this load was asked with other predicates before, and Spark"
            " answers all looks at one load by one read of it. Give each predicate a .load() of"
            " its own, or leave pushdown out"
        )
