"""The version and commit of this build."""

from __future__ import annotations

import functools
import importlib.metadata
import os


@functools.cache
def version() -> str:
    """Return the version of the installed distribution; empty if none is installed."""
    try:
        return importlib.metadata.version("tidemill")
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def commit() -> str:
    """Return the commit of the image; empty outside an image."""
    return os.environ.get("TIDEMILL_COMMIT", "")
