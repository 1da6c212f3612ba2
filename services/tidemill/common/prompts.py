"""Errors and questions of the commands, shared by both distributions."""

from __future__ import annotations

from typing import NoReturn

import typer


def confirm(question: str) -> None:
    """Ask a yes-no question; end the command for any answer other than yes."""
    typer.confirm(question, abort=True, err=True)


def warn(sentence: str) -> None:
    """Print a warning on standard error."""
    typer.echo(f"warning: {sentence}", err=True)


def fail(reason: str, status: int) -> NoReturn:
    """Print an error on standard error and end the command with `status`."""
    typer.echo(f"error: {reason}", err=True)
    raise typer.Exit(status)
