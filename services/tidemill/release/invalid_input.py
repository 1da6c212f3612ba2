"""The error of options and files that a release job cannot use."""

from __future__ import annotations


class InvalidInput(Exception):
    """An option or a file of a release job has a wrong form; the message says which, and why."""
