"""Which Tidemill this is."""

from __future__ import annotations

import functools
import importlib.metadata
import os


@functools.cache
def version() -> str:
    """Return the version of the installed distribution; empty where none is installed."""
    try:
        return importlib.metadata.version("tidemill")
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def commit() -> str:
    """Return the commit that an image was built from; empty elsewhere."""
    return os.environ.get("TIDEMILL_COMMIT", "")
