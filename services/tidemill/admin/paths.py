"""Which methods a path has: for `Allow`, and for metrics by the template of a route.

The router knows of the first route that fits a path. Two may, since a name holds any character but
a slash: `/groups/a:resetOffset` is one for GET and one for POST. Here the more specific one counts.
"""

from __future__ import annotations

import re
from typing import NamedTuple, final

from fastapi import FastAPI
from starlette.routing import compile_path

METHODS = frozenset({"get", "put", "post", "delete", "patch", "head", "options"})


class Template(NamedTuple):
    """A route as it is documented."""

    path: str
    pattern: re.Pattern[str]
    methods: tuple[str, ...]


@final
class Paths:
    """The templates of an application, the most specific first."""

    def __init__(self, app: FastAPI) -> None:
        documented = app.openapi()["paths"]
        templates = [
            Template(path, compile_path(path)[0], _methods(operations))
            for path, operations in documented.items()
        ]
        # By what is left of a template without its parameters.
        self._templates = sorted(templates, key=lambda each: -len(re.sub("{.*?}", "", each.path)))

    def find(self, path: str) -> Template | None:
        """Return the template that a path has."""
        return next((each for each in self._templates if each.pattern.match(path)), None)


def _methods(operations: dict[str, object]) -> tuple[str, ...]:
    return tuple(sorted(name.upper() for name in operations if name in METHODS))
